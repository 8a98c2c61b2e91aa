"""QuantizeLinear and DequantizeLinear, written into a model.

The scales of activations come from one tensor of ranges, [n, 2] for n activations, so that training
updates them all at once (`ranges.py`). Where scales are learned, each has a parameter t, which
begins at 0: the scale is s·exp(t). So a step of an optimizer changes it by a part of itself,
however small it is, and weight decay pulls it back to where calibration put it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.format.names import RANGE_MOMENTUM, RANGES
from onnxtrain.offline.graph.initializers import initializer
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import constant_array, static_dims
from onnxtrain.offline.graph.subgraphs import replace_node
from onnxtrain.offline.passes.quantize.bounds import (
    BOUNDED,
    FLOAT_LAYER,
    SOURCE,
    Bounds,
    bounds_of,
    is_within,
    take_bounds,
)
from onnxtrain.offline.passes.quantize.forms import turn
from onnxtrain.offline.passes.quantize.least_scales import least_scales
from onnxtrain.offline.passes.quantize.patches import Samples
from onnxtrain.offline.passes.quantize.places import Places, QuantizedLayer, bias_of
from onnxtrain.offline.passes.quantize.weight_scales import output_shifts, weight_scales
from onnxtrain.offline.quantize import Quantize

Array = np.ndarray[Any, Any]
QUANTIZER = "onnxtrain.quantizer"  # in the notes of a DequantizeLinear: where its scale is from
SHIFT = ".scale_shift"  # what learned scales are called, behind the name of a weight or activation
_LIMITS = {ir.DataType.UINT8: (0, 255), ir.DataType.INT8: (-128, 127)}
TINY = 1e-12  # the least scale: what is zero throughout has one too


@dataclass(frozen=True)
class Inserted:
    """What quantization added to a model."""

    trains: tuple[str, ...]  # learned scales
    kept: tuple[str, ...]  # tensors to store beside what trains
    folded: tuple[str, ...]  # what an exported model has as constants


def insert_quantizers(
    model: ir.Model, places: Places, ranges: Mapping[ir.Value, tuple[float, float]],
    settings: Quantize, trained: Collection[str], given: Mapping[str, Array] | None = None,
    samples: Samples | None = None,
) -> Inserted:  # fmt: skip
    """Write the nodes that quantize, and their scales, into a canonical model.

    Scales of weights are learned for those that are `trained`. A weight that came with scales is
    `given` them by its name. With `samples` of what layers read, scales are best for these, and
    biases make up for what rounding adds to outputs on average.
    """
    writer = _Writer(model, settings, trained, given or {}, samples or {})
    least = least_scales(places, ranges)
    with writer.op.arithmetic():
        for layer in places.layers:
            if layer.weight is not None:
                writer.weight(layer, least.get(layer.weight))
        for value, constant in places.constants:
            writer.constant(value, constant)
        writer.activations(places, ranges)
    model.graph.sort()
    return Inserted(tuple(writer.trains), tuple(writer.kept), tuple(writer.folded))


class _Writer:
    def __init__(
        self,
        model: ir.Model,
        settings: Quantize,
        trained: Collection[str],
        given: Mapping[str, Array],
        samples: Samples,
    ) -> None:
        self.op = Ops(model.graph, model.opset_imports[""])
        self.op.scope = "quantization"
        self._graph, self._settings = model.graph, settings
        self._trained, self._given_scales, self._samples = trained, given, samples
        self.trains: list[str] = []
        self.kept: list[str] = []
        self.folded: list[str] = []
        self._done: dict[tuple[ir.Value, int], ir.Value] = {}
        is_unsigned = settings.activations == "uint8"
        self._activation_type = ir.DataType.UINT8 if is_unsigned else ir.DataType.INT8

    # ---- weights ---------------------------------------------------------------------------------

    def weight(self, layer: QuantizedLayer, least: Array | None) -> None:
        weight = layer.weight
        assert weight is not None
        key = weight, layer.axis
        if key not in self._done:
            self._done[key] = self._quantized_weight(layer, weight, least)
        is_flat = self.op.rank(layer.node.outputs[0]) == 2
        if self._settings.weights == "int4" and is_flat and layer.node.op_type != "Conv":
            self._as_matmul(layer.node, self._done[key])
        else:
            layer.node.replace_input_with(1, self._done[key])

    def _as_matmul(self, node: ir.Node, weight: ir.Value) -> None:
        """Put MatMul, for which onnxruntime has a product with int4, in the place of Gemm.

        With one more axis, or onnxruntime makes Gemm of MatMul and Add again.
        """
        op, last = self.op, self._graph[-1]
        x, bias = node.inputs[0], node.inputs[2] if len(node.inputs) > 2 else None
        assert x is not None
        wide = op.Squeeze(op.MatMul(op.Unsqueeze(x, [0]), weight), [0])
        product = op.type_as(wide, node.outputs[0])
        made = product if bias is None else op.Add(product, bias)
        replace_node(node, [made], last)

    def _quantized_weight(
        self, layer: QuantizedLayer, weight: ir.Value, least: Array | None
    ) -> ir.Value:
        op, settings, name = self.op, self._settings, str(weight.name)
        samples = self._samples.get(layer.node)
        scales = weight_scales(layer, settings, samples)
        least = np.maximum(0.0 if least is None else least, TINY).astype(np.float32)
        given = self._given_scales.get(name)
        if given is not None and given.shape == scales.shape:
            scales, least = given, np.maximum(given, least)
        if samples is not None:
            _take_shifts(layer, output_shifts(layer, settings, samples, scales))
        block = settings.block if scales.ndim == 2 else 0
        axis = 0 if block else layer.axis
        if block and layer.axis == 0:
            self._transpose(weight)
        dtype = ir.DataType.INT4 if settings.weights == "int4" else ir.DataType.INT8
        if settings.scales == "average" and not block:
            scale = self._largest(weight, axis, least)
        else:
            scale = self._given(name, np.maximum(scales, least))
        self._name(scale, f"{name}_scale")
        zero = self._zeros(dtype, scale)
        (q,) = op.call("QuantizeLinear", weight, scale, zero, axis=axis, block_size=block or None)
        q.dtype = dtype
        op.shape_as(q, weight)
        self._name(q, f"{name}_quantized")
        (y,) = op.call(
            "DequantizeLinear", q, scale, zero, like=weight, axis=axis, block_size=block or None
        )
        is_fixed = settings.scales == "learned" and name not in self._trained
        source = "largest" if settings.scales == "average" and not block else settings.scales
        self._note(y, "fixed" if is_fixed else source)
        return y

    @staticmethod
    def _note(value: ir.Value, source: str) -> None:
        node = value.producer()
        assert node is not None
        node.metadata_props[QUANTIZER] = source

    @staticmethod
    def _transpose(weight: ir.Value) -> None:
        """Turn the weight of Gemm into a matrix [inputs, outputs], blocks along the first axis.

        A Transpose would not do: onnxruntime 1.31 moves it behind a blocked QuantizeLinear, and
        forgets the scales.
        """
        array = constant_array(weight)
        assert array is not None
        turn(weight, array)

    def _largest(self, weight: ir.Value, axis: int, least: Array) -> ir.Value:
        """Return the scale with which the largest weight of a channel becomes the largest integer.

        No gradient goes through it: see `rule.py`.
        """
        op = self.op
        axes = [a for a in range(op.rank(weight)) if a != axis]
        largest = op.ReduceMax(op.Abs(weight), op.int64(axes), keepdims=0)
        op.with_dims(largest, [op.dims(weight)[axis]])
        return op.Max(op.Mul(largest, 1.0 / self._settings.largest), op.const(least))

    def _given(self, name: str, scales: Array) -> ir.Value:
        """Return scales that are known, and learned from there if settings say so."""
        op = self.op
        start = op.const(np.maximum(scales, TINY).astype(np.float32), name=f"{name}_first_scale")
        if self._settings.scales != "learned" or name not in self._trained:
            return start
        shift = self.op.names.fresh(f"{name}{SHIFT}")
        zeros = np.zeros(scales.shape, np.float32)
        value = initializer(shift, ir.Tensor(zeros, name=shift))
        self._graph.register_initializer(value)
        self.trains.append(shift)
        return op.Mul(start, op.Exp(value))

    def _zeros(self, dtype: ir.DataType, scale: ir.Value) -> ir.Value:
        zeros = np.zeros(static_dims(scale) or (), dtype.numpy())
        made = ir.Value(name=self.op.names.fresh("zero_points"))
        made.const_value = ir.Tensor(zeros, dtype=dtype, name=made.name)
        made.dtype, made.shape = dtype, ir.Shape(zeros.shape)
        self._graph.register_initializer(made)
        return made

    def _name(self, value: ir.Value, name: str) -> None:
        value.name = self.op.names.fresh(name)
        if value.producer() is not None:
            self.folded.append(value.name)

    # ---- activations -----------------------------------------------------------------------------

    def activations(
        self,
        places: Places,
        ranges: Mapping[ir.Value, tuple[float, float]],
    ) -> None:
        activations = places.activations
        roots = list(dict.fromkeys(activations.values()))
        if not roots:
            return
        numbers = np.array([ranges[root] for root in roots], np.float32)
        scales, zero_points = self._all_scales(roots, numbers)
        made = dict[ir.Value, tuple[ir.Value, ir.Value]]()
        for value, root in activations.items():
            if root not in made:
                index = roots.index(root)
                made[root] = self._own_scale(root, index, scales, zero_points)
            bounds = bounds_of(value.producer())
            if bounds is not None and self._settings.scales == "learned":
                self._leave_top_open(value, bounds)
            q = self._quantize(value, *made[root], places.integer_readers.get(value))
            if take_bounds(value)[0].producer() in places.floats:
                q.metadata_props[SOURCE] = FLOAT_LAYER
            elif bounds is not None and is_within(ranges[root], bounds):
                q.metadata_props[SOURCE] = BOUNDED

    def _leave_top_open(self, value: ir.Value, bounds: Bounds) -> None:
        """Leave the upper bound to the scale, which learns it; Clip from 0 becomes Relu."""
        node, (low, high) = value.producer(), bounds
        if node is not None and low == 0 and high < math.inf:
            node.op_type = "Relu"
            node.resize_inputs(1)

    def _all_scales(self, roots: list[ir.Value], numbers: Array) -> tuple[ir.Value, ir.Value]:
        """Return the scales and zero points of all activations, as vectors."""
        op, settings = self.op, self._settings
        low, high = np.minimum(numbers[:, 0], 0), np.maximum(numbers[:, 1], 0)
        dtype = self._activation_type
        least, most = _LIMITS[dtype]
        if settings.scales == "average":
            ranges = self._statistic(RANGES, numbers)
            self._statistic(RANGE_MOMENTUM, np.array([settings.momentum], np.float32))
            bottom = op.Min(op.Gather(ranges, op.int64(0), axis=1), 0.0)
            top = op.Max(op.Gather(ranges, op.int64(1), axis=1), 0.0)
            scales = op.Max(op.Mul(op.Sub(top, bottom), 1.0 / 255), TINY)
            places = op.Sub(float(least), op.Round(op.Div(bottom, scales)))
            zeros = op.Cast(op.Clip(places, float(least), float(most)), to=dtype)
            return scales, zeros
        start = np.maximum((high - low) / 255, TINY).astype(np.float32)
        zero_points = np.clip(least - np.rint(low / start), least, most).astype(dtype.numpy())
        fixed = op.const(start, name="activation_first_scales")
        if settings.scales == "learned":
            name = f"activations{SHIFT}"
            start_at = np.zeros(len(roots), np.float32)
            shift = initializer(name, ir.Tensor(start_at, name=name))
            self._graph.register_initializer(shift)
            self.trains.append(name)
            return op.Mul(fixed, op.Exp(shift)), op.const(zero_points)
        return fixed, op.const(zero_points)

    def _statistic(self, name: str, numbers: Array) -> ir.Value:
        value = initializer(name, ir.Tensor(numbers, name=name))
        self._graph.register_initializer(value)
        self.kept.append(name)
        return value

    def _own_scale(
        self, root: ir.Value, index: int, scales: ir.Value, zero_points: ir.Value
    ) -> tuple[ir.Value, ir.Value]:
        op = self.op
        own = (
            op.Gather(scales, op.int64(index), axis=0),
            op.Gather(zero_points, op.int64(index), axis=0),
        )
        for value, label in zip(own, ("scale", "zero_point"), strict=True):
            self._name(value, f"{root.name}_{label}")
        return own

    def constant(self, node: ir.Node, index: int) -> None:
        """Quantize a number that an operator on integers reads, as the largest integer."""
        op, value = self.op, node.inputs[index]
        number = constant_array(value)
        assert value is not None and number is not None
        dtype = self._activation_type
        least, most = _LIMITS[dtype]
        levels, zero = (most, least) if number.reshape(-1)[0] >= 0 else (least, most)
        scale = np.maximum(np.abs(number.reshape(-1)[0]) / 255, TINY).astype(np.float32)
        q = op.const(np.full(number.shape, levels, dtype.numpy()))
        (y,) = op.call(
            "DequantizeLinear", q, op.const(scale.reshape(())),
            op.const(np.array(zero, dtype.numpy())), like=value,
        )  # fmt: skip
        node.replace_input_with(index, y)

    def _quantize(
        self,
        value: ir.Value,
        scale: ir.Value,
        zero_point: ir.Value,
        readers: Collection[ir.Node] | None,
    ) -> ir.Node:
        """Quantize a value for some of its readers, or for all."""
        op = self.op
        users = [use for use in value.uses() if readers is None or use[0] in readers]
        is_output = value.is_graph_output() and readers is None
        name = value.name
        (q,) = op.call("QuantizeLinear", value, scale, zero_point)
        q.dtype = self._activation_type
        op.shape_as(q, value)
        q.name = op.names.fresh(f"{name}_quantized")
        if value.is_initializer():  # an operand of a given model
            self.folded.append(q.name)
        (y,) = op.call("DequantizeLinear", q, scale, zero_point, like=value)
        y.name = op.names.fresh(f"{name}_dequantized")
        self._note(y, self._settings.scales)
        for node, index in users:
            # A shape needs no floats.
            node.replace_input_with(index, q if node.op_type in ("Shape", "Size") else y)
        if is_output:
            outputs = self._graph.outputs
            for index, output in enumerate(outputs):
                if output is value:
                    outputs[index] = y
            value.name, y.name = op.names.fresh(f"{name}_float"), name
        quantizer = q.producer()
        assert quantizer is not None
        return quantizer


def _take_shifts(layer: QuantizedLayer, shifts: Array) -> None:
    """Take from a bias, if it is the layer's own, what rounding the weights adds to its outputs."""
    bias = bias_of(layer.node)
    numbers = constant_array(bias)
    if bias is not None and numbers is not None and len(bias.uses()) == 1 and (
        numbers.shape == shifts.shape and not bias.is_graph_output()
    ):  # fmt: skip
        bias.const_value = ir.Tensor(np.asarray(numbers - shifts, numbers.dtype), name=bias.name)
