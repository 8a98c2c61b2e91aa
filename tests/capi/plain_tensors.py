"""The structures of `onnxtrain.h`, for ctypes."""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

CODES = {np.dtype(np.float32): 1, np.dtype(np.int32): 6, np.dtype(np.int64): 7, np.dtype(float): 11}


class PlainTensor(ctypes.Structure):
    """`onnxtrain_tensor`."""

    _fields_ = (
        ("name", c_char_p),
        ("value", c_void_p),
        ("data", c_void_p),
        ("size", c_uint64),
        ("type", c_int32),
        ("rank", c_uint32),
        ("dims", c_int64 * 8),
    )


class Options(ctypes.Structure):
    """`onnxtrain_options`."""

    _fields_ = (
        ("size", c_size_t),
        ("env", c_void_p),
        ("session_options", c_void_p),
        ("threads", c_int32),
        ("without_kernels", c_int32),
        ("memory_limit", c_uint64),
    )


def plain_tensors(*arrays: Array, **named: Array) -> Any:
    """Tensors over the memory of arrays: by position, then by name."""
    given = [*((None, array) for array in arrays), *named.items()]
    made = (PlainTensor * len(given))()
    for tensor, (name, array) in zip(made, given, strict=True):
        tensor.name = None if name is None else name.encode()
        tensor.data, tensor.size = array.ctypes.data, array.nbytes
        tensor.type, tensor.rank = CODES[array.dtype], array.ndim
        tensor.dims[: array.ndim] = array.shape
    return made
