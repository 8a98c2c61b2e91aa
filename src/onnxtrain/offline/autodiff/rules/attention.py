"""Attention and rotary embeddings of ai.onnx, written in operators that have rules.

They have no rules of their own: for training, the probabilities have to be kept anyway, and the
operators that attention is made of take hardly longer apart than fused (0.98 ms against 0.95 for
batch 16, 4 heads, length 128). The definitions here differ from the function bodies of the standard
in two ways. A query that no key is visible to has a zero gradient, where the body would have nan.
And keys that serve several heads are not repeated: forward and backward take 3.6 ms, not 5.3.
"""

from __future__ import annotations

from functools import reduce

import onnx_ir as ir

from onnxtrain.offline.autodiff.definitions import Defined, definition, wanted
from onnxtrain.offline.autodiff.heads import join_heads, mix, positions, rotate, scores, split_heads
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import same_dim


@definition("Attention", ranks=(0, 1, 2, 3))
def attention(
    op: Ops,
    node: ir.Node,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    attn_mask: ir.Value | None = None,
    past_key: ir.Value | None = None,
    past_value: ir.Value | None = None,
    nonpad_kv_seqlen: ir.Value | None = None,
) -> Defined:
    """softmax(softcap(scale q kᵀ) + bias) v; the bias is what masks hide (minus infinity)."""
    flat = op.rank(q) == 3
    if flat:
        heads, groups = (node.attributes.get_int(n) for n in ("q_num_heads", "kv_num_heads"))
        q, k, v = split_heads(op, q, heads), split_heads(op, k, groups), split_heads(op, v, groups)
    if past_key is not None and past_value is not None:
        k, v = op.Concat(past_key, k, axis=2), op.Concat(past_value, v, axis=2)
    raw = scores(op, node, q, k)
    cap = node.attributes.get_float("softcap", 0.0)
    capped = op.Mul(op.Tanh(raw * (1.0 / cap)), cap) if cap else raw
    bias = _bias(op, node, q, k, attn_mask, past_key, nonpad_kv_seqlen)
    blind = None
    if bias is not None and (attn_mask is not None or nonpad_kv_seqlen is not None):
        # A row that hides every key: let it see all, and take the result away again. The gradient
        # of what is computed in between is finite, and is not used.
        blind = op.Equal(op.ReduceMax(bias, [-1], keepdims=1), float("-inf"))
        bias = op.Where(blind, op.const(0.0, bias.dtype), bias)
    biased = capped if bias is None else op.Add(capped, bias)
    precision = node.attributes.get_int("softmax_precision", 0)
    wide = op.cast(biased, ir.DataType(precision) if precision else biased.dtype)
    probabilities = op.cast(op.Softmax(wide, axis=-1), biased.dtype)
    y = mix(op, probabilities, v)
    y = y if blind is None else op.type_as(op.Where(blind, 0.0, y), y)
    detail: ir.Value | None = None
    if wanted(node, 3):
        mode = node.attributes.get_int("qk_matmul_output_mode", 0)
        detail = (raw, capped, biased, probabilities)[mode]
        if blind is not None and mode >= 2:
            detail = op.Where(blind, float("-inf") if mode == 2 else 0.0, detail)
    return join_heads(op, y) if flat else y, k, v, detail


def _bias(
    op: Ops,
    node: ir.Node,
    q: ir.Value,
    k: ir.Value,
    attn_mask: ir.Value | None,
    past_key: ir.Value | None,
    nonpad_kv_seqlen: ir.Value | None,
) -> ir.Value | None:
    """Return what is added to the scores, of a shape that broadcasts to them."""
    parts = []
    visible = _visible(op, node, q, k, past_key, nonpad_kv_seqlen)
    if visible is not None:
        parts.append(_hide(op, visible, q))
    if attn_mask is not None:
        of_bools = attn_mask.dtype == ir.DataType.BOOL
        parts.append(_lengthened(op, _hide(op, attn_mask, q) if of_bools else attn_mask, k))
    return op.add_all(parts) if parts else None


def _hide(op: Ops, visible: ir.Value, q: ir.Value) -> ir.Value:
    return op.Where(visible, op.const(0.0, q.dtype), op.const(float("-inf"), q.dtype))


def _lengthened(op: Ops, mask: ir.Value, k: ir.Value) -> ir.Value:
    """Hide the keys that a mask is too short for, as it may be from opset 24 on."""
    dims, key_dims = op.dims(mask), op.dims(k)
    if op.opset < 24 or same_dim(dims[-1], key_dims[2]):
        return mask
    missing = op.Sub(op.dim(k, 2), op.dim(mask, -1))
    pads = op.dims_vector([0] * (2 * len(dims) - 1), missing)
    longer = op.Pad(mask, pads, op.const(float("-inf"), mask.dtype))
    return op.with_dims(longer, (*dims[:-1], key_dims[2]))


def _visible(
    op: Ops,
    node: ir.Node,
    q: ir.Value,
    k: ir.Value,
    past_key: ir.Value | None,
    nonpad_kv_seqlen: ir.Value | None,
) -> ir.Value | None:
    """Tell which keys each query sees by its position, or None if it sees all.

    The position of a query counts from the first key that is no padding; the keys of the past, or
    of a cache that `nonpad_kv_seqlen` tells the length of, come before.
    """
    causal = bool(node.attributes.get_int("is_causal", 0))
    left = node.attributes.get_int("left_window_size", -1)
    right = 0 if causal else node.attributes.get_int("right_window_size", -1)
    keys = positions(op, k)
    conditions = []
    valid = None
    if nonpad_kv_seqlen is not None:
        valid = op.unsqueeze(nonpad_kv_seqlen, [1, 2, 3])
        conditions.append(op.Less(keys, valid))
    if left >= 0 or right >= 0:
        at = positions(op, q, as_column=True)
        if past_key is not None:
            at = op.Add(at, op.dim(past_key, 2))
        elif valid is not None:
            at = op.Add(at, op.Sub(valid, op.dim(q, 2)))
        if right >= 0:
            conditions.append(op.LessOrEqual(keys, op.Add(at, op.int64(right)) if right else at))
        if left >= 0:
            conditions.append(op.GreaterOrEqual(keys, op.Sub(at, op.int64(left))))
    return reduce(op.And, conditions) if conditions else None


@definition("RotaryEmbedding", ranks=(0, 1, 2))
def rotary_embedding(
    op: Ops,
    node: ir.Node,
    x: ir.Value,
    cos_cache: ir.Value,
    sin_cache: ir.Value,
    position_ids: ir.Value | None = None,
) -> ir.Value:
    """Rotate pairs of numbers of each head by the angles of their position."""
    flat = op.rank(x) == 3
    heads = op.Reshape(x, [0, 0, node.attributes.get_int("num_heads"), -1]) if flat else x
    turned = node.attributes.get_int("rotary_embedding_dim", 0)
    angles = []
    for cache in (cos_cache, sin_cache):
        angle = cache if position_ids is None else op.Gather(cache, position_ids)
        if turned:
            angle = op.slice(angle, -1, 0, turned // 2)
        angles.append(op.unsqueeze(angle, [2 if flat else 1]))
    interleaved = bool(node.attributes.get_int("interleaved", 0))
    y = rotate(op, heads, angles[0], angles[1], interleaved)
    return op.reshape_like(y, x) if flat else y
