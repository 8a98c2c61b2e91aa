"""Read and write safetensors files: eight bytes of length, a JSON header, and the tensors."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from onnxtrain.errors import AdapterError
from onnxtrain.format import strict_json
from onnxtrain.format.adapter.onnx_file import as_tensor
from onnxtrain.format.checkpoint.content import (
    MAX_RANK,
    Tensor,
    tensor_bytes,
    tensor_code,
    tensor_dims,
)
from onnxtrain.format.element_types import data_size

# The limit of the format's own reader.
_LONGEST_HEADER = 100_000_000
_NOTES = "__metadata__"
# The names of element types in the header, by ONNX's numbers.
_KINDS = {
    1: "F32", 2: "U8", 3: "I8", 4: "U16", 5: "I16", 6: "I32", 7: "I64", 9: "BOOL", 10: "F16",
    11: "F64", 12: "U32", 13: "U64", 16: "BF16", 17: "F8_E4M3", 19: "F8_E5M2",
}  # fmt: skip
_CODES = {kind: code for code, kind in _KINDS.items()}


def is_safetensors(start: bytes) -> bool:
    """Whether the first nine bytes are those of a safetensors file."""
    return start[8:9] == b"{"


def read_safetensors(data: memoryview, source: str) -> dict[str, Tensor]:
    """Read the tensors of a file, which are views of its bytes; its metadata is passed over.

    The tensors have to fill the file without gaps and without sharing bytes, as the format says.
    """
    header, start = _read_header(data, source)
    try:
        entries = {name: _entry(header[name]) for name in header if name != _NOTES}
    except ValueError as error:
        raise AdapterError(f"{source}: the header is damaged: {error}") from None
    end, tensors = 0, {}
    for name, (code, dims, begin, length) in sorted(entries.items(), key=lambda e: e[1][2:]):
        if begin != end or start + begin + length > len(data):
            raise AdapterError(
                f"{source}: the elements of {name[:80]!r} are said to be at {begin}, where {end} "
                "was expected, or past the end: the file is cut off or damaged"
            )
        end = begin + length
        raw = np.frombuffer(data, np.uint8, length, start + begin) if length else np.empty(0, "u1")
        tensors[name] = as_tensor(code, dims, raw)
    if start + end != len(data):
        raise AdapterError(f"{source}: {len(data) - start - end} bytes at its end are not used")
    return {name: tensors[name] for name in entries}


def _read_header(data: memoryview, source: str) -> tuple[dict[str, Any], int]:
    if len(data) < 8:
        raise AdapterError(f"{source}: it has {len(data)} bytes: it is not a safetensors file")
    (length,) = struct.unpack_from("<Q", data)
    if length > min(_LONGEST_HEADER, len(data) - 8):
        raise AdapterError(
            f"{source}: the header is said to have {length} bytes: the file is cut off, or it is "
            "not a safetensors file"
        )
    try:
        text = str(data[8 : 8 + length], "utf-8")
        return strict_json.mapping(strict_json.loads_plain(text), "it"), 8 + length
    except ValueError as error:
        raise AdapterError(f"{source}: the header cannot be read: {error}") from None


def _entry(record: Any) -> tuple[int, tuple[int, ...], int, int]:
    """Return element type, shape, beginning and length of a tensor."""
    found = strict_json.mapping(record, "an entry")
    kind, shape, offsets = (strict_json.entry(found, k) for k in ("dtype", "shape", "data_offsets"))
    if not isinstance(kind, str) or kind not in _CODES:
        raise ValueError(f"the element type {strict_json.shortened(kind)} is unknown")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{strict_json.shortened(found)} has an impossible shape or offset")
    if len(shape) > MAX_RANK or math.prod(max(dim, 1) for dim in shape) >= 2**58:
        raise ValueError(f"the shape {strict_json.shortened(shape)} is impossible")
    code, dims = _CODES[kind], tuple(shape)
    size = data_size(code, dims)
    if offsets[1] - offsets[0] != size:
        raise ValueError(f"the shape {list(dims)} needs {size} bytes, and the offsets have others")
    return code, dims, offsets[0], size


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(i) is int and 0 <= i < 2**62 for i in value)


def safetensors_bytes(tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> bytes:
    """Return a file with the tensors, and texts as its metadata."""
    header: dict[str, Any] = {_NOTES: dict(notes)} if notes else {}
    end = 0
    # As the format's own writer sorts them: wide elements first, so that all are aligned.
    order = sorted(tensors, key=lambda name: (-_width(tensors[name], name), name))
    for name in order:
        code, dims = tensor_code(tensors[name], name), tensor_dims(tensors[name], name)
        if code not in _KINDS:
            raise AdapterError(f"{name!r}: safetensors files have no element type for it")
        size = data_size(code, dims)
        header[name] = {
            "dtype": _KINDS[code],
            "shape": list(dims),
            "data_offsets": [end, end + size],
        }
        end += size
    text = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join(
        [struct.pack("<Q", len(text)), text, *(tensor_bytes(tensors[name]) for name in order)]
    )


def _width(tensor: Tensor, name: str) -> int:
    return data_size(tensor_code(tensor, name), (1,))
