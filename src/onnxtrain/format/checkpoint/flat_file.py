"""FlatBuffers files: read those that may be broken or hostile, and lay out new ones.

FlatBuffers' own accessors trust the file. `FlatReader` checks each offset, length and string before
it follows it, and bounds the work by the size of the file: a file cannot crash it, keep it busy or
fill the memory. Every error names the file, the object and the byte: a `CheckpointError`, or what
the caller asks for.

FlatBuffers' own builder grows one buffer from the end to the front: it needs 2 GB for a model of
1 GB, and knows the offsets of tensors last. `lay_out` puts tables, strings and short vectors first,
then aligned bulk data, which is copied straight to the file.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from onnxtrain.errors import CheckpointError, OnnxTrainError

# The same bound as FlatBuffers' verifier, which ONNX Runtime runs over checkpoints.
MAX_TABLES = 1_000_000
# Distinct ones.
MAX_STRINGS = MAX_TABLES
# More than any table of the schema has. A vtable may have room for 32,000.
_MOST_FIELDS = 8
# FlatBuffers' limit; ONNX Runtime does not read larger files.
MAX_SIZE = 2**31 - 2

SCALARS = {
    kind: struct.Struct(f"<{code}")
    for kind, code in {
        "u8": "B",
        "u16": "H",
        "u32": "I",
        "i32": "i",
        "i64": "q",
        "f32": "f",
    }.items()
}


class FlatReader:
    """The bytes of a FlatBuffers file, and how many of them were read."""

    def __init__(
        self, data: memoryview, source: str, error: type[OnnxTrainError] = CheckpointError
    ) -> None:
        self.data, self.source = data, source
        self._error = error
        self.tables = 0
        self._read = 0
        self._strings: dict[int, str] = {}
        self._vtables: dict[int, tuple[int, ...]] = {}

    def fail(self, what: str, where: str, position: int | None = None) -> NoReturn:
        """Raise an error about the object `where`."""
        at = "" if position is None else f" at byte {position}"
        raise self._error(f"{self.source}: {where}{at}: {what}")

    def root(self, identifier: bytes, where: str) -> FlatTable:
        """The root table of a file that carries `identifier`."""
        if len(self.data) < 8:
            self.fail(f"the file ends after {len(self.data)} bytes, before its header does", where)
        found = bytes(self.data[4:8])
        if found != identifier:
            what = f"the file identifier is {found!r} instead of {identifier!r}"
            article = "an" if where[0] in "aeiou" else "a"
            self.fail(f"{what}: it is not {article} {where}", where, 4)
        return FlatTable(self, self.follow(0, where), where)

    def need(self, position: int, size: int, where: str) -> None:
        """Check that `size` bytes at `position` lie within the file."""
        if position < 0 or position + size > len(self.data):
            what = f"{size} bytes are needed, but the file has {len(self.data)}"
            self.fail(f"{what}: it is truncated or damaged", where, position)

    def claim(self, position: int, size: int, where: str) -> None:
        """Count the bytes of an object.

        Objects of a valid file do not overlap, so the sum of their sizes cannot exceed the size of
        the file; it does in a file that was made to expand without end.
        """
        self.need(position, size, where)
        self._read += size
        if self._read > len(self.data):
            self.fail("objects in the file overlap", where, position)

    def number(self, kind: str, position: int, where: str) -> Any:
        """Read a number of a kind in `SCALARS`."""
        scalar = SCALARS[kind]
        self.need(position, scalar.size, where)
        return scalar.unpack_from(self.data, position)[0]

    def follow(self, position: int, where: str) -> int:
        """Return the position that the offset stored at `position` points to."""
        offset: int = self.number("u32", position, where)
        if offset == 0:
            self.fail("an offset is zero", where, position)
        self.need(position + offset, 4, where)
        return position + offset

    def string(self, position: int, where: str) -> str:
        """Read the string at `position`. Several objects may share one string."""
        if position not in self._strings:
            if len(self._strings) >= MAX_STRINGS:
                self.fail(f"the file has more than {MAX_STRINGS} strings", where, position)
            length: int = self.number("u32", position, where)
            # The terminating zero is part of the format, not of the length.
            self.claim(position, 4 + length + 1, where)
            start = position + 4
            if self.data[start + length] != 0:
                self.fail("a string does not end with a zero byte", where, start + length)
            try:
                self._strings[position] = str(self.data[start : start + length], "utf-8")
            except UnicodeDecodeError as error:
                self.fail("a string is not valid UTF-8", where, start + error.start)
        return self._strings[position]

    def vtable(self, position: int, where: str) -> tuple[int, ...]:
        """Return the size of tables of a layout, and the offset of each field in them."""
        if position not in self._vtables:
            if position < 0 or position + 4 > len(self.data):
                self.fail("the table points to a layout outside the file", where)
            size, table_size = struct.unpack_from("<HH", self.data, position)
            if size < 4 or size % 2 or table_size < 4:
                self.fail("the layout of the table is damaged", where, position)
            self.need(position, size, where)
            fields = min(size // 2 - 2, _MOST_FIELDS)
            offsets = struct.unpack_from(f"<{fields}H", self.data, position + 4)
            self._vtables[position] = (table_size, *offsets)
        return self._vtables[position]

    def targets(self, start: int, count: int, where: str) -> list[int]:
        """Return the positions that consecutive offsets point to, in a vector that was claimed."""
        offsets = np.frombuffer(self.data, "<u4", count, start).astype(np.int64)
        positions = offsets + np.arange(start, start + 4 * count, 4)
        wrong = np.flatnonzero((offsets == 0) | (positions + 4 > len(self.data)))
        if wrong.size:
            self.follow(start + 4 * int(wrong[0]), f"{where}[{wrong[0]}]")
        found: list[int] = positions.tolist()
        return found


class FlatTable:
    """A table of the file, with fields by their number in the schema."""

    def __init__(self, reader: FlatReader, position: int, where: str) -> None:
        self._reader, self._position, self.where = reader, position, where
        reader.tables += 1
        if reader.tables > MAX_TABLES:
            reader.fail(f"the file has more than {MAX_TABLES} tables", where)
        reader.need(position, 4, where)
        vtable = position - struct.unpack_from("<i", reader.data, position)[0]
        self._size, *self._offsets = reader.vtable(vtable, where)
        reader.claim(position, self._size, where)

    def fail(self, what: str) -> NoReturn:
        """Raise an error about the table."""
        self._reader.fail(what, self.where, self._position)

    def number(self, slot: int, kind: str, name: str, default: float = 0) -> Any:
        """The number in a field, of a kind in `SCALARS`."""
        at = self._field(slot, SCALARS[kind].size, name)
        return default if at is None else self._reader.number(kind, at, self.where)

    def flag(self, slot: int, name: str) -> bool:
        """A field of type bool."""
        value = self.number(slot, "u8", name)
        if value > 1:
            self.fail(f"the flag {name!r} is {value} instead of 0 or 1")
        return bool(value)

    def string(self, slot: int, name: str) -> str:
        """A string; "" if it is absent."""
        at = self._target(slot, name)
        return "" if at is None else self._reader.string(at, self.where)

    def table(self, slot: int, name: str) -> FlatTable | None:
        """A field that is a table."""
        at = self._target(slot, name)
        return None if at is None else FlatTable(self._reader, at, f"{self.where}.{name}")

    def tables(self, slot: int, name: str) -> Iterator[FlatTable]:
        """A vector of tables."""
        where = f"{self.where}.{name}"
        for index, position in enumerate(self._items(slot, name)):
            yield FlatTable(self._reader, position, f"{where}[{index}]")

    def strings(self, slot: int, name: str) -> list[str]:
        """A vector of strings."""
        where = f"{self.where}.{name}"
        return [self._reader.string(position, where) for position in self._items(slot, name)]

    def int64s(self, slot: int, name: str, at_most: int) -> tuple[int, ...]:
        """A vector of signed 64-bit integers."""
        start, count = self._vector(slot, 8, name)
        if count > at_most:
            self.fail(f"{name} has {count} entries, where at most {at_most} are allowed")
        return struct.unpack_from(f"<{count}q", self._reader.data, start)

    def span(self, slot: int, name: str) -> tuple[int, int]:
        """Where the bytes of a vector begin in the file, and their number."""
        return self._vector(slot, 1, name)

    def _field(self, slot: int, size: int, name: str) -> int | None:
        """Return the position of a field, or None if it is absent."""
        offset = self._offsets[slot] if slot < len(self._offsets) else 0
        if offset == 0:
            return None
        if offset < 4 or offset + size > self._size:
            self.fail(f"the field {name!r} lies outside its table")
        return self._position + offset

    def _target(self, slot: int, name: str) -> int | None:
        """Return the position of the table, vector or string in a field, or None."""
        at = self._field(slot, 4, name)
        return None if at is None else self._reader.follow(at, self.where)

    def _vector(self, slot: int, item_size: int, name: str) -> tuple[int, int]:
        """Return where the items of a vector begin, and their number: 0 if it is absent."""
        at = self._target(slot, name)
        if at is None:
            return 0, 0
        count: int = self._reader.number("u32", at, self.where)
        self._reader.claim(at, 4 + count * item_size, self.where)
        return at + 4, count

    def _items(self, slot: int, name: str) -> list[int]:
        """Return the position of each table or string of a vector."""
        start, count = self._vector(slot, 4, name)
        if count > MAX_TABLES:
            self.fail(f"{name} has {count} entries, where at most {MAX_TABLES} are allowed")
        return self._reader.targets(start, count, f"{self.where}.{name}")


# ---- writing -------------------------------------------------------------------------------------


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


# A tree of plain objects describes the file: a dict is a table (the number of a field in the schema
# → its value), a list a vector of tables or strings, a tuple one of int64, bytes a string.
Table = dict[int, Any]
Node = Table | list[Any] | tuple[int, ...] | bytes | Bulk


class _Front:
    """The part of the file that is built in memory."""

    def __init__(self, head: bytes) -> None:
        self.bytes = bytearray(4) + head
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


def lay_out(root: Table, head: bytes) -> tuple[bytearray, list[Bulk], int]:
    """Assign offsets to all objects of the tree; an object always follows its owner.

    `head` follows the first four bytes: the identifier of the file, and what no table refers to.
    Returns the front of the file, the bulk data in the order in which they follow, and the size of
    all.
    """
    front = _Front(head)
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
    return front.bytes, [bulk for _, bulk in waiting], end


def _refer(front: bytearray, reference: int, position: int) -> None:
    _check_size(position)
    struct.pack_into("<I", front, reference, position - reference)


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise CheckpointError(
            f"the checkpoint needs more than {MAX_SIZE} bytes besides its external data, the limit "
            "of its format"
        )
