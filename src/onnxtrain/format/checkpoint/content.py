"""The content of a checkpoint as plain data: tensors, optimizer state, properties."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxtrain.errors import CheckpointError
from onnxtrain.format.element_types import ELEMENT_TYPES, STRING, code_of

Array = npt.NDArray[Any]
MAX_RANK = 32  # the limit of numpy 1


@dataclass(frozen=True, eq=False)
class RawTensor:
    """A tensor of a type that numpy lacks, or a tensor of a nominal checkpoint.

    `code` is ONNX's number of the element type, and `data` the elements as in the file:
    little-endian, types narrower than a byte packed with the first element in the lowest bits. In
    a nominal checkpoint `data` is empty, whatever `dims` says.
    """

    code: int
    dims: tuple[int, ...]
    data: npt.NDArray[np.uint8]

    def bits(self) -> Array:
        """Return the elements as unsigned integers of their width; for 8 bits and more."""
        width = ELEMENT_TYPES[self.code].bits
        if width < 8:
            raise CheckpointError(f"{ELEMENT_TYPES[self.code].name} elements are packed in bytes")
        return self.data.view(f"<u{width // 8}").reshape(self.dims)


Tensor = Array | RawTensor
Property = int | float | str


@dataclass(eq=False)
class OptimizerGroup:
    """The state of the optimizer for a group of parameters.

    `states` maps a parameter to its state tensors, `momentum<k>` in the file.
    """

    step: int = 0
    initial_learning_rate: float = 0.0
    states: dict[str, list[Tensor]] = field(default_factory=dict)


@dataclass(eq=False)
class CheckpointContent:
    """Everything in a checkpoint file, in the order of the file.

    A tensor is a numpy array, or a `RawTensor` if numpy lacks the type. In a `nominal` checkpoint
    all are `RawTensor`s without data. The file rounds float properties to 32 bits.
    `has_external_data` says that large tensors were in a second file; the writer puts them in one
    again.
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
    code, kind = code_of(tensor.dtype), tensor.dtype.kind
    if code is not None:
        return code
    if kind == "U" or (kind == "O" and all(isinstance(text, str) for text in tensor.flat)):
        return STRING
    raise CheckpointError(f"tensor {name!r}: a checkpoint has no element type for {tensor.dtype}")


def tensor_dims(tensor: Tensor, name: str) -> tuple[int, ...]:
    """Return the shape; `name` is for the error."""
    dims = tensor.dims if isinstance(tensor, RawTensor) else tensor.shape
    if len(dims) > MAX_RANK or any(dim < 0 for dim in dims):
        raise CheckpointError(f"tensor {name!r}: a checkpoint cannot hold the shape {dims}")
    return dims


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the elements as they are stored, without a copy if memory holds them so."""
    array: Array = tensor.data if isinstance(tensor, RawTensor) else tensor
    if array.dtype.kind in "fiuc":
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


# Properties of this prefix hold what ONNX Runtime's format has no field for: learning rate,
# scheduler, random state. Users do not see them, and ONNX Runtime ignores them.
RESERVED_PREFIX = "__onnxtrain__."


def split_properties(
    properties: Mapping[str, Property],
) -> tuple[dict[str, Property], dict[str, Property]]:
    """Return the user's properties, and the reserved ones without their prefix."""
    reserved = {n: value for n, value in properties.items() if n.startswith(RESERVED_PREFIX)}
    user = {name: value for name, value in properties.items() if name not in reserved}
    return user, {n.removeprefix(RESERVED_PREFIX): value for n, value in reserved.items()}


def merge_properties(
    user: Mapping[str, Property], reserved: Mapping[str, Property]
) -> dict[str, Property]:
    """The reverse of `split_properties`."""
    wrong = [name for name in user if name.startswith(RESERVED_PREFIX)]
    if wrong:
        raise CheckpointError(f"the property {wrong[0]!r} has the reserved prefix")
    return {**user, **{RESERVED_PREFIX + name: value for name, value in reserved.items()}}
