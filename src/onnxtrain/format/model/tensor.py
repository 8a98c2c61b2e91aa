"""ONNX's TensorProto: the type of a tensor in a graph file, and its elements."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath
from typing import NamedTuple

import numpy as np

from onnxtrain.format.element_types import ELEMENT_TYPES, STRING, data_size
from onnxtrain.format.model.wire import FIXED32, FIXED64, VARINT, Field, Reader, varint_bytes

# The value of data_location for what is in another file.
EXTERNAL = 1
# No machine holds a tensor of more elements.
_MAX_ELEMENTS = 1 << 58


class TensorField:
    """Numbers of the fields of ONNX's TensorProto."""

    FLOAT_DATA, INT32_DATA, STRING_DATA, INT64_DATA, DOUBLE_DATA, UINT64_DATA = 4, 5, 6, 7, 10, 11
    DIMS, DATA_TYPE, NAME, RAW_DATA, EXTERNAL_DATA, DATA_LOCATION = 1, 2, 8, 9, 13, 14


_TYPE_FIELDS = (TensorField.DATA_TYPE, TensorField.DIMS)


class TensorType(NamedTuple):
    """Element type and shape of a tensor."""

    element_type: int
    dims: tuple[int, ...]


@dataclass(frozen=True)
class ExternalTensor:
    """An initializer with its elements in another file of the folder."""

    name: str
    element_type: int
    dims: tuple[int, ...]
    location: str
    offset: int
    length: int


def read_entry(reader: Reader, message: memoryview) -> tuple[str, str]:
    """Read a pair of key and value."""
    parts = reader.pick(message, "entry", 1, 2)
    key = reader.last_text(parts[1], "entry.key")
    return key, reader.last_text(parts[2], f"entry {key!r}")


def read_initializer(reader: Reader, message: memoryview) -> tuple[str, ExternalTensor | None]:
    """Read the name of an initializer and, if its data are external, their location."""
    field = TensorField
    located = (field.EXTERNAL_DATA, field.DATA_LOCATION)
    parts = reader.pick(message, "initializer", field.NAME, *_TYPE_FIELDS, *located)
    name = reader.last_text(parts[field.NAME], "initializer.name")
    where = f"initializer {name!r}"
    code, dims = _type(reader, parts, where)
    entries = reader.messages(parts[field.EXTERNAL_DATA], where)
    if reader.last_int64(parts[field.DATA_LOCATION], where) != EXTERNAL:
        return name, None
    if code not in ELEMENT_TYPES or code == STRING:
        reader.fail(f"the element type {code} cannot be in an external file", where)
    size = _checked_size(reader, code, dims, where)
    keys = dict(read_entry(reader, entry) for entry in entries)
    length = _number(reader, keys.get("length", str(size)), where)
    if length != size:
        reader.fail(f"{length} bytes of external data, where the shape needs {size}", where)
    location = keys.get("location", "")
    if not stays_in_folder(location):
        reader.fail(f"the external data are at {location!r}, outside the folder", where)
    offset = _number(reader, keys.get("offset", "0"), where)
    return name, ExternalTensor(name, code, dims, location, offset, length)


def read_tensor_type(reader: Reader, message: memoryview, name: str) -> TensorType:
    """Read element type and shape of a TensorProto."""
    where = f"initializer {name!r}"
    return _type(reader, reader.pick(message, where, *_TYPE_FIELDS), where)


def _type(reader: Reader, parts: dict[int, list[Field]], where: str) -> TensorType:
    code = reader.last_int64(parts[TensorField.DATA_TYPE], where)
    return TensorType(code, reader.int64s(parts[TensorField.DIMS], where))


def _checked_size(reader: Reader, code: int, dims: tuple[int, ...], where: str) -> int:
    count = 1
    for dim in dims:
        count *= max(dim, 1)
        if dim < 0 or count > _MAX_ELEMENTS:
            reader.fail(f"the shape {dims} is impossible", where)
    return data_size(code, dims)


