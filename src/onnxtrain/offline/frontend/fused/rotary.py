"""Rotary position embeddings."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.offline.autodiff.definitions import NotExpandable
from onnxtrain.offline.autodiff.heads import rotate
from onnxtrain.offline.frontend.fused.domain import fused
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import UNKNOWN
from onnxtrain.offline.graph.sizes import arange


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
