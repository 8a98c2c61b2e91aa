"""Read and write `.onnx_adapter` files, ONNX Runtime's own: FlatBuffers, identifier `TORT`.

`docs/format.md` describes the fields. Behind the FlatBuffers part our files have a record that
ONNX Runtime does not look at: JSON about the adapter, and a checksum.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnxtrain.errors import AdapterError
from onnxtrain.format import strict_json
from onnxtrain.format.checkpoint.content import (
    MAX_RANK,
    Array,
    RawTensor,
    Tensor,
    tensor_bytes,
    tensor_code,
    tensor_dims,
)
from onnxtrain.format.checkpoint.flat_file import (
    MAX_SIZE,
    Bulk,
    FlatReader,
    FlatTable,
    Scalar,
    lay_out,
)
from onnxtrain.format.element_types import BOOL, ELEMENT_TYPES, STRING, data_size

IDENTIFIER = b"TORT"
FORMAT_VERSION = 1
_ALIGNMENT = 64  # ONNX Runtime wants 8
# What ONNX Runtime refuses in an adapter: strings, bools, complex numbers.
_REFUSED = (STRING, BOOL, 14, 15)
# The last bytes: length of the JSON before, CRC-32 of all before, and this.
_END = struct.Struct("<II8s")
_MARK = b"TORTNOTE"


@dataclass(eq=False)
class AdapterContent:
    """Everything in an adapter file; `note` is JSON about it, empty in files of others."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    note: dict[str, Any] = field(default_factory=dict)
    adapter_version: int = 1
    model_version: int = 1


def is_onnx_adapter(start: bytes) -> bool:
    """Whether the first eight bytes are those of an `.onnx_adapter` file."""
    return start[4:8] == IDENTIFIER


# ---- reading -------------------------------------------------------------------------------------


def read_onnx_adapter(data: memoryview, source: str) -> AdapterContent:
    """Read the bytes of a file; the tensors are views of them."""
    if len(data) > MAX_SIZE:
        raise AdapterError(f"{source}: an .onnx_adapter file holds less than {MAX_SIZE:,} bytes")
    note = _read_note(data, source)
    root = FlatReader(data, source, AdapterError).root(IDENTIFIER, "adapter")
    version = root.number(0, "i32", "format_version")
    if version != FORMAT_VERSION:
        root.fail(f"the format version is {version}; version {FORMAT_VERSION} can be read")
    content = AdapterContent(
        note=note,
        adapter_version=root.number(1, "i32", "adapter_version"),
        model_version=root.number(2, "i32", "model_version"),
    )
    for table in root.tables(3, "parameters"):
        name = table.string(0, "name")
        if not name:
            table.fail("the name is missing")
        table.where += f" ({name[:80]!r})"
        if name in content.tensors:
            table.fail("the name occurs twice")
        content.tensors[name] = _read_tensor(table, data)
    return content


def _read_tensor(table: FlatTable, data: memoryview) -> Tensor:
    code = table.number(2, "i32", "data_type")
    if code not in ELEMENT_TYPES or code in _REFUSED:
        kind = ELEMENT_TYPES[code].name if code in ELEMENT_TYPES else code
        table.fail(f"the element type {kind} is not one that an adapter may have")
    dims = table.int64s(1, "dims", MAX_RANK)
    elements = 1
    for dim in dims:
        elements *= max(dim, 1)
        if dim < 0 or elements >= 2**58:
            table.fail(f"the dimensions {dims} are impossible")
    if not dims:
        table.fail("it has no dimensions")
    start, count = table.span(3, "raw_data")
    size = data_size(code, dims)
    if count != size:
        table.fail(f"the dimensions {list(dims)} need {size} bytes of data, but there are {count}")
    raw = np.frombuffer(data, np.uint8, size, start) if size else np.empty(0, np.uint8)
    return as_tensor(code, dims, raw)


def as_tensor(code: int, dims: tuple[int, ...], raw: Array) -> Tensor:
    """Return bytes of a file as a tensor that cannot be written to."""
    raw.flags.writeable = False
    dtype = ELEMENT_TYPES[code].dtype
    if dtype is None:
        return RawTensor(code, dims, raw)
    array: Array = raw.view(dtype).reshape(dims)
    if not array.flags.aligned:
        array = array.copy()
        array.flags.writeable = False
    return array


def _read_note(data: memoryview, source: str) -> dict[str, Any]:
    """Read what we write behind the FlatBuffers part; files of others have nothing there."""
    if len(data) < _END.size:
        return {}
    length, crc, mark = _END.unpack_from(data, len(data) - _END.size)
    if 2 * sum(a == b for a, b in zip(mark, _MARK, strict=True)) < len(_MARK):
        return {}
    end = len(data) - _END.size
    if mark != _MARK or length > end or crc != zlib.crc32(data[: end + 4]):
        raise AdapterError(f"{source}: the checksum does not match: the file is damaged")
    try:
        found = strict_json.loads_plain(bytes(data[end - length : end]))
        return strict_json.mapping(found, "the record at its end")
    except ValueError as error:
        raise AdapterError(f"{source}: the record at its end cannot be read: {error}") from None


# ---- writing -------------------------------------------------------------------------------------


def onnx_adapter_bytes(content: AdapterContent) -> bytes:
    """Return a file with the tensors in the order of their names, as ONNX Runtime reads it."""
    parameters = [_table(name, content.tensors[name]) for name in sorted(content.tensors)]
    if sum(table[3].length + 1024 for table in parameters) > MAX_SIZE:
        raise AdapterError(f"an .onnx_adapter file holds less than {MAX_SIZE:,} bytes")
    front, bulks, end = lay_out(
        {
            0: Scalar("i32", FORMAT_VERSION),
            1: Scalar("i32", content.adapter_version),
            2: Scalar("i32", content.model_version),
            3: parameters,
        },
        IDENTIFIER,
    )
    made = bytearray(end)
    made[: len(front)] = front
    for bulk in bulks:
        struct.pack_into("<I", made, bulk.offset - 4, bulk.length)
        made[bulk.offset : bulk.offset + bulk.length] = tensor_bytes(bulk.tensor)
    return bytes(made + _note(content.note, made))


def _note(note: Mapping[str, Any], before: bytearray) -> bytes:
    text = strict_json.dumps(note).encode()
    start = text + struct.pack("<I", len(text))
    return start + struct.pack("<I8s", zlib.crc32(start, zlib.crc32(before)), _MARK)


def _table(name: str, tensor: Tensor) -> dict[int, Any]:
    code, dims = tensor_code(tensor, name), tensor_dims(tensor, name)
    if code in _REFUSED or not dims:
        kind = ELEMENT_TYPES[code].name
        raise AdapterError(f"{name!r}: an adapter cannot hold {kind} of the shape {list(dims)}")
    bulk = Bulk(tensor, data_size(code, dims), _ALIGNMENT)
    return {0: name.encode(), 1: dims, 2: Scalar("i32", code), 3: bulk}
