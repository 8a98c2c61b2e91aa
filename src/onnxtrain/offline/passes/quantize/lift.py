"""Models that are quantized already: back to floats, with the places and ranges that they had.

Integer weights become floats that can train, and the pairs of QuantizeLinear and DequantizeLinear
are taken out; they are written again in the same places, with scales that follow training. A Relu
that is not there because the range of its result begins at 0 comes back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import ArgumentError
from onnxtrain.offline.graph.initializers import initializer, remove_node
from onnxtrain.offline.graph.names import Names, label_of
from onnxtrain.offline.graph.op_facts import INTEGER_ARITHMETIC, INTEGER_PRODUCTS
from onnxtrain.offline.graph.shapes import constant_array
from onnxtrain.offline.passes.quantize.bounds import keeps_range
from onnxtrain.offline.passes.quantize.places import Places, QuantizedLayer
from onnxtrain.offline.passes.quantize.qdq_form import write_qdq_form
from onnxtrain.offline.quantize import Quantize

Array = np.ndarray[Any, Any]
_BOUNDS = {ir.DataType.UINT8: (0, 255), ir.DataType.INT8: (-128, 127)}
_SYMMETRIC = {ir.DataType.INT8: "int8", ir.DataType.INT4: "int4"}


@dataclass(frozen=True)
class GivenScales:
    """The scales that a weight came with: for each output, or for blocks of inputs too."""

    scales: Array
    axis: int
    block: int
    integers: str  # "int8" or "int4"


@dataclass
class Lifted:
    """Where a model was quantized, and with which ranges."""

    ranges: dict[ir.Value, tuple[float, float]] = field(default_factory=dict)
    roots: dict[ir.Value, ir.Value] = field(default_factory=dict)  # what shares a range
    weights: dict[str, GivenScales | None] = field(default_factory=dict)  # None: not symmetric

    def __bool__(self) -> bool:
        return bool(self.weights or self.ranges)


def lift(model: ir.Model) -> Lifted:
    """Take the quantization out of a canonical model, in place; return where it was."""
    write_qdq_form(model)
    return _Lift(model).found


class _Lift:
    def __init__(self, model: ir.Model) -> None:
        self._graph, self._names = model.graph, Names.of(model.graph)
        self.found = Lifted()
        for node in list(model.graph):
            if node.domain == "" and node.graph is not None:
                if node.op_type == "QuantizeLinear":
                    self._quantizer(node)
                elif node.op_type == "DequantizeLinear":
                    self._constant(node)
        self._share_ranges()

    # ---- weights ---------------------------------------------------------------------------------

    def _constant(self, node: ir.Node) -> None:
        """Put floats in the place of integers that are constant."""
        q, graph = node.inputs[0], self._graph
        levels, scale = constant_array(q), constant_array(node.inputs[1])
        if q is None or levels is None:
            raise ArgumentError(
                f"quantize: {label_of(node)} reads integers that no QuantizeLinear made. Models "
                "that compute on integers in a form of their own cannot train for them: take the "
                "float model, or one in QDQ form"
            )
        if scale is None:
            raise ArgumentError(f"quantize: the scale of {label_of(node)} is computed")
        zero = constant_array(node.inputs[2]) if len(node.inputs) > 2 else None
        axis, block = _axis_and_block(node, levels.ndim)
        factor = _spread(scale.astype(np.float32), levels.shape, axis, block)
        numbers = levels.astype(np.float32)
        if zero is not None:
            numbers = numbers - _spread(zero.astype(np.float32), levels.shape, axis, block)
        name = (q.name or "weight").removesuffix("_quantized")
        name = self._names.fresh(name) if name in graph.initializers else name
        made = initializer(name, ir.Tensor(numbers * factor, name=name))
        graph.register_initializer(made)
        self._replace(node, made, q, scale, zero)

    def _replace(
        self, node: ir.Node, made: ir.Value, q: ir.Value, scale: Array, zero: Array | None
    ) -> None:
        """Let what read a constant read its floats; remember it as a weight, or an operand."""
        y = node.outputs[0]
        users = [(user.op_type, index) for user, index in y.uses()]
        ir.convenience.replace_all_uses_with(y, made, replace_graph_outputs=True)
        remove_node(self._graph, node)
        if any(op in INTEGER_PRODUCTS and index == 1 for op, index in users):
            axis, block = _axis_and_block(node, len(made.shape or ()))
            known = _SYMMETRIC.get(q.dtype) if q.dtype is not None else None
            is_symmetric = known is not None and (zero is None or not zero.any())
            self.found.weights[str(made.name)] = (
                GivenScales(scale.astype(np.float32), axis, block, known)
                if is_symmetric and known is not None
                else None
            )
        elif q.dtype in _BOUNDS and scale.size == 1:
            self._remember(made, float(scale.reshape(())), zero, q.dtype)

    # ---- activations -----------------------------------------------------------------------------

    def _quantizer(self, node: ir.Node) -> None:
        x, scale = node.inputs[0], constant_array(node.inputs[1])
        zero_value = node.inputs[2] if len(node.inputs) > 2 else None
        zero = None if zero_value is None else constant_array(zero_value)
        if x is None or scale is None or (zero_value is not None and zero is None):
            raise ArgumentError(f"quantize: the scale of {label_of(node)} is computed")
        readers = [user for user, _ in node.outputs[0].uses()]
        others = [r for r in readers if (r.domain, r.op_type) != ("", "DequantizeLinear")]
        if others or node.outputs[0].is_graph_output():
            where = label_of(others[0]) if others else "the model returns"
            raise ArgumentError(
                f"quantize: {where} computes with the integers of {label_of(node)}, which cannot "
                "train: take the float model, or one in QDQ form"
            )
        dtype = node.outputs[0].dtype or ir.DataType.UINT8
        if x.is_initializer():
            for reader in readers:
                self._replace(reader, x, node.outputs[0], scale, zero)
        else:
            if scale.size != 1 or dtype not in _BOUNDS:
                raise ArgumentError(
                    f"quantize: {label_of(node)} quantizes an activation "
                    f"{'by channels' if scale.size != 1 else f'to {dtype.name.lower()}'}. Only 8 "
                    "bits with one scale are trained for: take the float model"
                )
            self._pair(x, readers, float(scale.reshape(())), zero, dtype)
        if node.graph is not None and not node.outputs[0].uses():
            remove_node(self._graph, node)

    def _pair(
        self,
        x: ir.Value,
        readers: list[ir.Node],
        step: float,
        zero: Array | None,
        dtype: ir.DataType,
    ) -> None:
        low, high = _range(step, zero, dtype)
        value = x
        if low == 0 and _may_be_negative(x):
            value = self._bounded(x, 6.0 if abs(high - 6.0) < step else None)
        for reader in readers:
            y = reader.outputs[0]
            name = y.name if y.is_graph_output() else None
            ir.convenience.replace_all_uses_with(y, value, replace_graph_outputs=True)
            remove_node(self._graph, reader)
            if name is not None:
                value.name = name
        self._remember(value, step, zero, dtype)

    def _bounded(self, x: ir.Value, top: float | None) -> ir.Value:
        """Write the Relu, or the Clip at 6, that a range stood for."""
        inputs = [x]
        for bound in (0.0, top) if top is not None else ():
            name = self._names.fresh("bound")
            value = initializer(name, ir.Tensor(np.array(bound, np.float32), name=name))
            self._graph.register_initializer(value)
            inputs.append(value)
        node = ir.node("Relu" if top is None else "Clip", inputs)
        node.name = self._names.fresh(f"{x.name}_bounded")
        made = node.outputs[0]
        made.name = self._names.fresh(f"{x.name}_bounded")
        made.type, made.shape = x.type, x.shape
        producer = x.producer()
        assert producer is not None
        self._graph.insert_after(producer, node)
        return made

    def _remember(
        self, value: ir.Value, step: float, zero: Array | None, dtype: ir.DataType
    ) -> None:
        self.found.ranges[value] = _range(step, zero, dtype)

    def _share_ranges(self) -> None:
        """Let what only moves elements have the range of what it moves, if they are the same."""
        found = self.found
        order = {v: i for i, node in enumerate(self._graph) for v in node.outputs}
        for value in sorted(found.ranges, key=lambda v: order.get(v, -1)):
            node = value.producer()
            x = node.inputs[0] if node is not None and keeps_range(node) else None
            same = x in found.roots and np.allclose(found.ranges[x], found.ranges[value], 1e-5)
            found.roots[value] = found.roots[x] if same and x is not None else value


def _range(step: float, zero: Array | None, dtype: ir.DataType) -> tuple[float, float]:
    least, most = _BOUNDS[dtype]
    offset = 0 if zero is None else int(zero.reshape(()))
    return (least - offset) * step, (most - offset) * step


def _may_be_negative(value: ir.Value) -> bool:
    node = value.producer()
    return node is not None and node.domain == "" and node.op_type in (
        INTEGER_PRODUCTS | INTEGER_ARITHMETIC
    )  # fmt: skip


def _axis_and_block(node: ir.Node, rank: int) -> tuple[int, int]:
    axis = node.attributes.get_int("axis", 1)
    return (axis % rank if rank else 0), node.attributes.get_int("block_size", 0)


def _spread(values: Array, shape: tuple[int, ...], axis: int, block: int) -> Array:
    """Give scales the shape in which they broadcast against integers."""
    if values.size == 1:
        return values.reshape(())
    if block:
        return np.repeat(values, block, axis)[tuple(slice(n) for n in shape)]
    wide = [1] * len(shape)
    wide[axis] = -1
    return values.reshape(wide)


# ---- the same places again -----------------------------------------------------------------------


def keep_places(places: Places, lifted: Lifted) -> None:
    """Let a model be quantized where it was, and nowhere else."""
    places.activations, places.constants = dict(lifted.roots), []
    places.integer_readers = {}
    layers, places.layers = places.layers, []
    for layer in layers:
        is_quantized = (
            all(v in lifted.roots for v in layer.data)
            if layer.weight is None
            else layer.weight.name in lifted.weights
        )
        if is_quantized:
            places.layers.append(layer)
        else:
            places.floats[layer.node] = "it is not quantized in the given model"
    places.others = [
        node for node in places.others
        if all(v in lifted.roots for v in node.inputs) and _is_quantized_behind(node, lifted)
    ]  # fmt: skip


def _is_quantized_behind(node: ir.Node, lifted: Lifted) -> bool:
    return any(v in lifted.roots for v in _results(node))


def _results(node: ir.Node) -> Iterator[ir.Value]:
    yield node.outputs[0]
    for user, _ in node.outputs[0].uses():
        yield user.outputs[0]


def given_scales(places: Places, lifted: Lifted, settings: Quantize) -> dict[str, Array]:
    """Return the scales that weights came with, as `insert_quantizers` writes such."""
    found = {}
    for layer in places.layers:
        given = None if layer.weight is None else lifted.weights.get(str(layer.weight.name))
        if given is not None and given.integers == settings.weights:
            scales = _as_written(layer, given, settings)
            if scales is not None:
                found[str(layer.weight.name)] = scales  # type: ignore[union-attr]
    return found


def _as_written(layer: QuantizedLayer, given: GivenScales, settings: Quantize) -> Array | None:
    """Return scales [outputs], or [blocks, outputs], if they are for the same elements."""
    assert layer.weight is not None and layer.weight.shape is not None
    outputs = int(layer.weight.shape[layer.axis])  # type: ignore[arg-type]
    if settings.weights == "int4" and layer.node.op_type != "Conv":
        if given.block != settings.block or given.axis == layer.axis or given.scales.ndim != 2:
            return None
        return given.scales if layer.axis == 1 else np.ascontiguousarray(given.scales.T)
    if given.scales.size == 1:
        return np.full(outputs, given.scales.reshape(()), np.float32)
    is_same = not given.block and given.axis == layer.axis and given.scales.shape == (outputs,)
    return given.scales if is_same else None
