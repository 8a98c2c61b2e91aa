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
    "u16": struct.Struct("<H"),
    "u32": struct.Struct("<I"),
    "i32": struct.Struct("<i"),
    "i64": struct.Struct("<q"),
    "f32": struct.Struct("<f"),
    "bool": struct.Struct("<?"),
}


class FlatReader:
    """The bytes of a FlatBuffers file, and how many of them were read."""

    def __init__(self, data: memoryview, source: str) -> None:
        self.data = data
        self.source = source
        self._read = 0
        self._tables = 0
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
            self.fail(
                f"the file identifier is {found!r} instead of {identifier!r}: it is not a {where}",
                where,
                4,
            )
        return FlatTable(self, self.follow(0, where), where)

    def need(self, position: int, size: int, where: str) -> None:
        """Check that `size` bytes at `position` lie within the file."""
        if position < 0 or size < 0 or position + size > len(self.data):
            self.fail(
                f"{size} bytes are needed, but the file has {len(self.data)}: "
                "it is truncated or damaged",
                where,
                position,
            )

    def claim(self, position: int, size: int, where: str) -> None:
        """Count the bytes of an object.

        Objects of a valid file do not overlap, so the sum of their sizes cannot exceed the size of
        the file; it does in a file that was made to expand without end.
        """
        self.need(position, size, where)
        self._read += size
        if self._read > len(self.data):
            self.fail("objects in the file overlap", where, position)

    def count_table(self, where: str) -> None:
        """Count one more table against the limit."""
        self._tables += 1
        if self._tables > MAX_TABLES:
            self.fail(f"the file has more than {MAX_TABLES} tables", where)

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

    def vector(self, position: int, item_size: int, where: str) -> tuple[int, int]:
        """Return where the items of a vector begin, and their number."""
        count: int = self.number("u32", position, where)
        self.claim(position, 4 + count * item_size, where)
        return position + 4, count

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
                text = str(self.data[start : start + length], "utf-8")
            except UnicodeDecodeError as error:
                self.fail("a string is not valid UTF-8", where, start + error.start)
            self._strings[position] = text
        return self._strings[position]

    def strings(self, position: int, where: str) -> list[str]:
        """Read the vector of strings at `position`."""
        start, count = self.vector(position, 4, where)
        return [self.string(self.follow(start + 4 * i, where), where) for i in range(count)]

    def i64s(self, position: int, where: str, at_most: int) -> tuple[int, ...]:
        """Read the vector of signed 64-bit integers at `position`."""
        start, count = self.vector(position, 8, where)
        if count > at_most:
            self.fail(f"{count} entries, where at most {at_most} are allowed", where, position)
        return struct.unpack_from(f"<{count}q", self.data, start)


class FlatTable:
    """A table of the file, with fields by their number in the schema."""

    def __init__(self, reader: FlatReader, position: int, where: str) -> None:
        self.reader = reader
        self.position = position
        self.where = where
        reader.count_table(where)
        vtable: int = position - reader.number("i32", position, where)
        if vtable < 0 or vtable + 4 > len(reader.data):
            reader.fail("the table points to a layout outside the file", where, position)
        vtable_size: int = reader.number("u16", vtable, where)
        self._table_size: int = reader.number("u16", vtable + 2, where)
        if vtable_size < 4 or vtable_size % 2 or self._table_size < 4:
            reader.fail("the layout of the table is damaged", where, vtable)
        reader.need(vtable, vtable_size, where)
        reader.claim(position, self._table_size, where)
        self._vtable = vtable
        self._slots = (vtable_size - 4) // 2

    def _field(self, slot: int, size: int, name: str) -> int | None:
        """Return the position of a field, or None if it is absent."""
        if slot >= self._slots:
            return None
        offset: int = self.reader.number("u16", self._vtable + 4 + 2 * slot, self.where)
        if offset == 0:
            return None
        if offset < 4 or offset + size > self._table_size:
            self.reader.fail(f"the field {name!r} lies outside its table", self.where, self._vtable)
        return self.position + offset

    def number(self, slot: int, kind: str, name: str, default: float = 0) -> Any:
        """The number in a field, of a kind in `SCALARS`."""
        at = self._field(slot, SCALARS[kind].size, name)
        return default if at is None else self.reader.number(kind, at, self.where)

    def flag(self, slot: int, name: str) -> bool:
        """A field of type bool."""
        at = self._field(slot, 1, name)
        if at is None:
            return False
        value = self.reader.data[at]
        if value > 1:
            self.reader.fail(f"the flag {name!r} is {value} instead of 0 or 1", self.where, at)
        return value == 1

    def target(self, slot: int, name: str) -> int | None:
        """Return the position of the table, vector or string in a field, or None."""
        at = self._field(slot, 4, name)
        return None if at is None else self.reader.follow(at, f"{self.where}.{name}")

    def string(self, slot: int, name: str) -> str | None:
        """A field of type string."""
        at = self.target(slot, name)
        return None if at is None else self.reader.string(at, f"{self.where}.{name}")

    def table(self, slot: int, name: str) -> FlatTable | None:
        """A field that is a table."""
        at = self.target(slot, name)
        return None if at is None else FlatTable(self.reader, at, f"{self.where}.{name}")

    def tables(self, slot: int, name: str) -> Iterator[FlatTable]:
        """The tables of a field that is a vector of tables; none if the field is absent."""
        at = self.target(slot, name)
        if at is None:
            return
        where = f"{self.where}.{name}"
        start, count = self.reader.vector(at, 4, where)
        for index in range(count):
            item = f"{where}[{index}]"
            yield FlatTable(self.reader, self.reader.follow(start + 4 * index, item), item)
