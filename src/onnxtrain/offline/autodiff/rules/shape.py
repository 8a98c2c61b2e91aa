"""Rules for operators that only rearrange elements."""

from __future__ import annotations

import itertools

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import Cotangents, required, rule
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import constant_array
from onnxtrain.offline.graph.sizes import entry
from onnxtrain.offline.graph.writer import attributes_of

# ---- one input, the same elements --------------------------------------------------------------


@rule("Reshape", "Flatten", "Squeeze", "Unsqueeze")
def reshape(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """The elements keep their order: the cotangent takes the old shape back."""
    (x,) = required(node)
    return (op.reshape_like(dy, x),)


@rule("Transpose")
def transpose(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """The inverse permutation; without `perm` the axes are reversed, which is its own inverse."""
    perm = node.attributes.get_ints("perm")
    if perm is None:
        return (op.Transpose(dy),)
    return (op.transpose(dy, [perm.index(axis) for axis in range(len(perm))]),)


@rule("ReverseSequence")
def reverse_sequence(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """Reversing the same stretches again undoes it."""
    return (op.ReverseSequence(dy, node.inputs[1], **attributes_of(node)),)


@rule("Trilu")
def trilu(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """The cotangent of the triangle that was kept."""
    return (op.Trilu(dy, *node.inputs[1:], **attributes_of(node)),)


# ---- several inputs or outputs -----------------------------------------------------------------


@rule("Concat")
def concat(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """Each input has its part of the cotangent."""
    parts = required(node, len(node.inputs))
    if len(parts) == 1:
        return (dy,)
    axis = node.attributes.get_int("axis", 0) % op.rank(parts[0])
    sizes = [op.dims(x)[axis] for x in parts]
    lengths = [size for size in sizes if isinstance(size, int)]
    if len(lengths) == len(sizes):
        # Slices are as fast as Split, and the ones that nobody needs are swept.
        bounds = itertools.pairwise(np.cumsum([0, *lengths]).tolist())
        pieces = [op.slice(dy, axis, start, end) for start, end in bounds]
    else:
        split = op.dims_vector(*(op.dim(x, axis) for x in parts))
        pieces = list(op.call("Split", dy, split, outputs=len(parts), axis=axis))
    return [op.type_as(piece, x) for piece, x in zip(pieces, parts, strict=True)]


@rule("Split")
def split(op: Ops, node: ir.Node, *dys: ir.Value | None) -> Cotangents:
    """The cotangents of the parts, joined; a part that does not matter counts as zero."""
    (x,) = required(node)
    pieces = []
    for dy, part in zip(dys, node.outputs, strict=True):
        if dy is None and not part.name:  # unnamed because nobody used it: its size is needed now
            part.name = op.names.fresh(f"{op.scope}/part")
        pieces.append(op.expand_like(op.const(0.0, x.dtype), part) if dy is None else dy)
    if len(pieces) == 1:
        return pieces
    return (op.type_as(op.Concat(*pieces, axis=node.attributes.get_int("axis", 0)), x),)


# ---- repetition --------------------------------------------------------------------------------


@rule("Expand", broadcasts=True)
def expand(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """The sum over the copies."""
    return (dy,)


@rule("Tile")
def tile(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """The sum over the copies: each axis is seen as (repeats, size), and the first is summed."""
    x, repeats = required(node, 2)
    known = constant_array(repeats)
    shape: list[ir.Value] = []
    copies: list[int] = []
    for axis in range(op.rank(x)):
        if known is None or known[axis] != 1:
            copies.append(len(shape))
            shape.append(entry(op, repeats, axis))
        shape.append(op.dim(x, axis))
    if not copies:
        return (dy,)
    apart = op.reshape(dy, op.dims_vector(*shape))
    return (op.type_as(op.ReduceSum(apart, copies, keepdims=0), x),)
