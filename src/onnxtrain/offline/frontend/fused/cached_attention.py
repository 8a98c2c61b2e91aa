"""GroupQueryAttention: causal attention of language models, with a cache of keys and values.

Queries are more heads than keys and values; each head of the latter serves a group of the former.
The cache (`past`) may be longer than what it holds: `seqlens_k` says how long each sequence of the
batch is, new keys included, and these are written behind the old ones of their own sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.autodiff.definitions import Defined, Maybe, NotExpandable, split
from onnxtrain.offline.autodiff.heads import join_heads, mix, rotate, scores, split_heads
from onnxtrain.offline.frontend.fused.domain import fused
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import UNKNOWN, constant_array
from onnxtrain.offline.graph.sizes import arange, arange_of


@fused(
    "GroupQueryAttention",
    ranks=(0, 1, 2),
    lacking="a quantized or windowed cache, normalized queries and keys, or qk_output",
)
def group_query_attention(
    op: Ops,
    node: ir.Node,
    query: ir.Value,
    key: Maybe,
    value: Maybe,
    past_key: Maybe,
    past_value: Maybe,
    seqlens_k: ir.Value,
    total_sequence_length: ir.Value,
    cos_cache: Maybe = None,
    sin_cache: Maybe = None,
    position_ids: Maybe = None,
    attention_bias: Maybe = None,
    head_sink: Maybe = None,
    *quantization_and_norms: Maybe,
) -> Defined:
    """softmax(mask(scale q kᵀ)) v over groups of heads."""
    if any(v is not None for v in quantization_and_norms):
        raise NotExpandable("a quantized cache, or normalized queries and keys")
    if any(node.attributes.get_int(name, 0) for name in ("sliding_window_cache", "qk_output")):
        raise NotExpandable("a windowed cache, or the scores as an output")
    length = op.dim(query, 1)
    total = op.Cast(op.Reshape(total_sequence_length, [1]), to=ir.DataType.INT64)
    if past_key is None:  # nothing came before
        first, before = op.const(True), op.const(np.zeros((1, 1), np.int64))
    else:
        first = op.Equal(total, length)
        before = _kept_before(op, first, length, seqlens_k)
    turn = None
    if node.attributes.get_int("do_rotary", 0) and cos_cache is not None and sin_cache is not None:
        steps = op.unsqueeze(arange_of(op, query, 1), [0])
        positions = _positions(op, first, before, steps, position_ids)
        cos, sin = (op.Unsqueeze(op.Gather(c, positions), [1]) for c in (cos_cache, sin_cache))
        interleaved = bool(node.attributes.get_int("rotary_interleaved", 0))
        turn = partial(rotate, op, cos=cos, sin=sin, interleaved=interleaved)
    q, k, v = _three(op, node, query, key, value, turn)
    if past_key is not None and past_value is not None:
        k, v = _append(op, before, total, (past_key, k), (past_value, v))
    is_all_visible = past_key is None and not node.attributes.get_int("causal", 1)
    visible = None if is_all_visible else _visible(op, node, before, length, k)
    y = _attend(op, node, q, k, v, visible, attention_bias, head_sink)
    return y, k, v


def _three(
    op: Ops,
    node: ir.Node,
    query: ir.Value,
    key: Maybe,
    value: Maybe,
    turn: Callable[[ir.Value], ir.Value] | None,
) -> list[ir.Value]:
    """Return queries, keys and values as (batch, heads, length, size); the first two are turned."""
    heads, groups = node.attributes.get_int("num_heads"), node.attributes.get_int("kv_num_heads")
    if key is not None and value is not None:
        q, k, v = (
            split_heads(op, x, count)
            for x, count in ((query, heads), (key, groups), (value, groups))
        )
        return [q, k, v] if turn is None else [turn(q), turn(k), v]
    packed = split_heads(op, query, heads + 2 * groups)
    if turn is None:
        return list(split(op, packed, 3, 1, [heads, groups, groups]))
    both, v = split(op, packed, 2, 1, [heads + groups, groups])
    return [*split(op, turn(both), 2, 1, [heads, groups]), v]


def _kept_before(op: Ops, first: ir.Value, length: ir.Value, seqlens_k: ir.Value) -> ir.Value:
    """Return how many keys of each sequence precede the new ones, as (batch, 1).

    A first prompt, whose total length is that of the query, has none; its shorter sequences are
    padded on the right.
    """
    lengths = op.Add(op.Cast(op.Reshape(seqlens_k, [-1, 1]), to=ir.DataType.INT64), op.int64(1))
    return op.Where(first, op.int64(0), op.Sub(lengths, length))


def _positions(
    op: Ops, first: ir.Value, before: ir.Value, steps: ir.Value, position_ids: Maybe
) -> ir.Value:
    """Return the position of each query, as (batch, length).

    Of the positions given for a first prompt, onnxruntime reads one: where all sequences begin.
    """
    if position_ids is None:
        return steps if constant_array(first) is not None else op.Add(before, steps)
    begin = op.Slice(op.Reshape(position_ids, [-1]), [0], [1], [0])
    if constant_array(first) is not None:
        return op.Add(steps, begin)
    return op.Where(first, op.Add(steps, begin), position_ids)


def _append(
    op: Ops, before: ir.Value, total: ir.Value, *pairs: tuple[ir.Value, ir.Value]
) -> list[ir.Value]:
    """Write new keys (values) behind the old ones that each sequence of the batch keeps."""
    past, new = pairs[0]
    old, added = op.Shape(past, start=2, end=3), op.Shape(new, start=2, end=3)
    now = op.Max(total, old)
    places = op.unsqueeze(arange(op, now), [0])
    moved = op.Min(op.Add(old, op.Sub(places, before)), op.Sub(op.Add(old, added), op.int64(1)))
    source = op.Unsqueeze(op.Where(op.Less(places, before), places, moved), [1, 3])
    results = []
    for cache, values in pairs:
        joined = op.Concat(cache, values, axis=2)
        shape = op.Concat(
            op.Shape(values, start=0, end=2), now, op.Shape(values, start=3, end=4), axis=0
        )
        gathered = op.GatherElements(joined, op.Expand(source, shape), axis=2)
        dims = op.dims(values)
        results.append(op.with_dims(gathered, [*dims[:2], UNKNOWN, dims[3]]))
    return results


def _visible(op: Ops, node: ir.Node, before: ir.Value, length: ir.Value, k: ir.Value) -> ir.Value:
    """Tell which keys each query sees, as (batch, 1, queries, keys)."""
    keys = op.unsqueeze(arange(op, op.Shape(k, start=2, end=3)), [0, 1, 2])
    base = op.Unsqueeze(before, [1, 2])
    queries = op.Add(op.unsqueeze(arange(op, length), [0, 1, 3]), base)
    if not node.attributes.get_int("causal", 1):
        return op.Less(keys, op.Add(base, length))
    seen = op.LessOrEqual(keys, queries)
    window = node.attributes.get_int("local_window_size", -1)
    if window > 0:
        seen = op.And(seen, op.Greater(keys, op.Sub(queries, op.int64(window))))
    return seen


def _attend(
    op: Ops,
    node: ir.Node,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    visible: Maybe,
    attention_bias: Maybe,
    head_sink: Maybe,
) -> ir.Value:
    """Return the mixed values, with the heads joined."""
    total = scores(op, node, q, k)
    cap = node.attributes.get_float("softcap", 0.0)
    if cap:
        total = op.Mul(op.Tanh(total * (1.0 / cap)), cap)
    if attention_bias is not None:
        total = op.Add(total, attention_bias)
    if visible is not None:
        hidden = op.const(float("-inf"), total.dtype)
        total = op.type_as(op.Where(visible, total, hidden), total)
    return join_heads(op, mix(op, _softmax(op, node, total, head_sink), v))


def _softmax(op: Ops, node: ir.Node, scores: ir.Value, head_sink: Maybe) -> ir.Value:
    """Softmax over the keys; a sink is one more key without a value."""
    if head_sink is None and not node.attributes.get_int("smooth_softmax", 0):
        return op.Softmax(scores, axis=-1)
    sink = op.const(0.0, scores.dtype)
    if head_sink is not None:
        sink = op.Reshape(head_sink, [1, -1, 1, 1])
    column = op.Expand(sink, op.Concat(op.Shape(scores, start=0, end=3), op.int64([1]), axis=0))
    with_sink = op.Softmax(op.Concat(scores, column, axis=-1), axis=-1)
    return op.type_as(op.slice(with_sink, 3, 0, -1), scores)


@fused("RotaryEmbedding", ranks=(0, 1, 2), lacking="is_packed_batching")
def rotary_embedding(
    op: Ops,
    node: ir.Node,
    x: ir.Value,
    position_ids: ir.Value,
    cos_cache: ir.Value,
    sin_cache: ir.Value,
) -> ir.Value:
    """Rotate pairs of numbers of each head by the angles of their position.

    x is (batch, length, width) or (batch, heads, length, size). The attribute `scale` has no effect
    in onnxruntime, and none here.
    """
    if node.attributes.get_int("is_packed_batching", 0):
        raise NotExpandable("ragged batches")
    interleaved = bool(node.attributes.get_int("interleaved", 0))
    flat = op.rank(x) == 3
    length_axis, heads_axis = (1, 2) if flat else (2, 1)
    positions = position_ids
    if op.rank(position_ids) == 1:  # one number: where the sequence begins
        steps = arange(op, op.dim(x, length_axis))
        positions = op.unsqueeze(op.Add(steps, position_ids), [0])
    cos, sin = (op.unsqueeze(op.Gather(c, positions), [heads_axis]) for c in (cos_cache, sin_cache))
    if not flat:
        return rotate(op, x, cos, sin, interleaved)
    if node.attributes.get_int("rotary_embedding_dim", 0):
        heads = op.Reshape(x, [0, 0, node.attributes.get_int("num_heads"), -1])
    else:
        size = op.Add(op.dim(cos_cache, 1), op.dim(cos_cache, 1))
        heads = op.Reshape(x, op.dims_vector(0, 0, -1, size))
        heads = op.with_dims(heads, [*op.dims(x)[:2], UNKNOWN, UNKNOWN])
    return op.reshape_like(rotate(op, heads, cos, sin, interleaved), x)
