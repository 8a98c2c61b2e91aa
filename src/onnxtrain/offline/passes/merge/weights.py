"""Where the weights of a layer are, and how an update is added to them: in float, or quantized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from onnxtrain.errors import AdapterError
from onnxtrain.format.adapter.adapter import Adapter
from onnxtrain.format.adapter.pairs import Pair
from onnxtrain.offline.passes.lora.graph_index import attribute, operator_of
from onnxtrain.offline.passes.lora.layers import LEFT, Layer, slots_of
from onnxtrain.offline.passes.merge.integers import WITH_INTEGERS, Integers, find_integers
from onnxtrain.offline.passes.merge.nbits import expand_nbits, put_nbits, write_float_product
from onnxtrain.offline.passes.merge.requantize import quantized_again
from onnxtrain.offline.passes.merge.tensors import Tensors

Array = npt.NDArray[Any]
NBITS = "com.microsoft.MatMulNBits"


@dataclass(frozen=True)
class Errors:
    """How far weights are from what they should be, after they were quantized again.

    `mean` and `largest` are relative to the weights; `of_update` is the error relative to the
    update: above 1, more is lost than was learnt.
    """

    mean: float = 0.0
    largest: float = 0.0
    of_update: float = 0.0

    @staticmethod
    def between(found: Array, wanted: Array, update: Array) -> Errors:
        """Compare weights."""
        wrong, size = np.abs(found - wanted), np.abs(wanted)
        least = 1e-30  # for weights that are all zero
        return Errors(
            float(wrong.mean()) / max(float(size.mean()), least),
            float(wrong.max()) / max(float(size.max()), least),
            float(np.linalg.norm(wrong)) / max(float(np.linalg.norm(update)), least),
        )


NO_ERRORS = Errors()


def update_of(layer: Layer, adapter: Adapter, pairs: Mapping[str, Pair]) -> Array:
    """Return what the factors add to the weights: `[in, out]`, or the kernel of a convolution."""
    parts = []
    for path, width in slots_of(layer):
        pair = pairs.get(path)
        if pair is None:
            parts.append(np.zeros((layer.depth, width), np.float32))
            continue
        a, b = (adapter[name].astype(np.float32) for name in (pair.a, pair.b))
        wanted = (
            (pair.rank, layer.depth, *layer.kernel) if layer.is_conv else (layer.depth, pair.rank)
        )
        outputs = b.shape[0 if layer.is_conv else -1]
        if a.shape != wanted or outputs != width or (pair.kind == "conv") != layer.is_conv:
            raise AdapterError(
                f"the factors of {path!r} have the shapes {list(a.shape)} and {list(b.shape)}, and "
                f"the layer has {layer.depth} inputs and {width} outputs: it is of another model"
            )
        if layer.is_conv:
            return np.tensordot(b.reshape(width, pair.rank), a, 1)
        parts.append(a @ b)
    return np.concatenate(parts, 1)


class WeightMerger:
    """Adds updates to the weights of a graph. Layers of one weight are given together."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        # What is to be computed behind a node, by the name of its output.
        self.behind: dict[str, list[onnx.NodeProto]] = {}

    @staticmethod
    def is_float(layer: Layer, tensors: Tensors) -> bool:
        """Whether the weights are floats as they are stored."""
        source = tensors.index.source(layer.weight)
        stored = tensors.index.float_type(source.name) if source is not None else 0
        return operator_of(layer.node) not in (NBITS, *WITH_INTEGERS) and bool(stored)

    def merge_float(self, layers: Sequence[Layer], update: Array) -> bool:
        """Put float weights with the update in the place of any; False where none can stand."""
        layer = layers[0]
        if operator_of(layer.node) == NBITS:
            weights = expand_nbits(layer.node, self._tensors)[0].T + update
            for one in layers:
                write_float_product(one.node, weights, self._tensors, self.behind)
            return True
        if operator_of(layer.node) in WITH_INTEGERS:
            return False
        place = _place(layer)
        if any(one.node.input[place] != layer.node.input[place] for one in layers):
            return False
        name = layer.node.input[place]
        old = self._tensors.array(name)
        new = (old.astype(np.float32) + as_read(layer, update)).astype(old.dtype)
        self._tensors.put(name, new, [one.node for one in layers], place)
        return True

    def merge_quantized(self, layers: Sequence[Layer], update: Array) -> Errors | None:
        """Quantize weights with the update again; None where their form is not known."""
        layer = layers[0]
        if len(layers) > 1:
            return None
        if operator_of(layer.node) == NBITS:
            return self._merge_nbits(layer, update)
        read_as = layer.node.input[_place(layer)]
        found = find_integers(layer.node, read_as, self._tensors)
        return None if found is None else self._merge_integers(found, as_read(layer, update))

    def _merge_integers(self, found: Integers, update: Array) -> Errors:
        tensors = self._tensors
        integers, scale = found.weights.array(tensors), found.scale.array(tensors)
        zero = np.zeros((), integers.dtype) if found.zero is None else found.zero.array(tensors)
        grid, shape = found.grid(integers, scale, zero)
        old = grid.values(integers.astype(np.float32).reshape(shape))
        change = (update.transpose(found.order) if found.order else update).reshape(shape)
        new, scales, zeros = quantized_again(old + change, grid, found.keeps_scale)
        kinds = [(found.weights, new, integers), (found.scale, scales, scale)]
        if found.zero is not None:
            kinds.append((found.zero, np.broadcast_to(zeros, grid.zero.shape), zero))
        for place, value, before in kinds:
            place.put(tensors, value.astype(before.dtype).reshape(before.shape))
        return Errors.between((new - zeros) * scales.astype(np.float32), old + change, change)

    def _merge_nbits(self, layer: Layer, update: Array) -> Errors:
        weights, grid, blocked = expand_nbits(layer.node, self._tensors)
        wanted = blocked(weights + update.T)
        new, scales, zeros = quantized_again(wanted, grid)
        found = (new - zeros) * scales.astype(np.float32)
        put_nbits(layer.node, new, scales, zeros, self._tensors)
        rows, inside = (layer.width, -1), np.s_[:, : layer.depth]
        return Errors.between(found.reshape(rows)[inside], wanted.reshape(rows)[inside], update.T)


def _place(layer: Layer) -> int:
    return 0 if layer.form == LEFT else 1


def as_read(layer: Layer, update: Array) -> Array:
    """Return an update in the layout of the weights that the node reads."""
    if layer.is_conv:
        return update
    is_turned = layer.form == LEFT or attribute(layer.node, "transB", 0)
    alpha = next((a.f for a in layer.node.attribute if a.name == "alpha"), 1.0)
    return (update.T if is_turned else update) / np.float32(alpha)
