"""The parts that attention is made of, with heads as an axis: (batch, heads, length, size)."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import UNKNOWN, dims_of, same_dim
from onnxtrain.offline.graph.sizes import arange


def split_heads(op: Ops, x: ir.Value, heads: int) -> ir.Value:
    """(batch, length, heads · size) to (batch, heads, length, size)."""
    return op.transpose(op.Reshape(x, [0, 0, heads, -1]), [0, 2, 1, 3])


def join_heads(op: Ops, x: ir.Value) -> ir.Value:
    """(batch, heads, length, size) to (batch, length, heads · size)."""
    return op.Reshape(op.transpose(x, [0, 2, 1, 3]), [0, 0, -1])


def scale_of(op: Ops, node: ir.Node, q: ir.Value) -> ir.Value:
    """Return the factor of the scores: the attribute, or one over the root of the head size."""
    given = node.attributes.get_float("scale", 0.0)
    if given:
        return op.const(given, q.dtype)
    size = (dims_of(q) or (UNKNOWN,))[-1]
    if isinstance(size, int):
        return op.const(1.0 / math.sqrt(size), q.dtype)
    return op.Reciprocal(op.Sqrt(op.Cast(op.Shape(q, start=3, end=4), to=q.dtype)))


def scores(op: Ops, node: ir.Node, q: ir.Value, k: ir.Value) -> ir.Value:
    """Return scale q kᵀ. A head of keys may serve a group of heads of queries.

    The queries of one group are further rows of the product, so that keys need not be repeated;
    the smaller factor is scaled, not the product.
    """
    product = op.MatMul(_rows(op, q * scale_of(op, node, q), k), op.transpose(k, [0, 1, 3, 2]))
    return _heads_of(op, product, q, k)


def mix(op: Ops, probabilities: ir.Value, v: ir.Value) -> ir.Value:
    """Return the values, mixed by the probabilities of each query."""
    product = op.MatMul(_rows(op, probabilities, v), v)
    return _heads_of(op, product, probabilities, v)


def _rows(op: Ops, x: ir.Value, k: ir.Value) -> ir.Value:
    """(batch, heads, length, n) to (batch, heads of k, group · length, n)."""
    if _as_many_heads(x, k):
        return x
    shape = op.dims_vector(0, op.dim(k, 1), -1, op.dim(x, 3))
    return op.with_dims(op.Reshape(x, shape), (*op.dims(k)[:2], UNKNOWN, op.dims(x)[3]))


def _heads_of(op: Ops, rows: ir.Value, x: ir.Value, k: ir.Value) -> ir.Value:
    """(batch, heads of k, group · length, n) to (batch, heads of x, length, n)."""
    if _as_many_heads(x, k):
        return rows
    shape = op.dims_vector(0, op.dim(x, 1), op.dim(x, 2), -1)
    return op.with_dims(op.Reshape(rows, shape), (*op.dims(x)[:3], op.dims(rows)[3]))


def _as_many_heads(x: ir.Value, k: ir.Value) -> bool:
    a, b = dims_of(x), dims_of(k)
    return a is None or b is None or same_dim(a[1], b[1])


def positions(op: Ops, x: ir.Value, as_column: bool = False) -> ir.Value:
    """Return 0, 1, 2 … along the length of queries or keys, as a row or as a column."""
    length = (dims_of(x) or (UNKNOWN,) * 4)[2]
    if as_column and isinstance(length, int):
        # onnx takes an unsqueezed vector for a shape, and objects to arithmetic with it.
        return op.const(np.arange(length, dtype=np.int64).reshape(-1, 1))
    numbers = arange(op, length if isinstance(length, int) else op.Shape(x, start=2, end=3))
    return op.unsqueeze(numbers, [1]) if as_column else numbers


def rotate(op: Ops, x: ir.Value, cos: ir.Value, sin: ir.Value, interleaved: bool) -> ir.Value:
    """Rotate the first numbers of the last axis, as many as there are angles; keep the rest.

    The pairs are (first half, second half), or neighbours where they are interleaved.
    """
    size, angles = ((dims_of(v) or (UNKNOWN,))[-1] for v in (x, cos))
    known = isinstance(size, int) and isinstance(angles, int)
    if known and not interleaved and size == 2 * angles:
        return _rotate_halves(op, x, cos, sin)
    half = op.dim(cos, -1)
    turned = op.Add(half, half)
    front = op.slice(x, -1, 0, turned)
    rest = op.slice(x, -1, turned, 2**62)
    if interleaved:
        even, odd = op.slice(front, -1, 0, 2**62, 2), op.slice(front, -1, 1, 2**62, 2)
        pair = [even * cos - odd * sin, odd * cos + even * sin]
        stacked = op.Concat(*[op.Unsqueeze(p, [-1]) for p in pair], axis=-1)
        result = op.Reshape(stacked, op.Shape(front))
    elif known:
        op.with_dims(front, (*op.dims(x)[:-1], 2 * angles))
        result = _rotate_halves(op, front, cos, sin)
    else:
        first, second = op.slice(front, -1, 0, half), op.slice(front, -1, half, turned)
        result = op.Concat(first * cos - second * sin, second * cos + first * sin, axis=-1)
    return op.type_as(op.Concat(result, rest, axis=-1), x)


def _rotate_halves(op: Ops, x: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
    """Return x (cos, cos) + swap(x) (-sin, sin), where swap exchanges the halves of the last axis.

    The wide tables are the same for all layers, which share them (`merge_equal_nodes`).
    """
    cosines = op.Concat(cos, cos, axis=-1)
    sines = op.Concat(op.Neg(sin), sin, axis=-1)
    swapped = op.type_as(op.Concat(*reversed(halves(op, x)), axis=-1), x)
    return op.type_as(op.Add(op.Mul(x, cosines), op.Mul(swapped, sines)), x)


def halves(op: Ops, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Split the last axis, whose size is known, in the middle."""
    *lead, size = op.dims(x)
    assert isinstance(size, int)
    first, second = op.call("Split", x, outputs=2, axis=-1, num_outputs=2)
    for part in (first, second):
        part.type = x.type
        op.with_dims(part, [*lead, size // 2])
    return first, second
