"""Writes low-rank factors beside layers: to train, or as slots that an adapter fills.

Both are the same nodes. To train, A and B are initializers, and the product is scaled. For
inference each factor is an input with a default of rank 0, so that the model computes what it did
before; an adapter brings factors of any rank, with the scale inside of B.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnxtrain.format.adapter.pairs import Pair
from onnxtrain.offline.blocks.values import all_graphs, defined_names
from onnxtrain.offline.graph.names import Names
from onnxtrain.offline.lora import Lora
from onnxtrain.offline.passes.lora.layers import (
    CONV,
    LEFT,
    Layer,
    factor_names,
    slots_of,
)

_WINDOW = ("auto_pad", "dilations", "kernel_shape", "pads", "strides")


def pair_beside(path: str, lora: Lora, layer: Layer) -> Pair:
    """Return the two factors of a path beside a layer."""
    kind = "conv" if layer.is_conv else "linear"
    return Pair(path, *factor_names(path), lora.rank, lora.scale, kind)


def factor_dims(layer: Layer, width: int, rank: int) -> list[list[int]]:
    """Return the shapes of A and B."""
    if layer.is_conv:
        return [[rank, layer.depth, *layer.kernel], [width, rank, *[1] * len(layer.kernel)]]
    return [[layer.depth, rank], [rank, width]]


class FactorWriter:
    """Adds factors to a graph, in place."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._graph = graph
        self._names = Names(name for body in all_graphs(graph) for name in defined_names(body))
        self._written = set[str]()
        self._nodes: list[onnx.NodeProto] = []

    def write(self, layers: Sequence[tuple[Layer, Lora]], *, slots: bool) -> None:
        """Put factors beside layers: initializers to train, or slots for an adapter."""
        after: dict[str, list[tuple[Layer, Lora]]] = {}
        before: dict[str, tuple[Layer, Lora]] = {}
        for layer, lora in layers:
            self._add_factors(layer, lora, slots)
            if layer.updates_weights:
                before[layer.node.output[0]] = layer, lora
            else:
                after.setdefault(layer.y, []).append((layer, lora))
        found = list(self._graph.node)
        del self._graph.node[:]
        for node in found:
            for name in node.output:
                if name in before:
                    place = list(node.input).index(before[name][0].y)
                    node.input[place] = self._weights(*before[name], slots)
            changed = [(i, name) for i, name in enumerate(node.output) if name in after]
            renamed = [self._names.fresh(f"{name}.base") for _, name in changed]
            for (i, _), new in zip(changed, renamed, strict=True):
                node.output[i] = new
            self._flush([node])
            for (_, name), new in zip(changed, renamed, strict=True):
                for layer, lora in after[name]:
                    self._update(layer, lora, new, name, slots)
            self._flush([])

    def _flush(self, then: Sequence[onnx.NodeProto]) -> None:
        self._graph.node.extend((*self._nodes, *then))
        self._nodes = []

    # ---- factors -----------------------------------------------------------------------------

    def _add_factors(self, layer: Layer, lora: Lora, slots: bool) -> None:
        for path, width in slots_of(layer):
            if path in self._written:
                continue  # of a weight that several nodes share
            number = len(self._written)
            self._written.add(path)
            names = factor_names(path)
            dims = factor_dims(layer, width, 0 if slots else lora.rank)
            values = _no_values(dims) if slots else _first_values(dims, layer, lora, number)
            dtype = helper.tensor_dtype_to_np_dtype(layer.element_type)
            for name, value in zip(names, values, strict=True):
                tensor = numpy_helper.from_array(value.astype(dtype), name)
                self._graph.initializer.append(tensor)
            if slots:
                rank = f"{path}.lora_rank"
                open_dims = [[rank if d == 0 else d for d in one] for one in dims]
                for name, one in zip(names, open_dims, strict=True):
                    info = helper.make_tensor_value_info(name, layer.element_type, one)
                    self._graph.input.append(info)

    # ---- nodes -------------------------------------------------------------------------------

    def _node(self, op: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        output = self._names.fresh(name)
        self._nodes.append(helper.make_node(op, inputs, [output], output, **attributes))
        return output

    def _update(self, layer: Layer, lora: Lora, base: str, result: str, slots: bool) -> None:
        """Compute `result` from the output of a layer and its low-rank update."""
        path, path_of_sum = layer.path, f"{layer.path}.lora_add"
        made = self._product(layer, lora, slots)
        if not layer.quantized_by:
            name = self._names.fresh(path_of_sum)
            self._nodes.append(helper.make_node("Add", [base, made], [result], name))
            return
        floats = self._node(
            "DequantizeLinear", [base, *layer.quantized_by], f"{path}.lora_expanded"
        )
        total = self._node("Add", [floats, made], path_of_sum)
        name = self._names.fresh(f"{path}.lora_quantized")
        node = helper.make_node("QuantizeLinear", [total, *layer.quantized_by], [result], name)
        self._nodes.append(node)

    def _product(self, layer: Layer, lora: Lora, slots: bool) -> str:
        """Write scale · (x·A)·B, for each packed projection."""
        x = layer.x
        if layer.is_transposed:
            x = self._node("Transpose", [x], f"{layer.path}.lora_x", perm=[1, 0])
        if lora.dropout and not slots:
            x = self._dropped(x, layer.path, lora)
        made = [self._factored(layer, lora, x, path, slots) for path, _ in slots_of(layer)]
        if not layer.parts:
            return made[0]
        products = iter(made)
        parts = [
            next(products) if part.is_chosen else self._nothing(layer, x, part.width)
            for part in layer.parts
        ]
        return self._node("Concat", parts, f"{layer.path}.lora", axis=-1)

    def _nothing(self, layer: Layer, x: str, width: int) -> str:
        """Write zeros in the place of a packed projection without factors: a product of rank 0."""
        ends = (layer.depth, 0), (0, width)
        a, b = (
            self._constant(np.zeros(dims), layer.element_type, f"{layer.path}.lora_empty")
            for dims in ends
        )
        empty = self._node("MatMul", [x, a], f"{layer.path}.lora_none")
        return self._node("MatMul", [empty, b], f"{layer.path}.lora_zeros")

    def _factored(self, layer: Layer, lora: Lora, x: str, path: str, slots: bool) -> str:
        a, b = factor_names(path)
        first, second = f"{path}.lora_A", f"{path}.lora_B"
        if layer.form == CONV:
            window = {at.name: at for at in layer.node.attribute if at.name in _WINDOW}
            if slots:
                a, b = self._with_a_channel(a, layer, 0), self._with_a_channel(b, layer, 1)
            hidden = self._node("Conv", [x, a], first)
            self._nodes[-1].attribute.extend(window.values())
            hidden = self._scaled(hidden, layer, lora, path, slots)
            return self._node("Conv", [hidden, b], second)
        hidden = self._scaled(self._node("MatMul", [x, a], first), layer, lora, path, slots)
        return self._node("MatMul", [hidden, b], second)

    def _with_a_channel(self, factor: str, layer: Layer, axis: int) -> str:
        """Add a channel of zeros: onnxruntime leaves the result of a Conv of none undefined."""
        dims = factor_dims(layer, layer.width, 1)[axis]
        zeros = self._constant(np.zeros(dims), layer.element_type, f"{factor}.zeros")
        return self._node("Concat", [factor, zeros], f"{factor}.padded", axis=axis)

    def _weights(self, layer: Layer, lora: Lora, slots: bool) -> str:
        """Write weights with their update, where the product itself cannot be split."""
        made = []
        for path, _ in slots_of(layer):
            a, b = factor_names(path)
            scaled = self._scaled(a, layer, lora, path, slots)
            made.append(self._node("MatMul", [scaled, b], f"{path}.lora"))
        update = made[0]
        if layer.parts:
            products = iter(made)
            parts = [
                next(products) if part.is_chosen else self._no_update(layer, part.width)
                for part in layer.parts
            ]
            update = self._node("Concat", parts, f"{layer.path}.lora", axis=1)
        if layer.form == LEFT:
            update = self._node("Transpose", [update], f"{layer.path}.lora_T", perm=[1, 0])
        return self._node("Add", [layer.y, update], f"{layer.path}.lora_add")

    def _no_update(self, layer: Layer, width: int) -> str:
        zeros = np.zeros((layer.depth, width))
        return self._constant(zeros, layer.element_type, f"{layer.path}.lora_zeros")

    def _scaled(self, value: str, layer: Layer, lora: Lora, path: str, slots: bool) -> str:
        if slots or lora.scale == 1.0:
            return value
        scale = self._constant(lora.scale, layer.element_type, f"{path}.lora_scale")
        return self._node("Mul", [value, scale], f"{path}.lora_scaled")

    def _dropped(self, x: str, path: str, lora: Lora) -> str:
        ratio = self._constant(lora.dropout, onnx.TensorProto.FLOAT, f"{path}.lora_ratio")
        training = self._constant(True, onnx.TensorProto.BOOL, f"{path}.lora_training")
        return self._node("Dropout", [x, ratio, training], f"{path}.lora_dropout")

    def _constant(self, number: Any, element_type: int, name: str) -> str:
        dtype = helper.tensor_dtype_to_np_dtype(element_type)
        value = numpy_helper.from_array(np.array(number, dtype))
        return self._node("Constant", [], name, value=value)  # an initializer might be a weight


def _no_values(dims: Sequence[Sequence[int]]) -> Iterator[np.ndarray[Any, Any]]:
    return (np.zeros(one, np.float32) for one in dims)


def _first_values(
    dims: Sequence[Sequence[int]], layer: Layer, lora: Lora, number: int
) -> list[np.ndarray[Any, Any]]:
    """Return what A and B begin with: uniform numbers below 1 / √inputs, and zeros."""
    a, b = dims
    inputs = int(np.prod(a[1:])) if layer.is_conv else a[0]
    bound = 1 / np.sqrt(inputs)
    # Three numbers: one alone is the seed of a new head, which would begin with equal values.
    values = np.random.default_rng([lora.seed, number, 1]).uniform(-bound, bound, a)
    return [values, np.zeros(b, np.float32)]
