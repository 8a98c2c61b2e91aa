"""Attention layers: projections, masks, softmax and the way back, in plain operators.

Both operators end in `_attend`. Masks are added to the scores as onnxruntime's kernels do: a masked
place gets `mask_filter_value` (-10000), not minus infinity, so that rows without any visible key
stay finite.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.offline.autodiff.definitions import Defined, Maybe, NotExpandable, split, wanted
from onnxtrain.offline.autodiff.heads import join_heads, mix, positions, scores, split_heads
from onnxtrain.offline.frontend.fused.domain import fused
from onnxtrain.offline.graph.ops import Ops


@fused("Attention", ranks=(0, 3), lacking="do_rotary or past_present_share_buffer")
def attention(
    op: Ops,
    node: ir.Node,
    x: ir.Value,
    weights: ir.Value,
    bias: Maybe = None,
    mask_index: Maybe = None,
    past: Maybe = None,
    attention_bias: Maybe = None,
    past_sequence_length: Maybe = None,
) -> Defined:
    """Self attention with packed projections: (q, k, v) = x [Wq Wk Wv] + [bq bk bv]."""
    if node.attributes.get_int("do_rotary", 0) or past_sequence_length is not None:
        raise NotExpandable("rotary positions, or past and present in one buffer")
    sizes = node.attributes.get_ints("qkv_hidden_sizes", [])
    heads = node.attributes.get_int("num_heads")
    projected = op.MatMul(x, weights)
    if bias is not None:
        projected = projected + bias
    q, k, v = (split_heads(op, part, heads) for part in split(op, projected, 3, -1, sizes))
    old_k: Maybe = None
    if past is not None:
        old_k, old_v = (op.squeeze(p, [0]) for p in split(op, past, 2, 0))
        k, v = op.Concat(old_k, k, axis=2), op.Concat(old_v, v, axis=2)
    mask = _additive_mask(op, node, mask_index, q, k, old_k)
    y, _ = _attend(op, node, q, k, v, mask, attention_bias)
    if not wanted(node, 1):
        return y
    return y, op.Concat(op.Unsqueeze(k, [0]), op.Unsqueeze(v, [0]), axis=0)


@fused(
    "MultiHeadAttention",
    ranks=(0, 1, 2, 4),
    lacking="past_sequence_length or cache_indirection",
)
def multi_head_attention(
    op: Ops,
    node: ir.Node,
    query: ir.Value,
    key: Maybe = None,
    value: Maybe = None,
    bias: Maybe = None,
    key_padding_mask: Maybe = None,
    attention_bias: Maybe = None,
    past_key: Maybe = None,
    past_value: Maybe = None,
    past_sequence_length: Maybe = None,
    cache_indirection: Maybe = None,
) -> Defined:
    """Attention of projected queries, keys and values; they may come packed in one tensor."""
    if past_sequence_length is not None or cache_indirection is not None:
        raise NotExpandable("past and present in one buffer")
    parts = [None] * 3 if bias is None else _split_bias(op, bias, query, key, value)
    q, k, v = _three(op, node, query, key, value, parts)
    if past_key is not None and past_value is not None:
        k, v = op.Concat(past_key, k, axis=2), op.Concat(past_value, v, axis=2)
    mask = _additive_mask(op, node, key_padding_mask, q, k, past_key)
    y, probabilities = _attend(op, node, q, k, v, mask, attention_bias)
    return y, k, v, probabilities


def _three(
    op: Ops, node: ir.Node, query: ir.Value, key: Maybe, value: Maybe, biases: Sequence[Maybe]
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return queries, keys and values as (batch, heads, length, size), biases added."""
    if op.rank(query) == 5:  # (batch, length, heads, 3, size)
        packed = [_unpacked(op, part) for part in split(op, query, 3, 3)]
    elif key is not None and op.rank(key) == 5:  # (batch, length, heads, 2, size)
        packed = [query, *(_unpacked(op, part) for part in split(op, key, 2, 3))]
    elif key is not None and value is not None:
        packed = [query, key, value]
    else:
        raise NotExpandable("keys or values are missing")
    results = []
    for part, bias in zip(packed, biases, strict=True):
        if op.rank(part) == 4:  # split into heads already: keys and values of cross attention
            results.append(part)
        else:
            flat = part if bias is None else part + bias
            results.append(split_heads(op, flat, node.attributes.get_int("num_heads")))
    return results[0], results[1], results[2]


