"""Rules for products of integers that were quantized on the way, straight-through.

Dynamic quantization turns `MatMul(x, W)` into integers: DynamicQuantizeLinear makes q, a scale s
and a zero point z of x, MatMulInteger multiplies q - z by integer weights, Cast makes floats of
that, and a product with s and the scale of the weights follows. The forward nodes stay. For the
gradient, (q - z) s is x: where Cast takes the product back to floats, the gradient goes on to x,
past the integers (`reaches`). What x does by way of its scale cancels, since (x / s) s does not
depend on s: so DynamicQuantizeLinear passes nothing on where its integers are multiplied.

onnxruntime joins these nodes to MatMulIntegerToFloat, or all of them to DynamicQuantizeMatMul;
these have the same gradient. Weights are integers and do not train; they are expanded when the
gradient is there (`passes/late_expansion.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from onnxtrain.offline.autodiff.engine import pull_back
from onnxtrain.offline.autodiff.registry import Cotangents, optional, required, rule
from onnxtrain.offline.autodiff.rules.quant import quantizer_of
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.quantized_operators import FORMS, MICROSOFT, is_kept
from onnxtrain.offline.graph.shapes import working_type
from onnxtrain.offline.graph.writer import attributes_of


def _product_before(cast: ir.Node) -> ir.Node | None:
    """Return the product of integers that a Cast takes to floats, if it can be differentiated."""
    (value,) = required(cast)
    node = value.producer()
    if node is None or node.domain or node.op_type not in ("MatMulInteger", "ConvInteger"):
        return None
    return node if any(quantizer_of(v) for v in required(node, 2)) else None


def _behind(node: ir.Node | None) -> Iterator[ir.Value]:
    """Yield what was quantized before it was multiplied."""
    for value in () if node is None else required(node, 2):
        source = quantizer_of(value)
        if source is not None:
            yield from required(source)


@rule(
    "Cast",
    reaches=lambda node: _behind(_product_before(node)),
    notes="between floating types; of MatMulInteger and ConvInteger, straight through to what "
    "DynamicQuantizeLinear or QuantizeLinear quantized, 0 where clipped",
)
def cast(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """The cotangent is cast back, or passed on to what was quantized."""
    product = _product_before(node)
    if product is None:
        return (op.cast(dy, required(node)[0].dtype),)
    seed = op.cast(dy, working_type(dy))
    operands = [_levels(op, product, index, seed) for index in range(2)]
    found = pull_back(op, lambda: _multiplied(op, product, operands), seed, operands)
    cotangents: dict[ir.Value, ir.Value | None] = {}
    for value, levels, cotangent in zip(required(product, 2), operands, found, strict=True):
        source = quantizer_of(value)
        if source is not None and cotangent is not None:
            (x,) = required(source)
            dx = op.cast(_before_quantizer(op, source, levels, cotangent), x.dtype)
            known = cotangents.get(x)
            cotangents[x] = dx if known is None else op.Add(known, dx)
    return cotangents


def _levels(op: Ops, product: ir.Node, index: int, like: ir.Value) -> ir.Value:
    """Return an operand without its zero point, in floats."""
    value, zero_point = required(product, 2)[index], optional(product, 2 + index)
    numbers = op.shape_as(op.Cast(value, to=like.dtype), value)
    if zero_point is None:
        return numbers
    zero = op.Cast(zero_point, to=like.dtype)
    if op.rank(zero_point) == 1:  # of rows on the left, of columns on the right, of filters
        places = {"ConvInteger": 0, "MatMulInteger": -2 + index}[product.op_type] % op.rank(value)
        zero = op.reshape(zero, [-1, *[1] * (op.rank(value) - 1 - places)])
    return op.shape_as(op.Sub(numbers, zero), value)


def _multiplied(op: Ops, product: ir.Node, operands: list[ir.Value]) -> ir.Value:
    """Write the product once more, of floats."""
    if product.op_type == "MatMulInteger":
        return op.MatMul(*operands)
    made = op.call("Conv", *operands, **attributes_of(product))[0]
    return op.shape_as(made, product.outputs[0])


def _before_quantizer(op: Ops, source: ir.Node, levels: ir.Value, cotangent: ir.Value) -> ir.Value:
    """Return the cotangent of what was quantized, from that of the integers."""
    (x,) = required(source)
    if source.op_type == "DynamicQuantizeLinear":  # nothing is clipped
        return op.shape_as(cotangent / op.cast(source.outputs[1], cotangent.dtype), x)
    step = op.cast(required(source, 2)[1], cotangent.dtype)
    quotient = op.cast(x, cotangent.dtype) / step
    kept = op.Equal(op.Round(quotient), levels)
    return op.shape_as(op.Where(kept, cotangent / step, 0.0), x)


# ---- as onnxruntime joins them -------------------------------------------------------------------


@rule(
    "DynamicQuantizeMatMul",
    domain=MICROSOFT,
    stops=(2,),
    covers=is_kept,
    notes="straight through the quantization",
)
def dynamic_quantize_matmul(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """DA = dY Wᵀ with W = (quantized - zero point) scale."""
    (a,), bias = required(node), optional(node, 4)
    da = _times_transposed(op, node, dy, a)
    return da, None, None, None, None if bias is None else op.sum_to(dy, bias)


@rule(
    "MatMulIntegerToFloat",
    domain=MICROSOFT,
    stops=(2, 3),
    covers=is_kept,
    reaches=_behind,
    notes="straight through to what was quantized",
)
def matmul_integer_to_float(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """DX = dY Wᵀ for what was quantized, 0 where it was clipped."""
    a, bias = required(node)[0], optional(node, 6)
    cotangents: dict[ir.Value, ir.Value | None] = {}
    source = quantizer_of(a)
    if source is not None:
        (x,) = required(source)
        dx = _times_transposed(op, node, dy, x)
        if source.op_type == "QuantizeLinear":
            levels = _without_zero(op, a, optional(node, 4), x)
            quotient = x / op.cast(required(source, 2)[1], x.dtype)
            dx = op.shape_as(op.Where(op.Equal(op.Round(quotient), levels), dx, 0.0), x)
        cotangents[x] = dx
    if bias is not None:
        cotangents[bias] = op.sum_to(dy, bias)
    return cotangents


def _without_zero(op: Ops, q: ir.Value, zero: ir.Value | None, x: ir.Value) -> ir.Value:
    numbers = op.shape_as(op.Cast(q, to=x.dtype), x)
    return numbers if zero is None else op.Sub(numbers, op.Cast(zero, to=x.dtype))


def _times_transposed(op: Ops, node: ir.Node, dy: ir.Value, a: ir.Value) -> ir.Value:
    """Return dY Wᵀ in the shape of a."""
    form = FORMS[node.op_type]
    weights, (scale, zero) = node.inputs[form.weights], (optional(node, i) for i in form.scales)
    assert weights is not None and scale is not None
    numbers = op.shape_as(op.Cast(weights, to=dy.dtype), weights)
    if zero is not None:
        numbers = op.Sub(numbers, op.Cast(zero, to=dy.dtype))
    matrix = op.Mul(numbers, scale)
    return op.shape_as(op.MatMul(dy, op.swap_last(op.shape_as(matrix, weights))), a)
