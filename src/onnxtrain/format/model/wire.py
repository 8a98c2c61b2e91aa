"""Protobuf's wire format, as far as ONNX files need it, with the standard library.

A message is a sequence of fields, each a tag (number and kind) and a value. Fields are views of the
message, so unread parts are neither parsed nor copied, and can be written again byte for byte. The
bytes may be broken or hostile: each number and length is checked before it is used, and the number
of fields is bounded. Every error is a `ModelError` that names the file, the object and the byte.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import NamedTuple, NoReturn

from onnxtrain.errors import ModelError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
# Far more than the largest models have: of fields in all, and of those that are parsed, such as
# initializers, or the parts of one of them.
MAX_FIELDS, MAX_PARSED = 4_000_000, 300_000
# numpy and onnxruntime have lower limits.
MAX_RANK = 64

_KIND_NAMES = {VARINT: "a number", FIXED64: "8 bytes", BYTES: "a length", FIXED32: "4 bytes"}
_EMPTY = memoryview(b"")


class Field(NamedTuple):
    """A field of a message: its number, its value, and its place in the message."""

    number: int
    kind: int
    value: int  # of a number; 0 otherwise
    data: memoryview  # of strings, bytes, messages and packed lists; empty otherwise
    start: int
    end: int


class Reader:
    """Reads the messages of a file, which errors call `source`."""

    def __init__(self, source: str, max_fields: int = MAX_FIELDS) -> None:
        self.source = source
        # Types that were read already, by their bytes: the element type, and the dimensions.
        self.types: dict[bytes, tuple[int, tuple[int | str | None, ...] | None]] = {}
        self._left = max_fields

    def fail(self, what: str, where: str, position: int | None = None) -> NoReturn:
        """Raise an error about the object `where`."""
        at = "" if position is None else f" at byte {position} of it"
        raise ModelError(f"{self.source}: {where}{at}: {what}")

    def varint(self, data: memoryview, position: int, where: str) -> tuple[int, int]:
        """Read a varint; return it and the position after it."""
        result = 0
        for index in range(10):
            if position + index >= len(data):
                self.fail("a number is cut off: the file is truncated or damaged", where, position)
            byte = data[position + index]
            result |= (byte & 0x7F) << (7 * index)
            if byte < 0x80:
                return result & 0xFFFFFFFFFFFFFFFF, position + index + 1
        return self.fail("a number has more than ten bytes", where, position)

    def fields(
        self, message: memoryview, where: str, wanted: Container[int] | None = None
    ) -> Iterator[Field]:
        """The fields of a message, in the order of the file: all, or those of some numbers."""
        position, size = 0, len(message)
        while position < size:
            self._left -= 1
            if self._left < 0:
                self.fail("there are more fields than any real model has", where)
            start = position
            tag = message[position]
            if tag < 0x80:
                position += 1
            else:
                tag, position = self.varint(message, position, where)
            number, kind = tag >> 3, tag & 7
            if number == 0 or number > 0x1FFFFFFF:
                self.fail("a field has an impossible number", where, start)
            if kind == BYTES:
                length = message[position] if position < size else 0x80
                if length < 0x80:
                    position += 1
                else:
                    length, position = self.varint(message, position, where)
                end = position + length
                if end > size:
                    self.fail(_too_long(length, size - position), where, start)
                if wanted is None or number in wanted:
                    yield Field(number, kind, 0, message[position:end], start, end)
                position = end
            elif kind == VARINT:
                value, position = self.varint(message, position, where)
                yield Field(number, kind, value, _EMPTY, start, position)
            elif kind in (FIXED32, FIXED64):
                end = position + (4 if kind == FIXED32 else 8)
                if end > size:
                    self.fail(_too_long(end - position, size - position), where, start)
                value = int.from_bytes(message[position:end], "little")
                yield Field(number, kind, value, _EMPTY, start, end)
                position = end
            else:
                self.fail(f"a field is of the kind {kind}, which ONNX does not have", where, start)

    def pick(self, message: memoryview, where: str, *numbers: int) -> dict[int, list[Field]]:
        """The fields of a message that have these numbers, by number."""
        found: dict[int, list[Field]] = {number: [] for number in numbers}
        for field in self.counted(message, where, found):
            found[field.number].append(field)
        return found

    def counted(self, message: memoryview, where: str, wanted: Container[int]) -> Iterator[Field]:
        """The fields of some numbers, of which there may not be too many."""
        found = (field for field in self.fields(message, where, wanted) if field.number in wanted)
        for count, field in enumerate(found):
            if count == MAX_PARSED:
                self.fail("there are more fields than any real model has", where)
            yield field

    # ---- values of fields --------------------------------------------------------------------

    def message(self, field: Field, where: str) -> memoryview:
        """The bytes of a field that is a message, a string or bytes."""
        if field.kind != BYTES:
            self._wrong_kind(field, BYTES, where)
        return field.data

    def messages(self, fields: Iterable[Field], where: str) -> list[memoryview]:
        """The messages of a repeated field."""
        return [self.message(field, where) for field in fields]

    def last_text(self, fields: Iterable[Field], where: str) -> str:
        """The string of a field, of which the last one counts; "" if there is none."""
        return ["", *(self.text(field, where) for field in fields)][-1]

    def last_int64(self, fields: Iterable[Field], where: str) -> int:
        """The number of a field, of which the last one counts; 0 if there is none."""
        return [0, *(self.int64(field, where) for field in fields)][-1]

    def text(self, field: Field, where: str) -> str:
        """The value of a field that is a string."""
        data = self.message(field, where)
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError as error:
            self.fail("a text is not valid UTF-8", where, field.start + error.start)

    def int64(self, field: Field, where: str) -> int:
        """The value of a field that is a signed number."""
        if field.kind != VARINT:
            self._wrong_kind(field, VARINT, where)
        return signed(field.value)

    def int64s(self, fields: Iterable[Field], where: str, most: int = MAX_RANK) -> tuple[int, ...]:
        """The numbers of a repeated field, packed or not; more than `most` is an error."""
        result: list[int] = []
        for field in fields:
            if field.kind == VARINT:
                result.append(signed(field.value))
            else:
                data, position = self.message(field, where), 0
                while position < len(data) and len(result) <= most:
                    value, position = self.varint(data, position, where)
                    result.append(signed(value))
            if len(result) > most:
                self.fail(f"there are more than {most} numbers", where)
        return tuple(result)

    def _wrong_kind(self, field: Field, wanted: int, where: str) -> NoReturn:
        kinds = f"{_KIND_NAMES[wanted]} and has {_KIND_NAMES[field.kind]}"
        self.fail(f"field {field.number} should have {kinds}", where, field.start)


def signed(value: int) -> int:
    """Return the signed number that an unsigned one encodes."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _too_long(length: int, left: int) -> str:
    return f"a field of {length} bytes, but {left} are left: the file is truncated or damaged"


# ---- writing -------------------------------------------------------------------------------------


def varint_bytes(value: int) -> bytes:
    """Encode a number as a varint; negative ones take ten bytes."""
    value &= 0xFFFFFFFFFFFFFFFF
    result = bytearray()
    while value >= 0x80:
        result.append((value & 0x7F) | 0x80)
        value >>= 7
    result.append(value)
    return bytes(result)


def number_field(number: int, value: int) -> bytes:
    """A field with a number."""
    return varint_bytes(number << 3 | VARINT) + varint_bytes(value)


def header(number: int, size: int) -> bytes:
    """Return the tag and length in front of `size` bytes."""
    return varint_bytes(number << 3 | BYTES) + varint_bytes(size)


def bytes_field(number: int, data: bytes | bytearray | memoryview) -> bytes:
    """A field with bytes or a message."""
    return header(number, len(data)) + data


def text_field(number: int, text: str) -> bytes:
    """A field with a string."""
    return bytes_field(number, text.encode("utf-8"))