def _unpacked(op: Ops, part: ir.Value) -> ir.Value:
    """Join the heads again: (batch, length, heads, 1, size) to (batch, length, width)."""
    return op.Reshape(part, [0, 0, -1])


def _split_bias(
    op: Ops, bias: ir.Value, query: ir.Value, key: Maybe, value: Maybe
) -> tuple[ir.Value, ...]:
    """Split [bq bk bv]: q and k are equally wide, v may be wider or narrower."""
    if value is None or op.rank(value) != 3 or op.rank(query) != 3:
        return split(op, bias, 3, 0)
    width = op.dim(query, 2)
    return op.call("Split", bias, op.dims_vector(width, width, op.dim(value, 2)), outputs=3, axis=0)


def _attend(
    op: Ops, node: ir.Node, q: ir.Value, k: ir.Value, v: ir.Value, *additions: Maybe
) -> tuple[ir.Value, ir.Value]:
    """softmax(scale q kᵀ + additions) v with the heads joined again, and the probabilities."""
    total = scores(op, node, q, k)
    for addition in additions:
        total = total if addition is None else op.Add(total, addition)
    probabilities = op.Softmax(total, axis=-1)
    return join_heads(op, mix(op, probabilities, v)), probabilities


def _additive_mask(
    op: Ops, node: ir.Node, mask: Maybe, q: ir.Value, k: ir.Value, past: Maybe
) -> Maybe:
    """Return what masks add to the scores, of a shape that broadcasts to them."""
    total = None
    if mask is not None:
        fill = node.attributes.get_float("mask_filter_value", -10000.0)
        total = op.Cast(_hidden(op, mask, q, k), to=q.dtype) * fill
    if node.attributes.get_int("unidirectional", 0):
        # Never the value of the attribute. Each query sees at least itself, so rows stay finite.
        never = op.const(float("-inf"), q.dtype)
        queries = positions(op, q, as_column=True)  # they follow the keys of the past
        if past is not None:
            queries = op.Add(queries, op.Shape(past, start=2, end=3))
        is_ahead = op.Greater(positions(op, k), queries)
        ahead = op.Where(is_ahead, never, op.const(0.0, q.dtype))
        total = ahead if total is None else total + ahead
    return total


def _hidden(op: Ops, mask: ir.Value, q: ir.Value, k: ir.Value) -> ir.Value:
    """Tell for each key (of each query) whether a mask of one of the accepted forms hides it."""
    rank = op.rank(mask)
    if rank == 2:
        return op.unsqueeze(op.LessOrEqual(mask, 0), [1, 2])
    if rank == 3:
        return op.unsqueeze(op.LessOrEqual(mask, 0), [1])
    if rank == 4:  # (batch, 1, longest, longest), of which the last rows up to now count
        total, length = op.Shape(k, start=2, end=3), op.Shape(q, start=2, end=3)
        rows = op.slice(mask, 2, op.Sub(total, length), total)
        return op.LessOrEqual(op.slice(rows, 3, 0, total), 0)
    return _beyond(op, mask, q, k)


def _beyond(op: Ops, bounds: ir.Value, q: ir.Value, k: ir.Value) -> ir.Value:
    """Tell which keys lie outside of [start, end).

    The ends of all sequences come first; the starts follow, or are zero.
    """
    batch = op.Shape(q, start=0, end=1)
    starts_too = op.Concat(bounds, op.Sub(bounds, bounds), axis=0)
    column = [-1, 1, 1, 1]
    end = op.Reshape(op.Slice(bounds, [0], batch, [0]), column)
    start = op.Reshape(op.Slice(starts_too, batch, op.Add(batch, batch), [0]), column)
    at = op.Cast(positions(op, k), to=bounds.dtype)
    return op.Or(op.GreaterOrEqual(at, end), op.Less(at, start))
