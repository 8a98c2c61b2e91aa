"""Where the elements of tensors are, and how those of a second file are read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from onnxtrain.errors import CheckpointError
from onnxtrain.format.checkpoint import checksum
from onnxtrain.format.checkpoint import store as disk
from onnxtrain.format.checkpoint.flat_file import FlatTable
from onnxtrain.format.file_bytes import require_beside

ALIGNMENT = 64  # for vector instructions
_UPSTREAM_ALIGNMENT = 4
# Between two tensors: as much as a writer may need to begin at a page of memory.
_LARGEST_GAP = 4096


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a checkpoint file: its type, and where its elements are.

    They are `size` bytes at `offset`, in the file itself or in external data, or `strings`.
    """

    table: FlatTable
    code: int
    dims: tuple[int, ...]
    offset: int = 0
    size: int = 0
    is_external: bool = False
    strings: Sequence[str] | None = None


def require_apart(entries: Iterable[TensorEntry]) -> int:
    """Check that tensors of one file do not overlap; return where the last one ends.

    Training one of two that share bytes would change the other.
    """
    end = 0
    for entry in sorted(entries, key=lambda entry: entry.offset):
        if not entry.size:
            continue
        if entry.offset < end:
            entry.table.fail("its elements overlap with those of another tensor")
        if entry.is_external and entry.offset - end >= _LARGEST_GAP:
            entry.table.fail(f"{entry.offset - end} bytes of external data before it are unused")
        end = entry.offset + entry.size
    return end


def read_external(
    path: Path,
    identifier: str | None,
    entries: Sequence[TensorEntry],
    announced: bool,
    verify: bool,
) -> memoryview:
    """Return the external data of the checkpoint `path`, after all checks.

    `announced` says that the checkpoint has checksums, and so do its data.
    """
    for entry in entries:
        _check_offset(entry, ALIGNMENT if announced else _UPSTREAM_ALIGNMENT)
    end = require_apart(entries)
    with disk.open_data(path, identifier, may_be_unmarked=not announced) as file:
        found = file.path
        with disk.translated("read", found):
            require_beside(found, path)
            if file.size < end:
                what = f"{end} bytes of external data are needed, but {found} has {file.size}"
                raise CheckpointError(f"{path}: {what}: it is truncated or damaged")
            if not announced:
                return checksum.read_blocks(file, end)
            try:
                return checksum.read_checked(file, file.size - disk.FOOTER_SIZE, end, verify)
            except ValueError as wrong:
                raise CheckpointError(f"{found} is damaged: {wrong}") from None
            except checksum.DamagedBlock as block:
                start, stop = block.args
                raise CheckpointError(
                    f"{found} is damaged: the checksum of bytes {start} to {stop} does not match. "
                    f"They belong to {_shown_between(entries, start, stop)}"
                ) from None


def _check_offset(entry: TensorEntry, alignment: int) -> None:
    if entry.offset < 0 or entry.offset % alignment:
        entry.table.fail(
            f"the offset in the external data is {entry.offset}, not a multiple of {alignment}"
        )


def _shown_between(entries: Iterable[TensorEntry], start: int, stop: int) -> str:
    touched = [e for e in entries if e.offset < stop and e.offset + e.size > start]
    return ", ".join(entry.table.where for entry in touched[:3]) or "no tensor"
