"""Gradients of what quantization wrote: straight through the rounding, 0 where it clipped.

Where the scale is not learned, no gradient goes to it. A weight whose scale is that of its largest
element is never clipped, so its gradient passes as it is. An activation is clipped outside of two
bounds; where it comes out of a Relu, one mask tells what both let through.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import Cotangents, Rule, required
from onnxtrain.offline.autodiff.rules.quant import dequantize_linear, quantizer_of
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import constant_array, static_dims
from onnxtrain.offline.graph.signs import is_not_negative
from onnxtrain.offline.passes.quantize.insert import QUANTIZER

_BOUNDS = {ir.DataType.UINT8: (0, 255), ir.DataType.INT8: (-128, 127), ir.DataType.INT4: (-8, 7)}
_STATISTICS = ("ReduceMax", "ReduceMin")  # what reads an activation without a gradient


def join_quantizers(
    op: Ops, graph: ir.Graph, targets: Collection[ir.Value]
) -> dict[ir.Node, Rule]:
    """Return the rules of the pairs that `insert_quantizers` wrote; `targets` are what trains."""
    found: dict[ir.Node, Rule] = {}
    activations = []
    for node in graph:
        source = node.metadata_props.get(QUANTIZER)
        if source is None:
            continue
        quantizer = _quantizer(node)
        if op.rank(required(quantizer, 2)[1]):
            found[node] = _of_weight(source)
        else:
            activations.append(_Activation.of(node, quantizer, source))
    learned = [a for a in activations if a.source == "learned"]
    if learned:
        moved = _depend_on(graph, [v for v in targets if not _makes(v, learned[0].scales)])
        learned = [a for a in learned if a.x in moved]
        found |= _split_scales(op, graph, learned)
    bounds = _Bounds()
    for activation in activations:
        found[activation.node] = activation.rule(bounds, activation in learned, targets)
    return found


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

    @staticmethod
    def of(node: ir.Node, quantizer: ir.Node, source: str) -> _Activation:
        scale, zero_point = required(quantizer, 3)[1:]
        taken, also = scale.producer(), zero_point.producer()
        assert taken is not None and also is not None
        scales, index = required(taken, 2)
        return _Activation(node, quantizer, source, scales, required(also)[0], index)

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

    def rule(self, bounds: _Bounds, is_learned: bool, targets: Collection[ir.Value]) -> Rule:
        """Return the gradient: to what is quantized, or to what a Relu before it reads."""
        relu = self._relu(targets)
        x = self.x
        reached = x if relu is None else required(relu)[0]

        def gradient(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
            y = node.outputs[0]
            kept = self._kept(op, bounds, relu)
            dx = op.select(kept, dy, of=y)
            if not is_learned:
                return {reached: dx}
            # Σ dy (q − z − x/s) where x was not clipped, Σ dy (q − z) where it was; times s, which
            # all of them are divided by at once.
            error = op.Sub(y, op.Mul(x, op.cast(kept, x.dtype)))
            scale = required(node, 2)[1]
            return {reached: dx, scale: _dot(op, dy, op.type_as(error, x))}

        def reaches(node: ir.Node) -> list[ir.Value]:
            return [reached, *required(node, 2)[1:]] if is_learned else [reached]

        return _rule(gradient, reaches)

    def _kept(self, op: Ops, bounds: _Bounds, relu: ir.Node | None) -> ir.Value:
        """Tell where x was neither clipped to a bound, nor by the Relu that it comes out of."""
        x = self.x
        most = 6.0 if relu is not None and relu.op_type == "Clip" else None
        below = op.Less(x, bounds.high(op, self, most))
        if relu is not None:
            return op.And(op.Greater(x, 0.0), below)
        if is_not_negative(x):  # all ranges have 0 in them
            return below
        return op.And(op.GreaterOrEqual(x, bounds.low(op, self)), below)

    def _relu(self, targets: Collection[ir.Value]) -> ir.Node | None:
        """Return the Relu or ReLU6 whose output nothing but this quantizer reads."""
        x, node = self.x, self.x.producer()
        if node is None or node.domain or x.is_graph_output() or x in targets:
            return None
        if node.op_type != "Relu" and not _is_relu6(node):
            return None
        others = [n for n, _ in x.uses() if n is not self.quantizer]
        return node if all(n.op_type in _STATISTICS for n in others) else None


def _is_relu6(node: ir.Node) -> bool:
    bounds = [constant_array(v) for v in node.inputs[1:3]]
    numbers = [float(b) for b in bounds if b is not None and b.size == 1]
    return node.op_type == "Clip" and numbers == [0.0, 6.0]


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
    """Return the sum of products of all elements, as a vector of one."""
    row, column = op.Reshape(a, [1, -1]), op.Reshape(b, [-1, 1])
    product = op.with_dims(op.MatMul(row, column), [1, 1])
    return op.with_dims(op.Reshape(product, [1]), [1])


def _split_scales(
    op: Ops, graph: ir.Graph, learned: Collection[_Activation]
) -> dict[ir.Node, Rule]:
    """Let one Split make the scales of activations that are learned, with one gradient for all."""
    if not learned:
        return {}
    scales = next(iter(learned)).scales
    takers = [n for n, i in scales.uses() if n.op_type == "Gather" and i == 0]
    (count,) = static_dims(scales) or (0,)
    last = graph[-1]
    pieces = op.call("Split", scales, op.int64([1] * count), outputs=count, axis=0)
    for piece in pieces:
        piece.dtype = scales.dtype
        op.with_dims(piece, [1])
    split = pieces[0].producer()
    assert split is not None and split is not last
    order = {node: place for place, node in enumerate(graph)}
    graph.remove(split)
    graph.insert_before(min(takers, key=lambda n: order[n]), split)
    for taker in takers:
        place = constant_array(taker.inputs[1])
        assert place is not None
        ir.convenience.replace_all_uses_with(taker.outputs[0], pieces[int(place)])
    graph.remove(takers, safe=True)
    shares = np.zeros(count, np.float32)
    for activation in learned:
        shares[activation.row] = _share(activation.node, pieces[activation.row])

    def gradient(op: Ops, node: ir.Node, *dys: ir.Value | None) -> Cotangents:
        zero = op.const(np.zeros(1, np.float32))
        sums = [zero if dy is None else dy for dy in dys]
        total = sums[0] if count == 1 else op.type_as(op.Concat(*sums, axis=0), scales)
        return (op.Mul(op.Div(total, scales), op.const(shares)),)

    return {split: Rule(gradient, "Split", "", 1, False, frozenset({1}), "learned scales")}


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


def _depend_on(graph: ir.Graph, values: Iterable[ir.Value]) -> set[ir.Value]:
    """Return all values that are computed from some of these."""
    found = set(values)
    for node in graph:
        if any(v in found for v in node.inputs):
            found.update(node.outputs)
    return found


def _makes(value: ir.Value, made: ir.Value) -> bool:
    """Tell whether a value is what others are computed from, by Exp and Mul."""
    waiting = [made]
    while waiting:
        node = waiting.pop().producer()
        if node is not None:
            inputs = [v for v in node.inputs if v is not None]
            if value in inputs:
                return True
            waiting += inputs
    return False
