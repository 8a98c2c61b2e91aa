"""Normalizations with the additions that onnxruntime fuses into them."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.offline.autodiff.definitions import Defined, Maybe, wanted
from onnxtrain.offline.frontend.fused.domain import fused
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import working_type
from onnxtrain.offline.graph.sizes import arange


@fused("LayerNormalization")
def layer_normalization(
    op: Ops, node: ir.Node, x: ir.Value, scale: ir.Value, b: Maybe = None
) -> Defined:
    """The operator of ai.onnx, which onnxruntime had under this name before ONNX did."""
    return _normalized(op, node, x, scale, b, axis=node.attributes.get_int("axis", -1))


@fused("SkipLayerNormalization")
def skip_layer_normalization(
    op: Ops,
    node: ir.Node,
    x: ir.Value,
    skip: ir.Value,
    gamma: ir.Value,
    beta: Maybe = None,
    bias: Maybe = None,
) -> Defined:
    """LayerNormalization of x + skip + bias; the sum is an output as well."""
    total = _sum(op, x, skip, bias)
    y, *statistics = _normalized(op, node, total, gamma, beta, default_epsilon=1e-12)
    return y, *statistics, total


def _sum(op: Ops, x: ir.Value, skip: ir.Value, bias: Maybe) -> ir.Value:
    total = op.Add(x, skip)
    return total if bias is None else op.Add(total, bias)


def _normalized(
    op: Ops,
    node: ir.Node,
    x: ir.Value,
    scale: ir.Value,
    b: Maybe,
    axis: int = -1,
    default_epsilon: float = 1e-5,
) -> tuple[Maybe, ...]:
    """Write LayerNormalization and return y, mean and inverse deviation (None if unwanted)."""
    count = 3 if wanted(node, 2) else 2 if wanted(node, 1) else 1
    outputs = op.call(
        "LayerNormalization", x, scale, *([] if b is None else [b]), like=x, outputs=count,
        axis=axis, epsilon=node.attributes.get_float("epsilon", default_epsilon),
    )  # fmt: skip
    return *outputs, *[None] * (3 - count)


@fused("SimplifiedLayerNormalization", ranks=(0,))
def simplified_layer_normalization(op: Ops, node: ir.Node, x: ir.Value, scale: ir.Value) -> Defined:
    """x / √(mean(x²) + epsilon) times a scale."""
    axis = node.attributes.get_int("axis", -1)
    axes = list(range(axis % op.rank(x), op.rank(x)))
    return _root_mean_square(op, x, scale, axes, node.attributes.get_float("epsilon", 1e-5))


@fused("SkipSimplifiedLayerNormalization")
def skip_simplified_layer_normalization(
    op: Ops, node: ir.Node, x: ir.Value, skip: ir.Value, gamma: ir.Value, bias: Maybe = None
) -> Defined:
    """The same of x + skip + bias; the sum is an output as well, and a mean that is zero."""
    total = _sum(op, x, skip, bias)
    epsilon = node.attributes.get_float("epsilon", 1e-12)
    y, inverse = _root_mean_square(op, total, gamma, [-1], epsilon)
    mean = op.Sub(inverse, inverse) if wanted(node, 1) else None
    return y, mean, inverse, total


def _root_mean_square(
    op: Ops, x: ir.Value, scale: ir.Value, axes: list[int], epsilon: float
) -> tuple[ir.Value, ir.Value]:
    """Return the normalized value and the inverse root; half precision is computed in float."""
    wide = op.cast(x, working_type(x))
    inverse = op.Reciprocal(op.Sqrt(op.ReduceMean(wide * wide, axes, keepdims=1) + epsilon))
    return op.cast(wide * inverse, x.dtype) * op.cast(scale, x.dtype), inverse


@fused("EmbedLayerNormalization")
def embed_layer_normalization(
    op: Ops,
    node: ir.Node,
    input_ids: ir.Value,
    segment_ids: Maybe,
    word_embedding: ir.Value,
    position_embedding: ir.Value,
    segment_embedding: Maybe,
    gamma: ir.Value,
    beta: ir.Value,
    mask: Maybe = None,
    position_ids: Maybe = None,
) -> Defined:
    """LayerNormalization of the sum of word, position and segment embeddings."""
    word = op.Gather(word_embedding, input_ids)
    if position_ids is None:
        position_ids = arange(op, op.Shape(input_ids, start=1, end=2))
    total = word + op.Gather(position_embedding, position_ids)
    if segment_ids is not None and segment_embedding is not None:
        total = total + op.Gather(segment_embedding, segment_ids)
    epsilon = node.attributes.get_float("epsilon", 1e-12)
    y = op.call("LayerNormalization", total, gamma, beta, like=total, epsilon=epsilon)[0]
    if not wanted(node, 1):
        return y, None, total
    # The second output is the number of ones in each row of the mask; zero without a mask.
    ones = op.Equal(input_ids if mask is None else mask, 1)
    counts = op.ReduceSum(op.Cast(ones, to=ir.DataType.INT32), [1], keepdims=0)
    return y, counts if mask is not None else counts - counts, total


@fused("GroupNorm", "SkipGroupNorm", ranks=(0, 3))
def group_norm(
    op: Ops,
    node: ir.Node,
    x: ir.Value,
    gamma: ir.Value,
    beta: ir.Value,
    skip: Maybe = None,
    bias: Maybe = None,
) -> Defined:
    """Normalization over groups of channels, after an optional addition; then an optional SiLU.

    The channels are last by default. The sum before the normalization is an output as well.
    """
    last = bool(node.attributes.get_int("channels_last", 1))
    spatial = list(range(1, op.rank(x) - 1)) if last else list(range(2, op.rank(x)))
    outer = [] if last else [a - 1 for a in spatial]  # what makes a vector a row of channels
    if skip is not None:
        x = x + (op.unsqueeze(skip, spatial) if op.rank(skip) == 2 else skip)
    if bias is not None:
        x = x + op.unsqueeze(bias, outer)
    wide = op.cast(x, ir.DataType.FLOAT)
    rows = op.transpose(wide, [0, op.rank(x) - 1, *spatial]) if last else wide
    grouped = op.Reshape(rows, [0, node.attributes.get_int("groups"), -1])
    centred = grouped - op.ReduceMean(grouped, [2], keepdims=1)
    variance = op.ReduceMean(centred * centred, [2], keepdims=1)
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    y = op.reshape_like(centred / op.Sqrt(variance + epsilon), rows)
    if last:
        y = op.transpose(y, [0, *range(2, op.rank(x)), 1])
    y = y * op.unsqueeze(op.cast(gamma, y.dtype), outer)
    y = y + op.unsqueeze(op.cast(beta, y.dtype), outer)
    if node.attributes.get_int("activation", 0):
        y = y * op.Sigmoid(y)
    return op.cast(y, x.dtype), x


@fused("GatedRMSNorm", ranks=(0,))
def gated_rms_norm(
    op: Ops, node: ir.Node, x: ir.Value, scale: ir.Value, gate: ir.Value
) -> ir.Value:
    """RMS normalization over groups of the last axis, times the activation of a gate."""
    wide, opening = op.cast(x, ir.DataType.FLOAT), op.cast(gate, ir.DataType.FLOAT)
    lead = [op.dim(x, axis) for axis in range(op.rank(x) - 1)]
    grouped = op.Reshape(wide, op.dims_vector(*lead, -1, op.Shape(scale)))
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    y, _ = _root_mean_square(op, grouped, scale, [-1], epsilon)
    factor = op.Sigmoid(opening)
    if node.attributes.get_string("activation", "silu") != "sigmoid":
        factor = opening * factor
    return op.cast(op.reshape_like(y, x) * factor, x.dtype)