def _number(reader: Reader, text: str, where: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        reader.fail(f"{text[:40]!r} is not a position in a file", where)
    return int(text)


def stays_in_folder(location: str) -> bool:
    """Whether a path leads to a file in the folder of the model, on any system."""
    paths = (PurePosixPath(location), PureWindowsPath(location))
    leaves = any(path.anchor or ".." in path.parts for path in paths)
    return bool(location) and "\0" not in location and not leaves


# ---- elements ------------------------------------------------------------------------------------

# The field for the elements of a type without raw data; int32_data for all others.
_FIELD_OF_TYPE = {
    "FLOAT": TensorField.FLOAT_DATA,
    "COMPLEX64": TensorField.FLOAT_DATA,
    "DOUBLE": TensorField.DOUBLE_DATA,
    "COMPLEX128": TensorField.DOUBLE_DATA,
    "INT64": TensorField.INT64_DATA,
    "UINT32": TensorField.UINT64_DATA,
    "UINT64": TensorField.UINT64_DATA,
}


def inline_data(reader: Reader, message: memoryview) -> memoryview | None:
    """Return the elements of a tensor that has them inside, or None if they are strings."""
    elements = (TensorField.RAW_DATA, TensorField.INT32_DATA, *_FIELD_OF_TYPE.values())
    parts = reader.pick(message, "initializer", *_TYPE_FIELDS, *elements)
    stored = _type(reader, parts, "initializer")
    where = f"initializer of {stored.element_type} {stored.dims}"
    if stored.element_type == STRING:
        return None
    if stored.element_type not in ELEMENT_TYPES:
        reader.fail("its element type is unknown", where)
    size = _checked_size(reader, stored.element_type, stored.dims, where)
    raw = reader.messages(parts[TensorField.RAW_DATA], where)
    data = raw[-1] if raw else _typed_data(reader, parts, stored, where)
    if len(data) != size:
        reader.fail(f"it has {len(data)} bytes, where its shape needs {size}", where)
    return data


def _typed_data(
    reader: Reader, parts: dict[int, list[Field]], stored: TensorType, where: str
) -> memoryview:
    """Return elements that are stored as one number each."""
    element = ELEMENT_TYPES[stored.element_type]
    number = _FIELD_OF_TYPE.get(element.name, TensorField.INT32_DATA)
    if number in (TensorField.FLOAT_DATA, TensorField.DOUBLE_DATA):
        alone, width = (FIXED32, 4) if number == TensorField.FLOAT_DATA else (FIXED64, 8)
        chunks = [
            p.value.to_bytes(width, "little") if p.kind == alone else reader.message(p, where)
            for p in parts[number]
        ]
        return memoryview(b"".join(chunks))
    # Elements narrower than a byte are packed into bytes, one number each.
    count = math.prod(stored.dims) if element.bits >= 8 else data_size(*stored)
    packed = [
        varint_bytes(p.value) if p.kind == VARINT else reader.message(p, where)
        for p in parts[number]
    ]
    found = sum(int(np.count_nonzero(np.frombuffer(p, np.uint8) < 0x80)) for p in packed)
    if found != count:
        reader.fail(f"it has {found} elements, where its shape needs {count}", where)
    width = max(element.bits // 8, 1)
    return memoryview(b"".join(_decoded(reader, part, width, where) for part in packed))


_CHUNK = 1 << 16


def _decoded(reader: Reader, packed: bytes | memoryview, width: int, where: str) -> bytes:
    """Return varints as numbers of `width` bytes, a chunk at a time: each may be a single byte."""
    data, start = np.frombuffer(packed, np.uint8), 0
    if data.size and data[-1] >= 0x80:
        reader.fail("a number is cut off: the file is truncated or damaged", where)
    made = []
    while start < len(data):
        part = data[start : start + _CHUNK]
        last = np.flatnonzero(part < 0x80)
        if not last.size:
            reader.fail("a number has more than ten bytes", where)
        first = np.concatenate([[0], last[:-1] + 1])
        if int((last - first).max()) >= 10:
            reader.fail("a number has more than ten bytes", where)
        values = np.zeros(len(last), np.uint64)
        for index in range(int((last - first).max()) + 1):
            has = first + index <= last
            digits = part[first[has] + index].astype(np.uint64) & np.uint64(0x7F)
            values[has] |= digits << np.uint64(7 * index)
        made.append(values.astype(f"<u{width}").tobytes())
        start += int(last[-1]) + 1
    return b"".join(made)
