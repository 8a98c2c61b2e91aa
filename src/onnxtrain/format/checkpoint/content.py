"""What a checkpoint holds, as plain data: tensors by name, optimizer state, properties."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from onnxtrain.errors import CheckpointError

Array = npt.NDArray[Any]


class ElementType(NamedTuple):
    """A type of tensor elements: its name in ONNX, its width, and numpy's type if it has one."""

    name: str
    bits: int
    dtype: np.dtype[Any] | None


def _numpy_type(name: str, text: str) -> ElementType:
    dtype = np.dtype(text)
    return ElementType(name, 8 * dtype.itemsize, dtype)


# numpy 1 has no arrays of more dimensions.
MAX_RANK = 32
STRING = 8
BOOL = 9

# ONNX's numbers for element types. Of strings, the width is of no meaning.
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

_CODES = {
    element.dtype: code
    for code, element in ELEMENT_TYPES.items()
    if element.dtype is not None and code != STRING
}
# Types that packages add to numpy, one element in as many whole bytes as it needs.
_ADDED_TYPES = {
    "bfloat16": 16,
    "float8_e4m3fn": 17,
    "float8_e4m3fnuz": 18,
    "float8_e5m2": 19,
    "float8_e5m2fnuz": 20,
    "float8_e8m0fnu": 24,
}


def data_size(code: int, dims: tuple[int, ...]) -> int:
    """Return how many bytes the elements take; narrow types are packed without gaps."""
    return -(-math.prod(dims) * ELEMENT_TYPES[code].bits // 8)


@dataclass(frozen=True, eq=False)
class RawTensor:
    """A tensor whose type numpy does not have, or a tensor of a nominal checkpoint.

    `code` is ONNX's number of the element type and `data` the elements as they are in the file:
    little-endian, types narrower than a byte packed with the first element in the lowest bits.
    In a nominal checkpoint `data` is empty, whatever `dims` says.
    """

    code: int
    dims: tuple[int, ...]
    data: npt.NDArray[np.uint8]

    def bits(self) -> Array:
        """The elements as unsigned integers of their width, in shape; for 8 bits and more."""
        width = ELEMENT_TYPES[self.code].bits
        if width < 8:
            raise CheckpointError(f"{ELEMENT_TYPES[self.code].name} elements are packed in bytes")
        return self.data.view(f"<u{width // 8}").reshape(self.dims)


Tensor = Array | RawTensor
Property = int | float | str


@dataclass(eq=False)
class OptimizerGroup:
    """The state of the optimizer for a group of parameters.

    `states` maps a parameter to its state tensors; the k-th is called `momentum<k>` in the file.
    """

    step: int = 0
    initial_learning_rate: float = 0.0
    states: dict[str, list[Tensor]] = field(default_factory=dict)


@dataclass(eq=False)
class CheckpointContent:
    """All that a checkpoint file holds. The mappings are in the order of the file.

    A value is a numpy array, or a `RawTensor` where numpy lacks the type. In a `nominal` checkpoint
    all are `RawTensor`s without data. Float properties are rounded to 32 bits by the file.
    `has_external_data` says that large tensors were in a file of their own, and makes the writer
    put them in one again.
    """

    trainable: dict[str, Tensor] = field(default_factory=dict)
    frozen: dict[str, Tensor] = field(default_factory=dict)
    nominal: bool = False
    optimizer_groups: dict[str, OptimizerGroup] = field(default_factory=dict)
    properties: dict[str, Property] = field(default_factory=dict)
    has_external_data: bool = False


def tensor_code(tensor: Tensor, name: str) -> int:
    """Return ONNX's number of the element type; `name` is for the error."""
    if isinstance(tensor, RawTensor):
        if tensor.code not in ELEMENT_TYPES:
            raise CheckpointError(f"tensor {name!r}: element type {tensor.code} is unknown")
        return tensor.code
    if not isinstance(tensor, np.ndarray):
        raise CheckpointError(f"tensor {name!r}: {type(tensor).__name__} is not a numpy array")
    dtype = tensor.dtype.newbyteorder("<")
    if dtype in _CODES:
        return _CODES[dtype]
    if dtype.name in _ADDED_TYPES:
        return _ADDED_TYPES[dtype.name]
    if dtype.kind == "U" or (
        dtype.kind == "O" and all(isinstance(text, str) for text in tensor.flat)
    ):
        return STRING
    raise CheckpointError(f"tensor {name!r}: a checkpoint has no element type for {tensor.dtype}")


def tensor_dims(tensor: Tensor, name: str) -> tuple[int, ...]:
    """Return the shape; `name` is for the error."""
    dims = tensor.dims if isinstance(tensor, RawTensor) else tensor.shape
    if len(dims) > MAX_RANK or any(dim < 0 for dim in dims):
        raise CheckpointError(f"tensor {name!r}: a checkpoint cannot hold the shape {dims}")
    return dims


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the elements as they are stored; a copy only if they are not so in memory."""
    if isinstance(tensor, RawTensor):
        array: Array = tensor.data
    else:
        array = tensor
        if array.dtype.kind in "fiuc":
            array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


# ONNX Runtime saves neither the learning rate nor the scheduler nor the state of random numbers.
# They are kept in properties of this prefix, which users do not see and ONNX Runtime ignores.
RESERVED_PREFIX = "__onnxtrain__."


def split_properties(
    properties: Mapping[str, Property],
) -> tuple[dict[str, Property], dict[str, Property]]:
    """Separate the user's properties from the reserved ones, whose prefix is taken off."""
    user: dict[str, Property] = {}
    reserved: dict[str, Property] = {}
    for name, value in properties.items():
        if name.startswith(RESERVED_PREFIX):
            reserved[name.removeprefix(RESERVED_PREFIX)] = value
        else:
            user[name] = value
    return user, reserved


def merge_properties(
    user: Mapping[str, Property], reserved: Mapping[str, Property]
) -> dict[str, Property]:
    """The reverse of `split_properties`."""
    for name in user:
        if name.startswith(RESERVED_PREFIX):
            raise CheckpointError(
                f"the property {name!r} begins with {RESERVED_PREFIX!r}, which is reserved"
            )
    return {**user, **{RESERVED_PREFIX + name: value for name, value in reserved.items()}}
