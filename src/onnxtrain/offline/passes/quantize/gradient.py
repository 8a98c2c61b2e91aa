"""Gradients of what quantization wrote: straight through the rounding, 0 where it clipped.

Where the scale is not learned, no gradient goes to it. A weight whose scale is that of its largest
element is never clipped, so its gradient passes as it is.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import Cotangents, Rule, required
from onnxtrain.offline.autodiff.rules.quant import dequantize_linear, quantizer_of
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import static_dims
from onnxtrain.offline.passes.quantize.insert import QUANTIZER

_BOUNDS = {ir.DataType.UINT8: (0, 255), ir.DataType.INT8: (-128, 127), ir.DataType.INT4: (-8, 7)}


def join_quantizers(op: Ops, graph: ir.Graph) -> dict[ir.Node, Rule]:
    """Return the rules of the pairs that `insert_quantizers` wrote."""
    bounds = _Bounds()
    found = {}
    for node in graph:
        source = node.metadata_props.get(QUANTIZER)
        if source is not None:
            found[node] = _learned(node) if source == "learned" else _plain(source, bounds)
    return found


def _plain(source: str, bounds: _Bounds) -> Rule:
    def gradient(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
        quantizer = quantizer_of(*required(node))
        assert quantizer is not None
        x = required(quantizer)[0]
        if source == "largest":
            return {x: dy}
        if op.rank(required(quantizer, 2)[1]):  # a weight
            return {x: _of_pair(op, node, dy)[x]}
        low, high = bounds.of(op, quantizer)
        kept = op.Equal(op.Clip(x, low, high), x)
        return {x: op.Where(kept, dy, 0.0)}

    return _rule(gradient, 1)


def _learned(node: ir.Node) -> Rule:
    """Learned step sizes, with a gradient that does not grow with the number of elements."""

    def gradient(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
        found = _of_pair(op, node, dy)
        scale = required(node, 2)[1]
        share = _share(node, scale)
        return {v: op.Mul(g, share) if v is scale and g is not None else g
                for v, g in found.items()}  # fmt: skip

    return _rule(gradient, 2)


def _of_pair(op: Ops, node: ir.Node, dy: ir.Value) -> dict[ir.Value, ir.Value | None]:
    """Return the cotangents of what a pair quantizes, and of its scale."""
    found = dequantize_linear(op, node, dy)
    assert isinstance(found, dict)
    return found


def _rule(gradient: object, reached: int) -> Rule:
    def behind(node: ir.Node) -> list[ir.Value]:
        quantizer = quantizer_of(*required(node))
        return [] if quantizer is None else required(quantizer, reached)

    return Rule(
        gradient, "DequantizeLinear", "", 1, False, frozenset({0, 1, 2}), "quantizer",
        reaches=behind,
    )  # type: ignore[arg-type]  # fmt: skip


def _share(node: ir.Node, scale: ir.Value) -> float:
    """Return 1/√(elements · levels) of what shares a scale; a batch counts as one element."""
    dims = node.outputs[0].shape
    elements = math.prod(d for d in (dims or ()) if isinstance(d, int))
    scales = math.prod(static_dims(scale) or ())
    dtype = required(node)[0].dtype
    most = _BOUNDS[dtype][1] if dtype in _BOUNDS else 127
    return 1.0 / math.sqrt(max(1.0, elements / max(scales, 1)) * most)


class _Bounds:
    """The numbers between which activations are not clipped, computed for all of them at once."""

    def __init__(self) -> None:
        self._known: dict[tuple[ir.Value, ir.Value], tuple[ir.Value, ir.Value]] = {}

    def of(self, op: Ops, quantizer: ir.Node) -> tuple[ir.Value, ir.Value]:
        _, scale, zero_point = required(quantizer, 3)
        taken, also = scale.producer(), zero_point.producer()
        if taken is None or also is None:
            return self._write(op, scale, zero_point)
        (scales, index), zero_points = required(taken, 2), required(also)[0]
        if (scales, zero_points) not in self._known:
            self._known[scales, zero_points] = self._write(op, scales, zero_points)
        low, high = self._known[scales, zero_points]
        return op.Gather(low, index, axis=0), op.Gather(high, index, axis=0)

    def _write(self, op: Ops, scale: ir.Value, zero_point: ir.Value) -> tuple[ir.Value, ir.Value]:
        assert zero_point.dtype is not None
        least, most = _BOUNDS[zero_point.dtype]
        zero = op.Cast(zero_point, to=scale.dtype)
        low = op.Mul(op.Sub(least - 0.5, zero), scale)
        high = op.Mul(op.Sub(most + 0.5, zero), scale)
        return low, high
