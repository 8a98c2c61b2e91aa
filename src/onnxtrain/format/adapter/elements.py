"""The floats of adapters: numpy's, and bfloat16, which numpy lacks."""

from __future__ import annotations

import numpy as np

from onnxtrain.errors import AdapterError, ArgumentError
from onnxtrain.format.checkpoint.content import Array, RawTensor, Tensor
from onnxtrain.format.element_types import ELEMENT_TYPES, code_of

_BFLOAT16 = 16
FLOATS = {1: "float32", 10: "float16", 11: "float64", _BFLOAT16: "bfloat16"}


def float_name(tensor: Tensor, name: str) -> str:
    """Return the name of the element type of a factor; another than a float is refused."""
    code = tensor.code if isinstance(tensor, RawTensor) else code_of(tensor.dtype)
    if code not in FLOATS:
        kind = "another type" if code is None else ELEMENT_TYPES[code].name.lower()
        raise AdapterError(
            f"{name!r} is {kind}: factors are floats of 16, 32 or 64 bits. Adapters with quantized "
            "factors are not supported; export them unquantized"
        )
    return FLOATS[code]


def numbers_of(tensor: Tensor) -> Array:
    """Return a factor as an array that numpy computes with; bfloat16 becomes float32, exactly."""
    if not isinstance(tensor, RawTensor):
        return tensor
    wide = tensor.bits().astype(np.uint32) << 16
    return wide.view(np.float32)


def converted(values: Array, kind: str) -> Tensor:
    """Return floats in another type, rounded to the nearest."""
    if kind not in FLOATS.values():
        raise ArgumentError(f"the dtype is one of {', '.join(FLOATS.values())}, not {kind!r}")
    if kind != "bfloat16":
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(values.astype(kind))
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    # To the nearest, ties to even. NaN must not be rounded to infinity.
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    rounded = np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype("<u2")
    return RawTensor(_BFLOAT16, values.shape, rounded.reshape(-1).view(np.uint8))
