"""Rules for operators of integers, straight-through: QLinearConv, QLinearAdd and their like.

The forward nodes stay. Each integer means a float (`graph/integer_operators.py`), and the cotangent
of an integer is that of the float it means: QuantizeLinear passes it on to what it has quantized,
DequantizeLinear takes it from what it returns, and the operators between them have the gradient of
the operator of floats that they stand for. It is 0 where a result was clipped, that is, where the
integer is the smallest or the largest of its type.

Weights are integers and do not train; they are expanded when the gradient is there
(`passes/late_expansion.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.autodiff.engine import pull_back
from onnxtrain.offline.autodiff.registry import Cotangents, optional, required, rule
from onnxtrain.offline.graph.integer_operators import (
    INTEGER_FORMS,
    IntegerForm,
    Quantized,
    float_attributes,
    integer_form,
    means_floats,
)
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import is_float


@rule(
    "QuantizeLinear",
    stops=(1,),
    covers=lambda node: means_floats(node.outputs[0]),
    notes="where operators of integers follow: straight through, 0 where clipped",
)
def quantize_linear(op: Ops, node: ir.Node, dq: ir.Value) -> Cotangents:
    """DX = dq, in the floats that the integers mean."""
    (x,) = required(node)
    kept = op.shape_as(_not_at_bounds(op, node.outputs[0]), x)
    return (op.cast(op.shape_as(op.Where(kept, dq, 0.0), x), x.dtype),)


def _differentiate(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """Return the cotangents of the integers, by the operator of floats that the node stands for."""
    form, y = integer_form(node), node.outputs[0]
    assert form is not None
    seed = dy if is_float(y) else op.shape_as(op.Where(_not_at_bounds(op, y), dy, 0.0), y)
    floats = [_dequantized(op, node, form, operand) for operand in form.operands]
    integers = [node.inputs[operand.integer] for operand in form.operands]
    pairs = [(v, f) for v, f in zip(integers, floats, strict=True) if v and means_floats(v)]

    def write() -> ir.Value:
        given = float_attributes(node)
        axes = [given.pop("axes")] if "axes" in given else []
        made = _operators_of_floats(op)[form.float_op](*floats, *axes, **given)
        made.dtype = seed.dtype or ir.DataType.FLOAT
        return op.shape_as(made, y)

    found = pull_back(op, write, seed, list(dict.fromkeys(f for _, f in pairs)))
    cotangents: dict[ir.Value, ir.Value | None] = {}
    for (value, _), cotangent in zip(pairs, found, strict=True):
        known = cotangents.get(value)
        cotangents[value] = cotangent if known is None or cotangent is None else known + cotangent
    return cotangents


def _operators_of_floats(op: Ops) -> dict[str, Callable[..., ir.Value]]:
    def global_average_pool(x: ir.Value) -> ir.Value:
        return op.mean(x, list(range(2, op.rank(x))))

    return {
        "Add": op.Add, "AveragePool": op.AveragePool, "Concat": op.Concat, "Conv": op.Conv,
        "Gemm": op.Gemm, "GlobalAveragePool": global_average_pool, "LeakyRelu": op.LeakyRelu,
        "MatMul": op.MatMul, "Mul": op.Mul, "ReduceMean": op.ReduceMean, "Sigmoid": op.Sigmoid,
        "Softmax": op.Softmax,
    }  # fmt: skip


def _dequantized(op: Ops, node: ir.Node, form: IntegerForm, operand: Quantized) -> ir.Value:
    """Return the floats that an operand means."""
    q, scale, zero = (
        optional(node, i) for i in (operand.integer, operand.scale, operand.zero_point)
    )
    assert q is not None and scale is not None
    axis = None
    if op.rank(scale) == 1 and op.dims(scale)[0] != 1:
        is_first = form.float_op == "Conv" or bool(node.attributes.get_int("transB", 0))
        axis = 0 if is_first else op.rank(q) - 1
    given = [q, scale, *([] if zero is None else [zero])]
    (floats,) = op.call("DequantizeLinear", *given, axis=axis)
    floats.dtype = ir.DataType.FLOAT
    return op.shape_as(floats, q)


def _not_at_bounds(op: Ops, q: ir.Value) -> ir.Value:
    """Tell which integers are neither the smallest nor the largest of their type."""
    assert q.dtype is not None
    limits = np.iinfo(q.dtype.numpy())
    numbers = op.shape_as(op.Cast(q, to=ir.DataType.INT32), q)
    above, below = (op.const(n, ir.DataType.INT32) for n in (limits.min, limits.max))
    return op.shape_as(op.And(op.Greater(numbers, above), op.Less(numbers, below)), q)


for (_domain, _op_type), _form in INTEGER_FORMS.items():
    rule(
        _op_type,
        domain=_domain,
        stops=_form.scales,
        covers=lambda node: integer_form(node) is not None,
        notes="straight through, by the operator of floats; 0 where clipped",
    )(_differentiate)
