"""The generation: what binds the graphs and the checkpoint of an artifact folder to each other.

Each graph has the identifier of its generation in its metadata. The checkpoint has it too, with the
size and the CRC-32 of each graph file, and keeps it through training. So a file of another
generation, or a damaged one, is refused instead of computing wrong numbers.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from onnxtrain.errors import CheckpointError
from onnxtrain.format import strict_json
from onnxtrain.format.checkpoint.content import RESERVED_PREFIX, Property

PROPERTY = "generation"  # of the checkpoint, among the reserved ones
_LARGEST = 2**53 - 1, 2**32 - 1
Digest = tuple[int, int]


def digest_of(data: bytes | memoryview) -> Digest:
    """Return size and CRC-32 of a file."""
    return len(data), zlib.crc32(data)


def is_identifier(found: object) -> bool:
    """Whether an untrusted value is the identifier of a generation."""
    return isinstance(found, str) and re.fullmatch(r"[0-9a-f]{32}", found) is not None


@dataclass(frozen=True)
class Generation:
    """An identifier, and size and CRC-32 of each graph file by its name without the prefix."""

    identifier: str
    files: Mapping[str, Digest] = field(default_factory=dict)

    @classmethod
    def placeholder(cls, files: Iterable[str]) -> Generation:
        """Return one that takes as much room in a checkpoint as that of the finished files."""
        return cls("0" * 32, dict.fromkeys(files, _LARGEST))

    def digests(self, ending: str) -> list[Digest]:
        """Return those of files of a format."""
        return [digest for name, digest in self.files.items() if name.endswith(ending)]

    def property(self) -> dict[str, Property]:
        """Return the property of a checkpoint; its length depends on the names of files alone."""
        room = len(self.placeholder(self.files)._to_json())
        return {RESERVED_PREFIX + PROPERTY: self._to_json().ljust(room)}

    def _to_json(self) -> str:
        return json.dumps({"id": self.identifier, "files": self.files}, separators=(",", ":"))

    @classmethod
    def from_property(cls, text: Property | None) -> Generation | None:
        """Read the property of an untrusted checkpoint, if there is one."""
        if text is None:
            return None
        try:
            found = strict_json.loads_plain(str(text))
            files = {name: (size, crc) for name, (size, crc) in found["files"].items()}
            identifier = found["id"]
            numbers = [n for pair in files.values() for n in pair]
            if not is_identifier(identifier) or not all(type(n) is int for n in numbers):
                raise ValueError
        except (ValueError, TypeError, LookupError, AttributeError):
            raise CheckpointError(
                "the checkpoint holds a damaged record of the graphs that it belongs to"
            ) from None
        return cls(identifier, files)
