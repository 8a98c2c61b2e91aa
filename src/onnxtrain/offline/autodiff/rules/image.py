"""Rules for operators that rearrange the pixels of images."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import Cotangents, required, rule
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import constant_array, working_type
from onnxtrain.offline.graph.sizes import arange, entry

# ---- between depth and space -------------------------------------------------------------------


@rule("DepthToSpace")
def depth_to_space(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """The blocks of dy, [N, C, H, b, W, b], go back into the depth."""
    (x,) = required(node)
    block = node.attributes.get_int("blocksize", 1)
    height, width = op.dim(x, 2), op.dim(x, 3)
    shape = op.dims_vector(op.dim(dy, 0), op.dim(dy, 1), height, block, width, block)
    depth_last = node.attributes.get_string("mode", "DCR") == "CRD"
    perm = [0, 1, 3, 5, 2, 4] if depth_last else [0, 3, 5, 1, 2, 4]
    return (op.reshape_like(op.Transpose(op.reshape(dy, shape), perm=perm), x),)


@rule("SpaceToDepth")
def space_to_depth(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """The depth of dy, [b, b, C] or [C, b, b], goes back into blocks."""
    (x,) = required(node)
    block = node.attributes.get_int("blocksize", 1)
    batch, depth, space = op.dim(x, 0), op.dim(x, 1), (op.dim(dy, 2), op.dim(dy, 3))
    if node.attributes.get_string("mode", "DCR") == "CRD":
        shape, perm = op.dims_vector(batch, depth, block, block, *space), [0, 1, 4, 2, 5, 3]
    else:
        shape, perm = op.dims_vector(batch, block, block, depth, *space), [0, 3, 4, 1, 5, 2]
    return (op.reshape_like(op.Transpose(op.reshape(dy, shape), perm=perm), x),)


# ---- windows -----------------------------------------------------------------------------------


@rule("Col2Im", stops=(1, 2))
def col2im(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """Each column was added at its window, so its cotangent is what dy has in that window."""
    x, _, block = required(node, 3)
    rank = op.rank(dy) - 2
    ones = [1] * rank
    dilations = node.attributes.get_ints("dilations", ones)
    strides = node.attributes.get_ints("strides", ones)
    pads = list(node.attributes.get_ints("pads", [0] * 2 * rank))
    windows = dy
    if any(pads):
        windows = op.Pad(dy, [0, 0, *pads[:rank], 0, 0, *pads[rank:]])
    for i in reversed(range(rank)):
        width, around = entry(op, block, i), pads[i] + pads[rank + i]
        places = _window_places(op, op.dim(dy, 2 + i), width, around, strides[i], dilations[i])
        windows = op.Gather(windows, places, axis=2 + i)
    # Now [N, C, k₁, l₁, k₂, l₂ …]: the offsets within a window belong to the channels.
    offsets, starts = range(2, 2 + 2 * rank, 2), range(3, 3 + 2 * rank, 2)
    return (op.reshape_like(op.transpose(windows, [0, 1, *offsets, *starts]), x),)


def _window_places(
    op: Ops, size: ir.Value, width: ir.Value, around: int, stride: int, dilation: int
) -> ir.Value:
    """Return [offset, window]: the places of the elements of all windows along a padded axis."""
    known = [constant_array(v) for v in (size, width)]
    if known[0] is not None and known[1] is not None:
        length, k = int(known[0][0]) + around, int(known[1][0])
        first = np.arange(0, length - dilation * (k - 1), stride, dtype=np.int64)
        return op.const((np.arange(k, dtype=np.int64) * dilation)[:, None] + first)
    end = op.Squeeze(size + around - (width - 1) * dilation)
    starts = op.Range(op.int64(0), end, op.int64(stride))
    offsets = arange(op, width) * dilation
    return op.Add(op.Unsqueeze(offsets, [1]), op.Unsqueeze(starts, [0]))


# ---- grids and windows around the centre -------------------------------------------------------


@rule("AffineGrid", since=20, stops=(1,))
def affine_grid(op: Ops, node: ir.Node, dgrid: ir.Value) -> Cotangents:
    """grid = θ (p, 1) for every point p of the regular grid, so dθ = Σ dgrid (p, 1)ᵀ.

    The regular grid is what the operator makes of the identity.
    """
    theta, size = required(node, 2)
    rank = op.rank(dgrid) - 2
    # In single precision at least: for less, onnxruntime falls back on a definition that fails for
    # a batch of one.
    identity = np.eye(rank, rank + 1, dtype=working_type(theta).numpy())
    known = constant_array(size)
    rest = op.slice(size, 0, 1, rank + 2) if known is None else op.int64(known[1:].tolist())
    regular = op.AffineGrid(
        op.const(identity[None]), op.dims_vector(1, rest),
        align_corners=node.attributes.get_int("align_corners", 0),
    )  # fmt: skip
    points = op.cast(op.Reshape(regular, [-1, rank]), theta.dtype)
    columns = op.Transpose(op.Reshape(dgrid, [0, -1, rank]), perm=[0, 2, 1])
    shift = op.ReduceSum(columns, [2], keepdims=1)
    return (op.type_as(op.Concat(op.MatMul(columns, points), shift, axis=2), theta),)


@rule("CenterCropPad", stops=(1,))
def center_crop_pad(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """What was cropped is padded and what was padded is cropped, with the same rounding."""
    (x,) = required(node)
    rank = op.rank(x)
    axes = [a % rank for a in node.attributes.get_ints("axes", range(rank))]
    shape = op.dims_vector(*[op.dim(x, a) for a in axes])
    return op.call("CenterCropPad", dy, shape, like=x, axes=axes)
