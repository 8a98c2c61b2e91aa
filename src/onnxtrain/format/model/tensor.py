"""ONNX's TensorProto: the type of a tensor in a graph file, and its elements."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath
from typing import NamedTuple

import numpy as np

from onnxtrain.format.element_types import ELEMENT_TYPES, STRING, data_size
from onnxtrain.format.model.wire import FIXED32, FIXED64, Field, Reader

# The value of data_location for what is in another file.
EXTERNAL = 1
# No machine holds a tensor of more elements.
_MAX_ELEMENTS = 1 << 58


class TensorField:
    """Numbers of the fields of ONNX's TensorProto."""

    FLOAT_DATA, INT32_DATA, STRING_DATA, INT64_DATA, DOUBLE_DATA, UINT64_DATA = 4, 5, 6, 7, 10, 11
    DIMS, DATA_TYPE, NAME, RAW_DATA, EXTERNAL_DATA, DATA_LOCATION = 1, 2, 8, 9, 13, 14


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
    key = value = ""
    for part in reader.fields(message, "entry"):
        if part.number == 1:
            key = reader.text(part, "entry.key")
        elif part.number == 2:
            value = reader.text(part, f"entry {key!r}")
    return key, value


def read_initializer(reader: Reader, message: memoryview) -> tuple[str, ExternalTensor | None]:
    """Read the name of an initializer and, if its data are external, their location."""
    name, location = "", 0
    dims: list[Field] = []
    entries: list[memoryview] = []
    element_type = 0
    for part in reader.fields(message, "initializer"):
        if part.number == TensorField.NAME:
            name = reader.text(part, "initializer.name")
        elif part.number == TensorField.DATA_LOCATION:
            location = reader.int64(part, "initializer.data_location")
        elif part.number == TensorField.EXTERNAL_DATA:
            entries.append(reader.message(part, "initializer.external_data"))
        elif part.number == TensorField.DATA_TYPE:
            element_type = reader.int64(part, "initializer.data_type")
        elif part.number == TensorField.DIMS:
            dims.append(part)
    if location != EXTERNAL:
        return name, None
    where = f"initializer {name!r}"
    shape = reader.int64s(dims, where)
    return name, _external(reader, name, element_type, shape, entries)


def read_tensor_type(reader: Reader, message: memoryview, name: str) -> TensorType:
    """Read element type and shape of a TensorProto."""
    parts = list(reader.fields(message, f"initializer {name!r}"))
    where = f"initializer {name!r}"
    code = 0
    for part in parts:
        if part.number == TensorField.DATA_TYPE:
            code = reader.int64(part, where)
    dims = reader.int64s((p for p in parts if p.number == TensorField.DIMS), where)
    return TensorType(code, dims)


def _external(
    reader: Reader, name: str, code: int, dims: tuple[int, ...], entries: list[memoryview]
) -> ExternalTensor:
    where = f"initializer {name!r}"
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
    return ExternalTensor(name, code, dims, location, offset, length)


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
    if not location or "\0" in location:
        return False
    for path in (PurePosixPath(location), PureWindowsPath(location)):
        if path.anchor or ".." in path.parts:
            return False
    return True


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
    parts = list(reader.fields(message, "initializer"))
    stored = read_tensor_type(reader, message, "")
    where = f"initializer of {stored.element_type} {stored.dims}"
    if stored.element_type == STRING:
        return None
    if stored.element_type not in ELEMENT_TYPES:
        reader.fail("its element type is unknown", where)
    size = _checked_size(reader, stored.element_type, stored.dims, where)
    raw = [reader.message(p, where) for p in parts if p.number == TensorField.RAW_DATA]
    data = raw[-1] if raw else _typed_data(reader, parts, stored, where)
    if len(data) != size:
        reader.fail(f"it has {len(data)} bytes, where its shape needs {size}", where)
    return data


def _typed_data(reader: Reader, parts: list[Field], stored: TensorType, where: str) -> memoryview:
    """Return elements that are stored as one number each."""
    element = ELEMENT_TYPES[stored.element_type]
    number = _FIELD_OF_TYPE.get(element.name, TensorField.INT32_DATA)
    fields = [part for part in parts if part.number == number]
    if number in (TensorField.FLOAT_DATA, TensorField.DOUBLE_DATA):
        width = 4 if number == TensorField.FLOAT_DATA else 8
        return memoryview(b"".join(_fixed(reader, part, width, where) for part in fields))
    # Elements narrower than a byte are packed into bytes, one number each.
    count = math.prod(stored.dims) if element.bits >= 8 else data_size(*stored)
    values = reader.int64s(fields, where, most=count)
    width = max(element.bits // 8, 1)
    bits = np.array([value & 0xFFFFFFFFFFFFFFFF for value in values], np.uint64)
    return memoryview(bits.astype(f"<u{width}").tobytes())


def _fixed(reader: Reader, part: Field, width: int, where: str) -> bytes | memoryview:
    alone = FIXED32 if width == 4 else FIXED64
    if part.kind == alone:
        return part.value.to_bytes(width, "little")
    return reader.message(part, where)
