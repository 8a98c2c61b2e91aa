"""Rules for reductions, for running sums and products, and for Range.

A rule works on the reduced axes kept with size one: `Reduction` brings the output and its
cotangent into that form, whatever the node says of axes and keepdims.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import Cotangents, optional, required, rule
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import constant_array, dims_of, is_half, working_type
from onnxtrain.offline.graph.sizes import arange

F = TypeVar("F", bound=Callable[..., ir.Value])


def reduction(*op_types: str, notes: str = "") -> Callable[[F], F]:
    """Register dx of a reduction, as `formula(op, reduction, dy)`."""

    def register(formula: F) -> F:
        @rule(*op_types, notes=notes)
        def differentiate(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
            reduced = Reduction(op, node)
            dx = formula(op, reduced, dy)
            if op.guarded:  # of the shape of x: onnxruntime broadcasts empty axes wrongly
                dx = op.keep_zeros(dx, op.expand_like(reduced.kept(dy), reduced.x))
            return (dx,)

        return formula

    return register


class Reduction:
    """A reduction node with its axes resolved: None where they are known at run time only."""

    def __init__(self, op: Ops, node: ir.Node) -> None:
        self.op, self.node = op, node
        self.x, self.y = *required(node), node.outputs[0]
        self.axes: list[int] | None = None
        self._noop = node.attributes.get_int("noop_with_empty_axes", 0)
        self._axes_input = optional(node, 1)
        array = constant_array(self._axes_input)
        if dims_of(self.x) is not None and (self._axes_input is None or array is not None):
            self.axes = [] if array is None else [int(a) % op.rank(self.x) for a in array.flat]
            if not self.axes and not self._noop:
                self.axes = list(range(op.rank(self.x)))

    def kept(self, value: ir.Value) -> ir.Value:
        """Give the output or its cotangent the reduced axes back, with size one."""
        if self.node.attributes.get_int("keepdims", 1):
            return value
        if self.axes is not None:
            return self.op.unsqueeze(value, self.axes)
        return self.op.reshape(value, self.op.Shape(self.by(self.op.ReduceSum, self.x)))

    def sum(self, value: ir.Value) -> ir.Value:
        """Sum over the reduced axes, kept with size one."""
        if self.axes is not None:
            return self.op.sum(value, self.axes, keepdims=True)
        return self.by(self.op.ReduceSum, value)

    def by(self, operator: Callable[..., ir.Value], value: ir.Value) -> ir.Value:
        """Reduce a value in the same way by another operator, with the axes kept."""
        axes = self._axes_input if self.axes is None else self.op.int64(self.axes)
        return operator(value, axes, keepdims=1, noop_with_empty_axes=self._noop)


reduction("ReduceSum")(lambda op, r, dy: op.expand_like(r.kept(dy), r.x))
reduction("ReduceSumSquare")(lambda op, r, dy: r.x * (r.kept(dy) * 2.0))
reduction("ReduceL1", notes="0 at 0")(lambda op, r, dy: op.Sign(r.x) * r.kept(dy))
reduction("ReduceLogSum")(lambda op, r, dy: op.expand_like(r.kept(dy) / r.sum(r.x), r.x))
reduction("ReduceLogSumExp")(lambda op, r, dy: op.Exp(r.x - r.kept(r.y)) * r.kept(dy))


@reduction("ReduceL2", notes="0 where the norm is 0")
def reduce_l2(op: Ops, r: Reduction, dy: ir.Value) -> ir.Value:
    """d ‖x‖ = x/‖x‖ dx."""
    scale = op.Where(op.Equal(r.y, 0.0), 0.0, dy / r.y)
    return op.Mul(r.x, r.kept(scale))


@reduction("ReduceMean")
def reduce_mean(op: Ops, r: Reduction, dy: ir.Value) -> ir.Value:
    """Every element has its share of the cotangent."""
    if r.axes is not None:
        share = dy * op.one_over_count(r.x, r.axes)
    else:
        whole, rest = (op.Cast(op.Size(v), to=working_type(dy)) for v in (r.x, r.y))
        share = dy * op.cast(rest / whole, dy.dtype)
    return op.expand_like(r.kept(share), r.x)


@reduction("ReduceMax", "ReduceMin", notes="ties share the gradient equally")
def reduce_extremum(op: Ops, r: Reduction, dy: ir.Value) -> ir.Value:
    """The gradient goes to the elements that won, in equal parts where several did."""
    wide, y = op.cast(r.x, working_type(r.x)), r.kept(r.y)
    if is_half(r.x):
        y = r.by(op.ReduceMax if r.node.op_type == "ReduceMax" else op.ReduceMin, wide)
    won = op.Equal(wide, y)
    winners = r.sum(op.Cast(won, to=dy.dtype))
    return op.Where(won, r.kept(dy) / winners, 0.0)


@reduction("ReduceProd", notes="right to first order at zeros")
def reduce_prod(op: Ops, r: Reduction, dy: ir.Value) -> ir.Value:
    """Dx = dy times the product of the others; one zero, or several, need care."""
    zero = op.Equal(r.x, 0.0)
    rest = op.Where(zero, 1.0, r.x)
    zeros = r.sum(op.Cast(zero, to=dy.dtype))
    product = r.by(op.ReduceProd, rest)
    spread = op.Mul(r.kept(dy), product)
    at_zero = op.Where(op.Equal(zeros, 1.0), spread, 0.0)
    elsewhere = op.Where(op.Equal(zeros, 0.0), spread, 0.0)
    return op.Where(zero, at_zero, elsewhere / rest)


@rule("CumSum", stops=(1,))
def cum_sum(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """Every element is in the sums that come after it: a running sum from the other end."""
    exclusive, reverse = _flags(node)
    return (op.CumSum(dy, node.inputs[1], exclusive=exclusive, reverse=1 - reverse),)


@rule("CumProd", stops=(1,), notes="right to first order at zeros")
def cum_prod(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """dx_i = Σ_j dy_j y_j / x_i over the products that x_i is in, and the right limit at zeros.

    With z_j the number of zeros in product j and p_j the product of its other factors, x_i has a
    derivative of p_j / x_i in the products with z_j = 0; if x_i is itself the first zero, p_j in
    those with z_j = 1; and zero elsewhere.
    """
    x, axis = node.inputs
    exclusive, reverse = _flags(node)

    def from_other_end(terms: ir.Value) -> ir.Value:
        return op.CumSum(terms, axis, exclusive=exclusive, reverse=1 - reverse)

    is_zero = op.Equal(x, 0.0)
    factors = op.Where(is_zero, 1.0, x)
    terms = dy * op.call("CumProd", factors, axis, like=x, exclusive=exclusive, reverse=reverse)[0]
    ones = op.Cast(is_zero, to=dy.dtype)
    zeros = op.CumSum(ones, axis, exclusive=exclusive, reverse=reverse)
    zeros_so_far = op.CumSum(ones, axis, reverse=reverse)
    regular = from_other_end(op.Where(op.Equal(zeros, 0.0), terms, 0.0)) / factors
    at_zero = from_other_end(op.Where(op.Equal(zeros, 1.0), terms, 0.0))
    first_zero = op.And(is_zero, op.Equal(zeros_so_far, 1.0))
    elsewhere = op.Where(first_zero, at_zero, 0.0)
    return (op.Where(op.Equal(zeros_so_far, 0.0), regular, elsewhere),)


def _flags(node: ir.Node) -> tuple[int, int]:
    return node.attributes.get_int("exclusive", 0), node.attributes.get_int("reverse", 0)


@rule("Range", stops=(1,), notes="of start and delta; the limit only sets the length")
def range_(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """y_i = start + i delta."""
    indices = op.call("Cast", arange(op, op.Shape(dy)), to=dy.dtype, like=dy)[0]
    return op.sum(dy, [0]), None, op.sum(dy * indices, [0])
