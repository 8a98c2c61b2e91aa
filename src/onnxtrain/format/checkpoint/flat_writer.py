"""Lay out FlatBuffers files from front to back, without holding them in memory.

FlatBuffers' own builder grows one buffer from the end to the front: it needs 2 GB for a model of
1 GB, and knows the offsets of tensors last. Here tables, strings and short vectors come first, then
aligned bulk data, which is copied straight to the file.

A tree of plain objects describes the file: a dict is a table (the number of a field in the schema →
its value), a list a vector of tables or strings, a tuple one of int64, bytes a string.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass
from typing import Any

from onnxtrain.errors import CheckpointError
from onnxtrain.format.checkpoint.flat_reader import SCALARS

# FlatBuffers' limit; ONNX Runtime does not read larger files.
MAX_SIZE = 2**31 - 2


@dataclass(frozen=True)
class Scalar:
    """A number in a table, of a kind in `SCALARS`; FlatBuffers omits a field with its default."""

    kind: str
    value: int | float
    default: int = 0


@dataclass(eq=False)
class Bulk:
    """A vector of bytes: the elements of a tensor, which the caller writes at `offset`."""

    tensor: Any
    length: int
    alignment: int
    offset: int = -1


Table = dict[int, Any]
Node = Table | list[Any] | tuple[int, ...] | bytes | Bulk


class _Front:
    """The part of the file that is built in memory."""

    def __init__(self, identifier: bytes) -> None:
        self.bytes = bytearray(4) + identifier
        # Positions of offsets that are not known yet, and what they refer to.
        self.open: deque[tuple[int, Node]] = deque()
        self._vtables: dict[bytes, int] = {}

    def place(self, node: Table | list[Any] | tuple[int, ...] | bytes) -> int:
        """Append the object and return its position."""
        if isinstance(node, dict):
            return self._place_table(node)
        self._pad(8 if isinstance(node, tuple) else 4, ahead=4 if isinstance(node, tuple) else 0)
        position = len(self.bytes)
        self.bytes += struct.pack("<I", len(node))
        if isinstance(node, bytes):
            self.bytes += node + b"\0"
        elif isinstance(node, tuple):
            self.bytes += struct.pack(f"<{len(node)}q", *node)
        else:
            self.open += ((len(self.bytes) + 4 * index, item) for index, item in enumerate(node))
            self.bytes += bytes(4 * len(node))
        return position

    def _place_table(self, table: Table) -> int:
        fields = {
            slot: value
            for slot, value in table.items()
            if not isinstance(value, Scalar) or value.value != value.default
        }
        widths = {
            slot: SCALARS[value.kind].size if isinstance(value, Scalar) else 4
            for slot, value in fields.items()
        }
        # Widest fields first, right behind the four bytes of the offset to the vtable.
        offsets, size = {}, 4
        for slot in sorted(fields, key=lambda slot: (-widths[slot], slot)):
            offsets[slot] = size
            size += widths[slot]
        slots = [offsets.get(slot, 0) for slot in range(max(offsets, default=-1) + 1)]
        vtable = struct.pack(f"<{2 + len(slots)}H", 4 + 2 * len(slots), size, *slots)
        if vtable not in self._vtables:  # tables of one shape share a vtable
            self._pad(2)
            self._vtables[vtable] = len(self.bytes)
            self.bytes += vtable
        self._pad(max([4, *widths.values()]), ahead=4)
        position = len(self.bytes)
        self.bytes += struct.pack("<i", position - self._vtables[vtable]) + bytes(size - 4)
        for slot, value in fields.items():
            if isinstance(value, Scalar):
                SCALARS[value.kind].pack_into(self.bytes, position + offsets[slot], value.value)
            else:
                self.open.append((position + offsets[slot], value))
        return position

    def _pad(self, alignment: int, ahead: int = 0) -> None:
        """Add zeros until the position `ahead` bytes further on is aligned."""
        self.bytes += bytes(-(len(self.bytes) + ahead) % alignment)


def lay_out(root: Table, identifier: bytes) -> tuple[bytes, list[Bulk]]:
    """Assign offsets to all objects of the tree; an object always follows its owner.

    Returns the front of the file, and the bulk data in the order in which they follow.
    """
    front = _Front(identifier)
    front.open.append((0, root))
    waiting: list[tuple[int, Bulk]] = []
    while front.open:
        reference, node = front.open.popleft()
        if isinstance(node, Bulk):
            waiting.append((reference, node))
        else:
            _refer(front.bytes, reference, front.place(node))
    end = len(front.bytes)
    for reference, bulk in waiting:
        # The length, four bytes, stands in front of the data.
        bulk.offset = end + 4 + -(end + 4) % bulk.alignment
        _refer(front.bytes, reference, bulk.offset - 4)
        end = bulk.offset + bulk.length
    _check_size(end)
    return bytes(front.bytes), [bulk for _, bulk in waiting]


def _refer(front: bytearray, reference: int, position: int) -> None:
    _check_size(position)
    struct.pack_into("<I", front, reference, position - reference)


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise CheckpointError(
            f"the checkpoint needs more than {MAX_SIZE} bytes besides its external data, the limit "
            "of its format"
        )
