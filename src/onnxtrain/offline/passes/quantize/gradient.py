"""Gradients of what quantization wrote: straight through the rounding, 0 where it clipped.

Where the scale is not learned, no gradient goes to it. A weight whose scale is that of its largest
element is never clipped, so its gradient passes as it is. An activation is clipped outside of two
bounds; where it comes out of a Relu, one mask tells what both let through.

That mask and the range of an activation are computed before it is quantized: then nobody needs the
floats any more, and a byte for each element is kept for the backward pass beside what the next
layer reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import Cotangents, Rule, required
from onnxtrain.offline.autodiff.rules.quant import dequantize_linear, quantizer_of
from onnxtrain.offline.graph.op_facts import EXTREMES
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import constant_array, static_dims
from onnxtrain.offline.graph.signs import is_not_negative
from onnxtrain.offline.passes.quantize.frozen_scales import depend_on
from onnxtrain.offline.passes.quantize.insert import QUANTIZER

_BOUNDS = {ir.DataType.UINT8: (0, 255), ir.DataType.INT8: (-128, 127), ir.DataType.INT4: (-8, 7)}


def join_quantizers(op: Ops, graph: ir.Graph, targets: Collection[ir.Value]) -> dict[ir.Node, Rule]:
    """Return the rules of the pairs that `insert_quantizers` wrote; `targets` are what trains."""
    found: dict[ir.Node, Rule] = {}
    activations = []
    for node in graph:
        source = node.metadata_props.get(QUANTIZER)
        if source is None:
            continue
        quantizer = _quantizer(node)
        scale = required(quantizer, 2)[1]
        if op.rank(scale):
            found[node] = _of_weight(source)
        elif scale.producer() is not None:  # else it is in the frozen part
            activations.append(_Activation.of(node, quantizer, source, targets))
    if not activations:
        return found
    shift = _makers(activations[0].scales)
    moved = depend_on(graph, [v for v in targets if v not in shift])
    learned = _worth_learning([a for a in activations if a.source == "learned"], moved)
    parts, of_split = _split_scales(op, graph, learned)
    bounds = _Bounds()
    with op.arithmetic():
        for activation in activations:
            part = parts.get(activation.node)
            is_early = part is None and activation.x in moved
            mask = activation.mask(op, bounds) if is_early else None
            found[activation.node] = activation.rule(bounds, mask, part)
    graph.sort()
    return found | of_split


def _worth_learning(
    learned: Sequence[_Activation], moved: Collection[ir.Value]
) -> Sequence[_Activation]:
    """Leave out what no trained layer makes, as the data: calibration knows their range.

    The gradient of their scale would need the one of all elements, which nothing else needs.
    """
    return [activation for activation in learned if activation.x in moved] or learned


# ---- weights -------------------------------------------------------------------------------------


def _of_weight(source: str) -> Rule:
    def gradient(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
        x, scale = required(_quantizer(node), 2)
        if source == "largest":
            return {x: dy}
        found = dequantize_linear(op, node, dy)
        assert isinstance(found, dict)
        dscale = found[scale]
        if source != "learned" or dscale is None:
            return {x: found[x]}
        return {x: found[x], scale: op.Mul(dscale, _share(node, scale))}

    return _rule(gradient, lambda node: required(_quantizer(node), 1 + (source == "learned")))


def _share(node: ir.Node, scale: ir.Value) -> float:
    """Return 1/√(elements · levels) of what shares a scale; a batch counts as one element.

    So the gradient of a learned step size does not grow with the number of elements.
    """
    dims = node.outputs[0].shape
    elements = math.prod(d for d in (dims or ()) if isinstance(d, int))
    scales = math.prod(static_dims(scale) or ())
    dtype = required(node)[0].dtype
    most = _BOUNDS[dtype][1] if dtype in _BOUNDS else 127
    return 1.0 / math.sqrt(max(1.0, elements / max(scales, 1)) * most)


# ---- activations ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Activation:
    """A pair that quantizes an activation, and its place in the vectors of all scales."""

    node: ir.Node  # DequantizeLinear
    quantizer: ir.Node
    source: str
    scales: ir.Value
    zero_points: ir.Value
    index: ir.Value
    relu: ir.Node | None  # that it comes out of, if nothing else reads that

    @staticmethod
    def of(
        node: ir.Node, quantizer: ir.Node, source: str, targets: Collection[ir.Value]
    ) -> _Activation:
        x, scale, zero_point = required(quantizer, 3)
        taken, also = scale.producer(), zero_point.producer()
        assert taken is not None and also is not None
        (scales, index), zero_points = required(taken, 2), required(also)[0]
        relu = None if x in targets else _relu_before(x, quantizer)
        return _Activation(node, quantizer, source, scales, zero_points, index, relu)

    @property
    def x(self) -> ir.Value:
        """What is quantized."""
        return required(self.quantizer)[0]

    @property
    def row(self) -> int:
        """Its place as a number."""
        place = constant_array(self.index)
        assert place is not None
        return int(place)

    def rule(self, bounds: _Bounds, mask: ir.Value | None, learned: ir.Value | None) -> Rule:
        """Return the gradient: to what is quantized, or to what a Relu before it reads.

        The mask may be known; `learned` is what stands for the scale, where that trains.
        """
        x = self.x
        reached = x if self.relu is None else required(self.relu)[0]

        def gradient(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
            y = node.outputs[0]
            kept = mask or self._kept(op, bounds)
            dx = op.select(kept, dy, of=y)
            if learned is None:
                return {reached: dx}
            # Σ dy (q − z − x/s) where x was not clipped, Σ dy (q − z) where it was; times s, which
            # all of them are divided by at once.
            error = op.Sub(y, op.Mul(x, op.cast(kept, x.dtype)))
            dscale = _dot(op, dy, op.type_as(error, x))
            # Or dy and x would stay in memory until the scales of all layers are updated.
            return {reached: _behind(op, dscale, dx), learned: dscale}

        ends = [reached] if learned is None else [reached, learned]
        return _rule(gradient, lambda node: ends)

    def mask(self, op: Ops, bounds: _Bounds) -> ir.Value:
        """Return where the gradient passes, and let the quantizer wait for it, and for the range.

        The zero point is taken from a place that depends on how many elements the mask has, in a
        way that never matters.
        """
        op.scope = f"{self.x.name}/kept"
        kept = self._kept(op, bounds)
        extremes = [n.outputs[0] for n, _ in self.x.uses() if n.op_type in EXTREMES]
        counts = [op.Size(value) for value in (kept, *extremes)]
        place = op.Max(self.index, op.Min(*counts, op.int64(0)))
        zero_point = required(self.quantizer, 3)[2]
        waiting = op.type_as(op.Gather(self.zero_points, place, axis=0), zero_point)
        self.quantizer.replace_input_with(2, waiting)
        return kept

    def _kept(self, op: Ops, bounds: _Bounds) -> ir.Value:
        """Tell where x was neither clipped to a bound, nor by the Relu that it comes out of."""
        x, relu = self.x, self.relu
        most = 6.0 if relu is not None and relu.op_type == "Clip" else None
        below = op.Less(x, bounds.high(op, self, most))
        if relu is not None:
            return op.And(op.Greater(x, 0.0), below)
        if is_not_negative(x):  # all ranges have 0 in them
            return below
        return op.And(op.GreaterOrEqual(x, bounds.low(op, self)), below)


def _relu_before(x: ir.Value, quantizer: ir.Node) -> ir.Node | None:
    """Return the Relu or ReLU6 whose output nothing but a quantizer reads."""
    node = x.producer()
    if node is None or node.domain or x.is_graph_output():
        return None
    if node.op_type != "Relu" and not _is_relu6(node):
        return None
    others = [n for n, _ in x.uses() if n is not quantizer]
    return node if all(n.op_type in EXTREMES for n in others) else None


def _is_relu6(node: ir.Node) -> bool:
    if node.op_type != "Clip":
        return False
    bounds = [constant_array(v) for v in node.inputs[1:3]]
    numbers = [float(b.reshape(())) for b in bounds if b is not None and b.size == 1]
    return numbers == [0.0, 6.0]


@dataclass
class _Bounds:
    """The numbers between which activations are not clipped, computed for all of them at once."""

    _known: dict[tuple[ir.Value, float | None], ir.Value] = field(default_factory=dict)

    def low(self, op: Ops, activation: _Activation) -> ir.Value:
        """Return the least number that is not clipped."""
        return self._of(op, activation, 0, None)

    def high(self, op: Ops, activation: _Activation, most: float | None) -> ir.Value:
        """Return the bound that what is not clipped is below, `most` at most."""
        return self._of(op, activation, 1, most)

    def _of(self, op: Ops, own: _Activation, side: int, most: float | None) -> ir.Value:
        key = (own.scales, -math.inf if side == 0 else most)
        if key not in self._known:
            assert own.zero_points.dtype is not None
            level = _BOUNDS[own.zero_points.dtype][side] + (side - 0.5)
            zeros = op.Cast(own.zero_points, to=own.scales.dtype)
            bound = op.Mul(op.Sub(level, zeros), own.scales)
            self._known[key] = bound if most is None else op.Min(bound, most)
        return op.Gather(self._known[key], own.index, axis=0)


def _dot(op: Ops, a: ir.Value, b: ir.Value) -> ir.Value:
    """Return the sum of products of all elements, as a vector of one.

    As a product of rows, that takes a third of the time of Mul and ReduceSum.
    """
    rows = [op.Reshape(v, [1, -1]) for v in (a, b)]
    product = op.with_dims(op.Gemm(*rows, transB=1), [1, 1])
    return op.with_dims(op.Reshape(product, [1]), [1])


def _behind(op: Ops, made: ir.Value, value: ir.Value) -> ir.Value:
    """Return a value that is there when something else has been computed."""
    never = op.Min(op.Size(made), op.int64(0))
    return op.type_as(op.Reshape(value, op.Max(op.shape_of(value), never)), value)


def _split_scales(
    op: Ops, graph: ir.Graph, learned: Sequence[_Activation]
) -> tuple[dict[ir.Node, ir.Value], dict[ir.Node, Rule]]:
    """Return what stands for the scale of each activation, and the gradient of all of them.

    In the forward pass each takes its own scale. Backward, their cotangents are those of the parts
    of one Split that nothing reads: one node puts them together.
    """
    if not learned:
        return {}, {}
    scales = learned[0].scales
    (count,) = static_dims(scales) or (0,)
    parts = op.call("Split", scales, op.int64([1] * count), outputs=count, axis=0)
    for part in parts:
        part.type = scales.type
        op.with_dims(part, [1])
    split = parts[0].producer()
    assert split is not None and split is graph[-1]
    graph.remove(split)
    graph.insert_before(next(n for n in graph if scales in n.inputs), split)
    shares = np.zeros(count, np.float32)
    for activation in learned:
        shares[activation.row] = _share(activation.node, parts[activation.row])

    def gradient(op: Ops, node: ir.Node, *dys: ir.Value | None) -> Cotangents:
        zero = op.const(np.zeros(1, np.float32))
        sums = [zero if dy is None else dy for dy in dys]
        total = sums[0] if count == 1 else op.type_as(op.Concat(*sums, axis=0), scales)
        return (op.Mul(op.Div(total, scales), op.const(shares)),)

    rule = Rule(gradient, "Split", "", 1, False, frozenset({1}), "learned scales")
    return {a.node: parts[a.row] for a in learned}, {split: rule}


# ---- both ----------------------------------------------------------------------------------------


def _quantizer(node: ir.Node) -> ir.Node:
    found = quantizer_of(*required(node))
    assert found is not None
    return found


def _rule(
    gradient: Callable[..., Cotangents], reaches: Callable[[ir.Node], Iterable[ir.Value]]
) -> Rule:
    stops = frozenset({0, 1, 2})
    return Rule(gradient, "DequantizeLinear", "", 1, False, stops, "quantizer", reaches=reaches)


def _makers(value: ir.Value) -> set[ir.Value]:
    """Return all values that a value is computed from."""
    found, waiting = set[ir.Value](), [value]
    while waiting:
        node = waiting.pop().producer()
        for source in [] if node is None else node.inputs:
            if source is not None and source not in found:
                found.add(source)
                waiting.append(source)
    return found
