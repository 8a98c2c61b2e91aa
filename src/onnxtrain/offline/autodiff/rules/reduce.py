"""Rules for reductions, and for Range.

A rule works on the reduced axes kept with size one: `_Reduction` brings the output and its
cotangent into that form, whatever the node says of axes and keepdims.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import Cotangents, optional, rule
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import constant_array, dims_of, is_half, working_type
from onnxtrain.offline.graph.sizes import arange


@dataclass(frozen=True)
class _Reduction:
    """A reduction node with its axes resolved: None where they are known at run time only."""

    node: ir.Node
    x: ir.Value
    axes_input: ir.Value | None
    axes: list[int] | None

    @classmethod
    def of(cls, op: Ops, node: ir.Node) -> _Reduction:
        x = node.inputs[0]
        assert x is not None
        axes_input = optional(node, 1)
        array = constant_array(axes_input)
        if dims_of(x) is None or (axes_input is not None and array is None):
            return cls(node, x, axes_input, None)
        axes = [] if array is None else [int(a) % op.rank(x) for a in array.reshape(-1)]
        if not axes and not node.attributes.get_int("noop_with_empty_axes", 0):
            axes = list(range(op.rank(x)))
        return cls(node, x, axes_input, axes)

    def kept(self, op: Ops, value: ir.Value) -> ir.Value:
        """Give the output or its cotangent the reduced axes back, with size one."""
        if self.node.attributes.get_int("keepdims", 1):
            return value
        if self.axes is not None:
            return op.unsqueeze(value, self.axes)
        return op.reshape(value, op.Shape(op.ReduceSum(*self.operands(op, self.x), **self.options)))

    def sum(self, op: Ops, value: ir.Value) -> ir.Value:
        """Sum over the reduced axes, kept with size one."""
        if self.axes is not None:
            return op.sum(value, self.axes, keepdims=True)
        return op.ReduceSum(*self.operands(op, value), **self.options)

    def operands(self, op: Ops, value: ir.Value) -> tuple[ir.Value, ir.Value | None]:
        """Return the inputs of an operator that reduces a value in the same way."""
        return value, self.axes_input if self.axes is None else op.int64(self.axes)

    @property
    def options(self) -> dict[str, int]:
        """The attributes of an operator that reduces in the same way, and keeps the axes."""
        noop = self.node.attributes.get_int("noop_with_empty_axes", 0)
        return {"keepdims": 1, "noop_with_empty_axes": noop}

    def spread(self, op: Ops, value: ir.Value) -> ir.Value:
        """Broadcast something of the kept shape to the shape of the input."""
        return op.expand_like(value, self.x)


@rule("ReduceSum")
def reduce_sum(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """Every summand has the cotangent of the sum."""
    r = _Reduction.of(op, node)
    return (r.spread(op, r.kept(op, dy)),)


@rule("ReduceMean")
def reduce_mean(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """Every element has its share of the cotangent."""
    r = _Reduction.of(op, node)
    if r.axes is not None:
        share = dy * op.one_over_count(r.x, r.axes)
    else:
        wide = working_type(dy)
        whole, rest = (op.Cast(op.Size(v), to=wide) for v in (r.x, node.outputs[0]))
        share = dy * op.cast(rest / whole, dy.dtype)
    return (r.spread(op, r.kept(op, share)),)


@rule("ReduceMax", "ReduceMin", notes="ties share the gradient equally")
def reduce_extremum(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """The gradient goes to the elements that won, in equal parts where several did."""
    r = _Reduction.of(op, node)
    wide, y = op.cast(r.x, working_type(r.x)), r.kept(op, node.outputs[0])
    if is_half(r.x):
        again = op.ReduceMax if node.op_type == "ReduceMax" else op.ReduceMin
        y = again(*r.operands(op, wide), **r.options)
    won = op.Equal(wide, y)
    winners = r.sum(op, op.Cast(won, to=dy.dtype))
    return (op.Where(won, r.kept(op, dy) / winners, 0.0),)


@rule("ReduceProd", notes="right for zeros too")
def reduce_prod(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """Dx = dy times the product of the others; one zero, or several, need care."""
    r = _Reduction.of(op, node)
    zero = op.Equal(r.x, 0.0)
    rest = op.Where(zero, 1.0, r.x)
    zeros = r.sum(op, op.Cast(zero, to=dy.dtype))
    product = op.ReduceProd(*r.operands(op, rest), **r.options)
    spread = op.Mul(r.kept(op, dy), product)
    at_zero = op.Where(op.Equal(zeros, 1.0), spread, 0.0)
    elsewhere = op.Where(op.Equal(zeros, 0.0), spread, 0.0)
    return (op.Where(zero, at_zero, elsewhere / rest),)


@rule("ReduceSumSquare")
def reduce_sum_square(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """d Σx² = 2x dx."""
    r = _Reduction.of(op, node)
    return (op.Mul(r.x, r.kept(op, dy) * 2.0),)


@rule("ReduceL1", notes="0 at 0")
def reduce_l1(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """d Σ|x| = sign(x) dx."""
    r = _Reduction.of(op, node)
    return (op.Sign(r.x) * r.kept(op, dy),)


@rule("ReduceL2", notes="0 where the norm is 0")
def reduce_l2(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """d ‖x‖ = x/‖x‖ dx."""
    r = _Reduction.of(op, node)
    norm = node.outputs[0]
    scale = op.Where(op.Equal(norm, 0.0), 0.0, dy / norm)
    return (op.Mul(r.x, r.kept(op, scale)),)


@rule("ReduceLogSum")
def reduce_log_sum(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """d log Σx = dx / Σx."""
    r = _Reduction.of(op, node)
    return (r.spread(op, r.kept(op, dy) / r.sum(op, r.x)),)


@rule("ReduceLogSumExp")
def reduce_log_sum_exp(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """d log Σexp(x) = exp(x - y) dx, the softmax."""
    r = _Reduction.of(op, node)
    return (op.Exp(op.Sub(r.x, r.kept(op, node.outputs[0]))) * r.kept(op, dy),)


@rule("Range", stops=(1,), notes="of start and delta; the limit only sets the length")
def range_(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """y_i = start + i delta."""
    indices = op.call("Cast", arange(op, op.Shape(dy)), to=dy.dtype, like=dy)[0]
    return op.sum(dy, [0]), None, op.sum(dy * indices, [0])
