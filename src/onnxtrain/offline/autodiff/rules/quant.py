"""Rules for quantization, straight-through.

QuantizeLinear turns a float x into an integer q, which carries no gradient. DequantizeLinear turns
it back, so that the pair is a float function of x: a staircase between two bounds. Its derivative
is taken as if the rounding were not there: 1 where x lies within the range of the integers, 0 where
it was clipped to it.

In the graph this is one rule, that of DequantizeLinear: if its integer was made by QuantizeLinear,
the gradient goes on to what was quantized there (`reaches`), past the integer. The forward nodes
stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import Cotangents, optional, required, rule, zero_gradient
from onnxtrain.offline.autodiff.rules.scatter_helpers import pad
from onnxtrain.offline.graph.integer_operators import meaning_of
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import constant_array, is_half, working_type
from onnxtrain.offline.graph.sizes import arange

zero_gradient(
    "QuantizeLinear",
    reason="the result is an integer; DequantizeLinear after it passes the gradient through both",
)

# The largest finite number of the floating types that are quantized to.
_LARGEST: dict[ir.DataType | None, float] = {
    ir.DataType.FLOAT8E4M3FN: 448.0,
    ir.DataType.FLOAT8E4M3FNUZ: 240.0,
    ir.DataType.FLOAT8E5M2: 57344.0,
    ir.DataType.FLOAT8E5M2FNUZ: 57344.0,
    ir.DataType.FLOAT4E2M1: 6.0,
}


def quantizer_of(q: ir.Value) -> ir.Node | None:
    """Return the node that quantized a float to an integer, if it is known."""
    source = q.producer()
    if source is None or source.domain != "" or source.outputs[0] is not q:
        return None
    return source if source.op_type in ("QuantizeLinear", "DynamicQuantizeLinear") else None


def _behind_the_integer(node: ir.Node) -> Iterator[ir.Value]:
    """Yield what was quantized, and the scale it was divided by."""
    source = quantizer_of(*required(node))
    if source is not None:
        yield from required(source, 2)


@rule(
    "DequantizeLinear",
    reaches=_behind_the_integer,
    notes="straight through a QuantizeLinear or DynamicQuantizeLinear before it, 0 where clipped; "
    "to the scales of both, not to zero points",
)
def dequantize_linear(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """With y = (q - z) s, and q = clip(round(x / t) + z) where it was quantized.

    ds = Σ dy (q - z), dx = dy s / t and dt = -Σ dx x / t, the last two 0 where x was clipped. For
    one scale s = t that adds up to Σ dy (round(x / s) - x / s) within the range, and Σ dy (q - z)
    at its bounds: the gradient known from learned step sizes.
    """
    scale, source = required(node, 2)[1], quantizer_of(*required(node))
    seed = op.cast(dy, working_type(dy))
    levels = _levels(op, node, seed)
    if source is None:
        return _of_integers(op, node, seed), _total(op, node, seed * levels, scale)
    x, step = *required(source), optional(source, 1)
    if step is None:  # DynamicQuantizeLinear chooses a scale with which nothing is clipped
        own = scale is source.outputs[1]  # whatever it is, the pair is the identity
        dscale = None if own else _total(op, node, seed * levels, scale)
        return {x: op.cast(seed, x.dtype), scale: dscale}
    spread_step = _spread(op, source, op.cast(step, seed.dtype), seed)
    quotient = op.cast(x, seed.dtype) / spread_step
    kept = _not_clipped(op, node, x, quotient, levels)
    dx = op.Where(kept, seed, 0.0)
    if scale is step:
        error = seed * (levels - op.Where(kept, quotient, 0.0))
        return {x: op.cast(dx, x.dtype), scale: _total(op, node, error, scale)}
    if not _equal_constants(scale, step):
        dx = dx * (_spread(op, node, op.cast(scale, seed.dtype), seed) / spread_step)
    return {
        x: op.cast(dx, x.dtype),
        scale: _total(op, node, seed * levels, scale),
        step: _total(op, source, -(dx * quotient), step),
    }


def _of_integers(op: Ops, node: ir.Node, dy: ir.Value) -> ir.Value | None:
    """Return the cotangent of integers that an operator of integers made, of what they mean."""
    q, scale = required(node, 2)
    meaning = meaning_of(q)
    if meaning is None:
        return None
    seed = op.cast(dy, ir.DataType.FLOAT)
    if meaning[0] is scale or _equal_constants(meaning[0], scale):
        return op.shape_as(seed, q)
    return op.shape_as(seed * (op.cast(scale, seed.dtype) / op.cast(meaning[0], seed.dtype)), q)


@rule("DynamicQuantizeLinear", notes="of the scale; the integers pass it on to DequantizeLinear")
def dynamic_quantize_linear(
    op: Ops, node: ir.Node, dy: None, dscale: ir.Value | None, dzero_point: None = None
) -> Cotangents:
    """The scale is (max(x, 0) - min(x, 0)) / 255; elements that tie share the gradient."""
    (x,) = required(node)
    # Where the integers are multiplied, what the scale does cancels: see integer_products.py.
    multiplied = any("MatMulInteger" in user.op_type or user.op_type == "ConvInteger"
                     for user, _ in node.outputs[0].uses())  # fmt: skip
    if dscale is None or multiplied:
        return (None,)
    highest, lowest = op.ReduceMax(x, keepdims=0), op.ReduceMin(x, keepdims=0)
    at_top = op.And(op.Equal(x, highest), op.Greater(x, 0.0))
    at_bottom = op.And(op.Equal(x, lowest), op.Less(x, 0.0))
    share = dscale * (1.0 / 255.0)
    parts = []
    for reached, part in ((at_top, share), (at_bottom, -share)):
        ones = op.Cast(reached, to=x.dtype)
        ties = op.Max(op.ReduceSum(ones, keepdims=0), 1.0)
        parts.append(op.Mul(ones, part / ties))
    return (op.add_all(parts),)


def _levels(op: Ops, node: ir.Node, like: ir.Value) -> ir.Value:
    """Return q - z in floats: what the node computes if its scale is one."""
    q, scale, zero_point = *required(node, 2), optional(node, 2)
    ones = op.const(1.0, like.dtype)
    if op.rank(scale):
        ones = op.Expand(ones, op.shape_of(scale))
    (levels,) = op.call(
        "DequantizeLinear", q, ones, *([] if zero_point is None else [zero_point]), like=like,
        axis=node.attributes.get_int("axis"), block_size=node.attributes.get_int("block_size"),
    )  # fmt: skip
    return levels


def _not_clipped(
    op: Ops, node: ir.Node, x: ir.Value, quotient: ir.Value, levels: ir.Value
) -> ir.Value:
    """Tell where x was not clipped: there its rounded quotient is what came back.

    That asks neither for the bounds nor for the type of the integers. Small floats are not rounded
    to whole numbers, but there is a largest one.
    """
    (q,) = required(node)
    if q.dtype in _LARGEST:
        return op.LessOrEqual(op.Abs(quotient), _LARGEST[q.dtype])
    if is_half(x):  # the next level is as good, if a rounding of x made it
        slack = op.Abs(quotient) * 2.0**-10 + 0.5
        return op.LessOrEqual(op.Abs(quotient - levels), slack)
    return op.Equal(op.Round(quotient), levels)


def _equal_constants(a: ir.Value, b: ir.Value) -> bool:
    first, second = constant_array(a), constant_array(b)
    return first is not None and second is not None and np.array_equal(first, second)


# ---- from one number per tensor, channel or block to one per element, and back -----------------


def _axis_and_block(op: Ops, node: ir.Node, x: ir.Value) -> tuple[int, int]:
    """Return the axis along which the scale varies, and how many elements share one (0: one)."""
    rank = op.rank(x)
    axis = node.attributes.get_int("axis", 1) % rank if rank > 1 else 0
    return axis, node.attributes.get_int("block_size", 0)


def _spread(op: Ops, node: ir.Node, scale: ir.Value, x: ir.Value) -> ir.Value:
    """Give a scale the shape in which it broadcasts against x."""
    if op.rank(scale) == 0:
        return scale
    axis, block = _axis_and_block(op, node, x)
    if block:
        numbers = arange(op, op.dim(x, axis))
        shape = [*op.dims(scale)[:axis], op.dims(x)[axis], *op.dims(scale)[axis + 1 :]]
        return op.with_dims(op.Gather(scale, numbers / op.int64(block), axis=axis), shape)
    ones = [1] * (op.rank(x) - 1 - axis)
    return op.with_dims(op.Reshape(scale, [-1, *ones]), [op.dims(scale)[0], *ones])


def _total(op: Ops, node: ir.Node, value: ir.Value, scale: ir.Value) -> ir.Value:
    """Sum the contributions of all elements to their scale."""
    axis, block = _axis_and_block(op, node, value)
    if op.rank(scale) == 0:
        total = op.ReduceSum(value, keepdims=0)
    elif block:
        total = _sum_of_blocks(op, value, scale, axis, block)
    else:
        total = op.reshape_like(op.sum_to(value, _spread(op, node, scale, value)), scale)
    return op.cast(total, scale.dtype)


def _sum_of_blocks(op: Ops, value: ir.Value, scale: ir.Value, axis: int, block: int) -> ir.Value:
    dims, blocks = op.dims(value), op.dims(scale)[axis]
    if not isinstance(blocks, int) or dims[axis] != blocks * block:  # the last may be shorter
        missing = op.dim(scale, axis) * op.int64([block]) - op.dim(value, axis)
        value = pad(op, value, {axis: (0, missing)})
    sizes = [op.dim(scale, i) for i in range(len(dims))]
    apart = op.reshape(value, op.dims_vector(*sizes[: axis + 1], block, *sizes[axis + 1 :]))
    shape = [*op.dims(scale)[: axis + 1], block, *op.dims(scale)[axis + 1 :]]
    return op.sum(op.with_dims(apart, shape), [axis + 1])
