"""Read FlatBuffers files that may be broken or hostile, with the standard library.

FlatBuffers' own accessors trust the file. These check each offset, length and string before they
follow it, and bound the work by the size of the file: a file cannot crash the reader, keep it busy
or fill the memory. Every error is a `CheckpointError` that names the file, the object and the byte.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NoReturn

from onnxtrain.errors import CheckpointError

# The same bound as FlatBuffers' verifier, which ONNX Runtime runs over checkpoints.
MAX_TABLES = 1_000_000

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

    def __init__(self, data: memoryview, source: str) -> None:
        self.data, self.source = data, source
        self.tables = 0
        self._read = 0
        self._strings: dict[int, str] = {}

    def fail(self, what: str, where: str, position: int | None = None) -> NoReturn:
        """Raise an error about the object `where`."""
        at = "" if position is None else f" at byte {position}"
        raise CheckpointError(f"{self.source}: {where}{at}: {what}")

    def root(self, identifier: bytes, where: str) -> FlatTable:
        """The root table of a file that carries `identifier`."""
        if len(self.data) < 8:
            self.fail(f"the file ends after {len(self.data)} bytes, before its header does", where)
        found = bytes(self.data[4:8])
        if found != identifier:
            what = f"the file identifier is {found!r} instead of {identifier!r}"
            self.fail(f"{what}: it is not a {where}", where, 4)
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


class FlatTable:
    """A table of the file, with fields by their number in the schema."""

    def __init__(self, reader: FlatReader, position: int, where: str) -> None:
        self._reader, self._position, self.where = reader, position, where
        reader.tables += 1
        if reader.tables > MAX_TABLES:
            reader.fail(f"the file has more than {MAX_TABLES} tables", where)
        vtable: int = position - reader.number("i32", position, where)
        if vtable < 0 or vtable + 4 > len(reader.data):
            self.fail("the table points to a layout outside the file")
        vtable_size: int = reader.number("u16", vtable, where)
        self._table_size: int = reader.number("u16", vtable + 2, where)
        if vtable_size < 4 or vtable_size % 2 or self._table_size < 4:
            reader.fail("the layout of the table is damaged", where, vtable)
        reader.need(vtable, vtable_size, where)
        reader.claim(position, self._table_size, where)
        self._vtable = vtable
        self._slots = (vtable_size - 4) // 2

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
        return "" if at is None else self._reader.string(at, f"{self.where}.{name}")

    def table(self, slot: int, name: str) -> FlatTable | None:
        """A field that is a table."""
        at = self._target(slot, name)
        return None if at is None else FlatTable(self._reader, at, f"{self.where}.{name}")

    def tables(self, slot: int, name: str) -> Iterator[FlatTable]:
        """A vector of tables."""
        return (FlatTable(self._reader, *item) for item in self._items(slot, name))

    def strings(self, slot: int, name: str) -> list[str]:
        """A vector of strings."""
        return [self._reader.string(*item) for item in self._items(slot, name)]

    def int64s(self, slot: int, name: str, at_most: int) -> tuple[int, ...]:
        """A vector of signed 64-bit integers."""
        start, count = self._vector(slot, 8, name)
        if count > at_most:
            self.fail(f"{name} has {count} entries, where at most {at_most} are allowed")
        return struct.unpack_from(f"<{count}q", self._reader.data, start)

    def data(self, slot: int, name: str) -> memoryview:
        """A vector of bytes."""
        start, count = self._vector(slot, 1, name)
        return self._reader.data[start : start + count]

    def _field(self, slot: int, size: int, name: str) -> int | None:
        """Return the position of a field, or None if it is absent."""
        if slot >= self._slots:
            return None
        offset: int = self._reader.number("u16", self._vtable + 4 + 2 * slot, self.where)
        if offset == 0:
            return None
        if offset < 4 or offset + size > self._table_size:
            self.fail(f"the field {name!r} lies outside its table")
        return self._position + offset

    def _target(self, slot: int, name: str) -> int | None:
        """Return the position of the table, vector or string in a field, or None."""
        at = self._field(slot, 4, name)
        return None if at is None else self._reader.follow(at, f"{self.where}.{name}")

    def _vector(self, slot: int, item_size: int, name: str) -> tuple[int, int]:
        """Return where the items of a vector begin, and their number: 0 if it is absent."""
        at, where = self._target(slot, name), f"{self.where}.{name}"
        if at is None:
            return 0, 0
        count: int = self._reader.number("u32", at, where)
        self._reader.claim(at, 4 + count * item_size, where)
        return at + 4, count

    def _items(self, slot: int, name: str) -> Iterator[tuple[int, str]]:
        """Return the position of each table or string of a vector, and what to call it."""
        start, count = self._vector(slot, 4, name)
        for index in range(count):
            item = f"{self.where}.{name}[{index}]"
            yield self._reader.follow(start + 4 * index, item), item
