"""Weights of 4, 8 or 16 bits that are expanded before a product, or in an operator of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx

from onnxtrain.offline.passes.lora.graph_index import attribute, operator_of
from onnxtrain.offline.passes.merge.requantize import Grid
from onnxtrain.offline.passes.merge.tensors import Tensors

Array = npt.NDArray[Any]
# Operators with quantized weights: where these, their scale and their zero point are.
_QUANTIZED = {
    "com.microsoft.DynamicQuantizeMatMul": (1, 2, 3),
    "com.microsoft.MatMulIntegerToFloat": (1, 3, 5),
    "QLinearMatMul": (3, 4, 5),
    "QLinearConv": (3, 4, 5),
}
WITH_INTEGERS = (*_QUANTIZED, "MatMulInteger")  # whose weights cannot be floats
_BIAS = {"QLinearConv": 8}  # an input of integers whose scale is made of that of the weights


class Place(NamedTuple):
    """An input of a node."""

    node: onnx.NodeProto
    number: int

    @property
    def name(self) -> str:
        """The value that is read there; "" where there is none."""
        return self.node.input[self.number] if self.number < len(self.node.input) else ""

    def array(self, tensors: Tensors) -> Array:
        """Return the constant that is read there."""
        return tensors.array(self.name)

    def put(self, tensors: Tensors, value: Array) -> None:
        """Let the node read a new constant."""
        tensors.put(self.name, value, [self.node], self.number)


@dataclass(frozen=True)
class Integers:
    """Quantized weights: where they and their scales are, and along which axis these go."""

    weights: Place
    scale: Place
    zero: Place | None
    axis: int
    block: int = 0
    order: tuple[int, ...] = ()  # of the axes, from those that the layer reads to those stored
    keeps_scale: bool = False

    def grid(self, integers: Array, scale: Array, zero: Array) -> tuple[Grid, tuple[int, ...]]:
        """Return how integers stand for weights, and the shape that they have to have for that."""
        rank = integers.ndim
        lowest, highest = _range(integers.dtype)
        offset = self._spread(zero, rank).astype(np.float32)
        middle = 0 if lowest < 0 else (highest + 1) // 2
        is_fixed = bool((offset == middle).all())
        if is_fixed:
            # As many steps as before: some leave room for the sums of 16 bits of older processors.
            used = int(np.abs(integers.astype(np.int64) - middle).max(initial=1))
            steps = max(1, min(used, highest - middle))
            lowest, highest = middle - steps, middle + steps
        grid = Grid(self._spread(scale, rank), offset, lowest, highest, is_fixed)
        return grid, self._split(integers.shape)

    def _split(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return a shape with the axis of blocks split in two."""
        if not self.block:
            return tuple(shape)
        at = self.axis % len(shape)
        return (*shape[:at], shape[at] // self.block, self.block, *shape[at + 1 :])

    def _spread(self, values: Array, rank: int) -> Array:
        """Return scales or zero points with the axes of the weights."""
        if values.size == 1:
            return values.reshape([1] * (rank + bool(self.block)))
        at = self.axis % rank
        if self.block:
            return np.expand_dims(values, at + 1)
        if values.ndim == 1:
            return values.reshape([-1 if i == at else 1 for i in range(rank)])
        return values


def find_integers(node: onnx.NodeProto, read_as: str, tensors: Tensors) -> Integers | None:
    """Find the quantized weights of a layer; None if others read them, or their form is unknown."""
    operator = operator_of(node)
    if operator in _QUANTIZED:
        weights, scale, zero = (Place(node, number) for number in _QUANTIZED[operator])
        keeps = bool(Place(node, _BIAS.get(operator, 99)).name)
        axis = 0 if operator == "QLinearConv" else -1
        return _checked(Integers(weights, scale, zero, axis, keeps_scale=keeps), tensors)
    maker, order = _maker(read_as, tensors), tuple[int, ...]()
    if maker is not None and operator_of(maker) == "Transpose":
        given = next((list(a.ints) for a in maker.attribute if a.name == "perm"), [1, 0])
        order = tuple(int(i) for i in np.argsort(given))
        maker = _maker(maker.input[0], tensors)
    if maker is None:
        return None
    if maker.op_type == "DequantizeLinear":
        weights, scale, zero = (Place(maker, number) for number in range(3))
        block = attribute(maker, "block_size", 0)
        found = Integers(weights, scale, zero, attribute(maker, "axis", 1), block, order)
        return _checked(found, tensors)
    return _cast_and_scaled(maker, order, tensors) if operator_of(maker) == "Mul" else None


def _cast_and_scaled(
    product: onnx.NodeProto, order: tuple[int, ...], tensors: Tensors
) -> Integers | None:
    for number in (0, 1):
        cast = _maker(product.input[number], tensors)
        if cast is not None and operator_of(cast) == "Cast":
            found = Integers(Place(cast, 0), Place(product, 1 - number), None, -1, 0, order)
            return _checked(found, tensors)
    return None


def _checked(found: Integers, tensors: Tensors) -> Integers | None:
    zero = found.zero if found.zero is not None and found.zero.name else None
    places = [place for place in (found.weights, found.scale, zero) if place is not None]
    if not all(tensors.is_stored(place.name) for place in places):
        return None
    if len(tensors.index.readers[found.weights.name]) > 1:
        return None
    is_whole = np.issubdtype(tensors.array(found.weights.name).dtype, np.integer)
    is_narrow = tensors.array(found.weights.name).dtype.name in ("int4", "uint4")
    return replace(found, zero=zero) if is_whole or is_narrow else None


def _maker(name: str, tensors: Tensors) -> onnx.NodeProto | None:
    """Return the node that makes a constant for one reader."""
    return tensors.index.makers.get(name) if tensors.index.only_reader(name) is not None else None


def _range(dtype: np.dtype[Any]) -> tuple[int, int]:
    if dtype.name in ("int4", "uint4"):
        return (-8, 7) if dtype.name == "int4" else (0, 15)
    found = np.iinfo(dtype)
    return int(found.min), int(found.max)
