"""Lay out FlatBuffers files from front to back, without holding them in memory.

FlatBuffers' own builder grows one buffer from the end to the front: it needs 2 GB for a model of
1 GB, and knows the offsets of tensors last. Here tables, strings and short vectors come first, then
aligned bulk data, which is copied straight to the file.

Build a tree of `Table`, `Vector`, `Int64s`, `Text` and `Bulk`; `lay_out` assigns the offsets.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from onnxtrain.errors import CheckpointError
from onnxtrain.format.checkpoint.flat_reader import SCALARS

# FlatBuffers' limit; ONNX Runtime does not read larger files.
MAX_SIZE = 2**31 - 2


@dataclass(eq=False)
class Text:
    """A string."""

    value: bytes


@dataclass(eq=False)
class Int64s:
    """A vector of int64."""

    values: Sequence[int]


@dataclass(eq=False)
class Bulk:
    """A vector of bytes that the caller writes at `offset`."""

    length: int
    alignment: int
    offset: int = -1


@dataclass(eq=False)
class Vector:
    """A vector of tables or of strings."""

    items: Sequence[Node]


@dataclass(eq=False)
class Table:
    """A table: the number of a field in the schema → its value. Absent fields are left out."""

    references: dict[int, Node] = field(default_factory=dict)
    scalars: dict[int, tuple[str, int | float | bool]] = field(default_factory=dict)

    def refer(self, slot: int, node: Node) -> None:
        """Set a field that is a table, a vector or a string."""
        self.references[slot] = node

    def set(self, slot: int, kind: str, value: int | float | bool, default: int = 0) -> None:
        """Set a scalar field; FlatBuffers omits a field with its default value."""
        if value != default:
            self.scalars[slot] = (kind, value)


Node = Table | Vector | Int64s | Text | Bulk


@dataclass
class Layout:
    """The front of the file as bytes, and the bulk data by offset."""

    front: bytes
    bulks: list[Bulk]
    size: int


class _Front:
    """The part of the file that is built in memory."""

    def __init__(self, identifier: bytes) -> None:
        self.bytes = bytearray(4) + identifier
        # Positions of offsets that are not known yet, and what they refer to.
        self.open: deque[tuple[int, Node]] = deque()
        self._vtables: dict[bytes, int] = {}

    def pad(self, alignment: int, ahead: int = 0) -> None:
        """Add zeros until the position `ahead` bytes further on is aligned."""
        self.bytes += bytes(-(len(self.bytes) + ahead) % alignment)

    def place(self, node: Table | Vector | Int64s | Text) -> int:
        """Append the object and return its position."""
        if isinstance(node, Table):
            return self._place_table(node)
        if isinstance(node, Text):
            self.pad(4)
            position = len(self.bytes)
            self.bytes += struct.pack("<I", len(node.value)) + node.value + b"\0"
        elif isinstance(node, Int64s):
            self.pad(8, ahead=4)
            position = len(self.bytes)
            self.bytes += struct.pack(f"<I{len(node.values)}q", len(node.values), *node.values)
        else:
            self.pad(4)
            position = len(self.bytes)
            self.bytes += struct.pack("<I", len(node.items))
            for item in node.items:
                self.open.append((len(self.bytes), item))
                self.bytes += bytes(4)
        return position

    def _place_table(self, table: Table) -> int:
        # Widest fields first, right behind the four bytes of the offset to the vtable.
        fields = [(SCALARS[kind].size, slot) for slot, (kind, _) in table.scalars.items()]
        fields += [(4, slot) for slot in table.references]
        fields.sort(key=lambda item: (-item[0], item[1]))
        offsets, size = {}, 4
        for width, slot in fields:
            offsets[slot] = size
            size += width
        count = max(offsets, default=-1) + 1
        slots = [offsets.get(slot, 0) for slot in range(count)]
        vtable = self._place_vtable(struct.pack(f"<HH{count}H", 4 + 2 * count, size, *slots))
        if fields and fields[0][0] == 8:
            self.pad(8, ahead=4)
        else:
            self.pad(4)
        position = len(self.bytes)
        self.bytes += struct.pack("<i", position - vtable) + bytes(size - 4)
        for slot, (kind, value) in table.scalars.items():
            SCALARS[kind].pack_into(self.bytes, position + offsets[slot], value)
        for slot, node in table.references.items():
            self.open.append((position + offsets[slot], node))
        return position

    def _place_vtable(self, vtable: bytes) -> int:
        """Tables of one shape share a vtable."""
        if vtable not in self._vtables:
            self.pad(2)
            self._vtables[vtable] = len(self.bytes)
            self.bytes += vtable
        return self._vtables[vtable]


def lay_out(root: Table, identifier: bytes) -> Layout:
    """Assign offsets to all objects of the tree; an object always follows its owner."""
    front = _Front(identifier)
    front.open.append((0, root))
    waiting: list[tuple[int, Bulk]] = []
    while front.open:
        reference, node = front.open.popleft()
        if isinstance(node, Bulk):
            waiting.append((reference, node))
            continue
        position = front.place(node)
        _refer(front.bytes, reference, position)
    end = len(front.bytes)
    for reference, bulk in waiting:
        # The length, four bytes, stands in front of the data.
        bulk.offset = end + 4 + -(end + 4) % bulk.alignment
        _refer(front.bytes, reference, bulk.offset - 4)
        end = bulk.offset + bulk.length
    _check_size(end)
    return Layout(bytes(front.bytes), [bulk for _, bulk in waiting], end)


def _refer(front: bytearray, reference: int, position: int) -> None:
    _check_size(position)
    struct.pack_into("<I", front, reference, position - reference)


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise CheckpointError(
            f"the checkpoint needs more than {MAX_SIZE} bytes besides its external data, the limit "
            "of its format"
        )
