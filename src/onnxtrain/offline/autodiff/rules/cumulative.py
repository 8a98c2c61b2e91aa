"""Rules for running sums and products."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import Cotangents, rule
from onnxtrain.offline.graph.ops import Ops


@rule("CumSum", stops=(1,))
def cum_sum(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """Every element is in the sums that come after it: a running sum from the other end."""
    exclusive, reverse = _flags(node)
    return (op.CumSum(dy, node.inputs[1], exclusive=exclusive, reverse=1 - reverse),)


@rule("CumProd", stops=(1,))
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
