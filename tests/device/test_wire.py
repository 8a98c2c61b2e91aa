"""Protobuf's wire format: what is read, what is written, and what is refused."""

import random

import pytest

from onnxtrain.errors import ModelError
from onnxtrain.format.model.wire import (
    BYTES,
    FIXED32,
    FIXED64,
    VARINT,
    Reader,
    bytes_field,
    number_field,
    signed,
    text_field,
    varint_bytes,
)


def read(data: bytes, **options) -> list:
    return list(Reader("here", **options).fields(memoryview(data), "it"))


@pytest.mark.parametrize(
    ("number", "encoded"),
    [(0, b"\0"), (1, b"\1"), (127, b"\x7f"), (128, b"\x80\1"), (300, b"\xac\2"),
     (2**32, b"\x80\x80\x80\x80\x10"), (-1, b"\xff" * 9 + b"\1"), (-(2**63), b"\x80" * 9 + b"\1")],
)  # fmt: skip
def test_numbers(number, encoded) -> None:
    assert varint_bytes(number) == encoded
    found, end = Reader("here").varint(memoryview(encoded), 0, "it")
    assert (signed(found), end) == (number, len(encoded))


def test_each_kind_of_field() -> None:
    message = b"\x08\x96\x01" + b"\x11" + b"\1" * 8 + b"\x1a\x02hi" + b"\x25\1\0\0\0"
    fields = read(message)
    assert [(f.number, f.kind) for f in fields] == [
        (1, VARINT), (2, FIXED64), (3, BYTES), (4, FIXED32),
    ]  # fmt: skip
    assert [f.value for f in fields] == [150, int.from_bytes(b"\1" * 8, "little"), 0, 1]
    assert bytes(fields[2].data) == b"hi"
    # The places of the fields cover the message, so that they can be copied as they are.
    assert b"".join(message[f.start : f.end] for f in fields) == message


def test_what_is_written_is_read() -> None:
    rng = random.Random(1)
    for _ in range(200):
        number = rng.choice([1, 15, 16, 2047, 2048, 2**29 - 1])
        value = rng.randrange(-(2**63), 2**63)
        text = "é" * rng.randrange(200)
        reader = Reader("here")
        fields = read(number_field(number, value) + text_field(number, text))
        assert [f.number for f in fields] == [number, number]
        assert reader.int64(fields[0], "it") == value
        assert reader.text(fields[1], "it") == text


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        pytest.param(b"\x80", "cut off", id="half a tag"),
        pytest.param(b"\x08\xff", "cut off", id="half a number"),
        pytest.param(b"\x08" + b"\xff" * 10 + b"\1", "more than ten", id="endless number"),
        pytest.param(b"\x0a\x05abcd", "5 bytes, but 4 are left", id="one byte missing"),
        pytest.param(b"\x0a" + b"\xff" * 9 + b"\1", "are left", id="length of 2^64 - 1"),
        pytest.param(b"\x0a", "cut off", id="no length"),
        pytest.param(b"\x09abcdefg", "are left", id="seven of eight bytes"),
        pytest.param(b"\x0dabc", "are left", id="three of four bytes"),
        pytest.param(b"\x00\x01", "impossible number", id="field zero"),
        pytest.param(varint_bytes(1 << 32), "impossible number", id="field 2^29"),
        pytest.param(b"\x0b\x0c", "kind 3", id="group"),
        pytest.param(b"\x0f", "kind 7", id="no kind"),
    ],
)
def test_broken_messages(message, complaint) -> None:
    with pytest.raises(ModelError, match=complaint) as error:
        read(message)
    assert str(error.value).startswith("here: it at byte ")


def test_the_number_of_fields_is_bounded() -> None:
    message = b"\x08\x01" * 100
    assert len(read(message, max_fields=100)) == 100
    with pytest.raises(ModelError, match="more fields"):
        read(message, max_fields=99)


def test_values_of_the_wrong_kind() -> None:
    number, text = read(number_field(1, 5) + bytes_field(2, b"\xff\xfe"))
    reader = Reader("here")
    with pytest.raises(ModelError, match="field 1 should have a length and has a number"):
        reader.message(number, "it")
    with pytest.raises(ModelError, match="field 2 should have a number and has a length"):
        reader.int64(text, "it")
    with pytest.raises(ModelError, match="not valid UTF-8"):
        reader.text(text, "it")


def test_lists_of_numbers_packed_and_not() -> None:
    packed = bytes_field(1, b"".join(map(varint_bytes, (3, -4))))
    fields = read(number_field(1, 1) + packed + number_field(1, 7))
    assert Reader("here").int64s(fields, "it") == (1, 3, -4, 7)
    with pytest.raises(ModelError, match="more than 3 numbers"):
        Reader("here").int64s(fields, "it", most=3)
    endless = read(bytes_field(1, b"\1" * 1_000_000))
    with pytest.raises(ModelError, match="more than 64 numbers"):
        Reader("here").int64s(endless, "it")
    with pytest.raises(ModelError, match="cut off"):
        Reader("here").int64s(read(bytes_field(1, b"\x80")), "it")
