"""The element types of tensors, by ONNX's numbers."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np


class ElementType(NamedTuple):
    """An element type: its name in ONNX, its width, and the numpy type if there is one."""

    name: str
    bits: int
    dtype: np.dtype[Any] | None


def _numpy_type(name: str, text: str) -> ElementType:
    dtype = np.dtype(text)
    return ElementType(name, 8 * dtype.itemsize, dtype)


STRING = 8
BOOL = 9

# A string has no width.
ELEMENT_TYPES: dict[int, ElementType] = {
    1: _numpy_type("FLOAT", "<f4"),
    2: _numpy_type("UINT8", "<u1"),
    3: _numpy_type("INT8", "<i1"),
    4: _numpy_type("UINT16", "<u2"),
    5: _numpy_type("INT16", "<i2"),
    6: _numpy_type("INT32", "<i4"),
    7: _numpy_type("INT64", "<i8"),
    STRING: ElementType("STRING", 0, np.dtype(object)),
    BOOL: _numpy_type("BOOL", "?"),
    10: _numpy_type("FLOAT16", "<f2"),
    11: _numpy_type("DOUBLE", "<f8"),
    12: _numpy_type("UINT32", "<u4"),
    13: _numpy_type("UINT64", "<u8"),
    14: _numpy_type("COMPLEX64", "<c8"),
    15: _numpy_type("COMPLEX128", "<c16"),
    16: ElementType("BFLOAT16", 16, None),
    17: ElementType("FLOAT8E4M3FN", 8, None),
    18: ElementType("FLOAT8E4M3FNUZ", 8, None),
    19: ElementType("FLOAT8E5M2", 8, None),
    20: ElementType("FLOAT8E5M2FNUZ", 8, None),
    21: ElementType("UINT4", 4, None),
    22: ElementType("INT4", 4, None),
    23: ElementType("FLOAT4E2M1", 4, None),
    24: ElementType("FLOAT8E8M0", 8, None),
    25: ElementType("UINT2", 2, None),
    26: ElementType("INT2", 2, None),
}

_CODES: dict[Any, int] = {
    element.dtype: code
    for code, element in ELEMENT_TYPES.items()
    if element.dtype is not None and code != STRING
}
# Types that other packages add to numpy, one element in as many whole bytes as it needs.
_ADDED_TYPES = {
    "bfloat16": 16,
    "float8_e4m3fn": 17,
    "float8_e4m3fnuz": 18,
    "float8_e5m2": 19,
    "float8_e5m2fnuz": 20,
    "float8_e8m0fnu": 24,
}


def code_of(dtype: np.dtype[Any]) -> int | None:
    """Return ONNX's number for a numpy type other than strings; None if ONNX has none."""
    little = dtype.newbyteorder("<")
    return _CODES.get(little, _ADDED_TYPES.get(little.name))


def data_size(code: int, dims: tuple[int, ...]) -> int:
    """Return the size of the elements in bytes; types narrower than a byte are packed."""
    return -(-math.prod(dims) * ELEMENT_TYPES[code].bits // 8)
