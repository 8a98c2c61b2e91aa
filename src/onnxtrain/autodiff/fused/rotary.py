"""Rotary position embeddings."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff.definitions import NotExpandable
from onnxtrain.autodiff.fused.domain import fused
from onnxtrain.autodiff.ops import Ops


@fused("RotaryEmbedding", ranks=(0, 1, 2))
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
    length_axis = 1 if flat else 2
    positions = position_ids
    if op.rank(position_ids) == 1:  # one number: where the sequence begins
        length = op.squeeze(op.dim(x, length_axis), [0])
        steps = op.with_dims(op.Range(op.int64(0), length, op.int64(1)), [ir.SymbolicDim(None)])
        positions = op.unsqueeze(op.Add(steps, position_ids), [0])
    heads_axis = 3 - length_axis
    cos, sin = (op.unsqueeze(op.Gather(c, positions), [heads_axis]) for c in (cos_cache, sin_cache))
    if not flat:
        return rotate(op, x, cos, sin, interleaved)
    if node.attributes.get_int("rotary_embedding_dim", 0):
        heads = op.Reshape(x, [0, 0, node.attributes.get_int("num_heads"), -1])
    else:
        size = op.Add(op.dim(cos_cache, 1), op.dim(cos_cache, 1))
        heads = op.with_dims(
            op.Reshape(x, op.dims_vector(0, 0, -1, size)), [*op.dims(x)[:2], *[_unknown()] * 2]
        )
    return op.reshape_like(rotate(op, heads, cos, sin, interleaved), x)


def rotate(op: Ops, x: ir.Value, cos: ir.Value, sin: ir.Value, interleaved: bool) -> ir.Value:
    """Rotate the first numbers of the last axis, as many as there are angles; keep the rest.

    The pairs are (first half, second half), or neighbours where they are interleaved.
    """
    half = op.Shape(cos, start=-1)
    turned = op.Add(half, half)
    front = op.slice(x, -1, 0, turned)
    rest = op.slice(x, -1, turned, 2**62)
    if interleaved:
        even, odd = op.slice(front, -1, 0, 2**62, 2), op.slice(front, -1, 1, 2**62, 2)
        pair = [even * cos - odd * sin, odd * cos + even * sin]
        stacked = op.Concat(*[op.Unsqueeze(p, [-1]) for p in pair], axis=-1)
        result = op.Reshape(stacked, op.Shape(front))
    else:
        first, second = op.slice(front, -1, 0, half), op.slice(front, -1, half, turned)
        result = op.Concat(first * cos - second * sin, second * cos + first * sin, axis=-1)
    return op.type_as(op.Concat(result, rest, axis=-1), x)


def _unknown() -> ir.SymbolicDim:
    return ir.SymbolicDim(None)
