"""Rules for operators that pick elements."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import Cotangents, required, rule
from onnxtrain.offline.autodiff.rules.scatter_helpers import (
    add_along,
    add_elements,
    as_rows,
    element_count,
    pad,
    positions,
    row_numbers,
    scatter,
    spread,
)
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import (
    UNKNOWN,
    Dim,
    constant_array,
    dims_of,
    static_dims,
    working_type,
)
from onnxtrain.offline.graph.sizes import arange, sizes, zeros_at_run_time
from onnxtrain.offline.graph.torch_calls import padding_row
from onnxtrain.offline.graph.writer import attributes_of

# ---- by index ----------------------------------------------------------------------------------


@rule("Gather")
def gather(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """The slices of the cotangent, added up where they were taken from."""
    x, indices = required(node, 2)
    axis = node.attributes.get_int("axis", 0) % op.rank(x)
    if (row := padding_row(node)) is not None:
        dy = op.Where(op.unsqueeze(op.Equal(indices, row), [-1]), 0.0, dy)
    places = _different_places(indices, op.dims(x)[axis])
    if axis or places is not None or _static_size(indices) == 1:
        return (_gathered(op, x, indices, axis, dy, places),)

    def write() -> list[ir.Value]:
        return [_gathered(op, x, indices, axis, dy, None)]

    return op.kernel("EmbeddingGrad", [indices, dy, op.shape_of(x)], write)


def _static_size(value: ir.Value) -> int | None:
    """Return the number of elements, where it is known."""
    known = static_dims(value)
    return None if known is None else math.prod(known)


def _gathered(
    op: Ops,
    x: ir.Value,
    indices: ir.Value,
    axis: int,
    dy: ir.Value,
    places: npt.NDArray[np.int64] | None,
) -> ir.Value:
    """Return the cotangent of x; `places` are the indices, if they are known and all different."""
    size, count = op.dim(x, axis), element_count(op, indices)
    slices = dy  # as they are if the indices are a vector; other forms are seen as one
    if dims_of(indices) == ():
        slices = op.unsqueeze(dy, [axis])
    elif dims_of(indices) is None or op.rank(indices) > 1:
        others = [op.dim(x, a) for a in range(op.rank(x))]
        slices = op.reshape(dy, op.dims_vector(*others[:axis], count, *others[axis + 1 :]))
        if slices.shape is None:
            dims, known = list(op.dims(x)), constant_array(count)
            dims[axis] = UNKNOWN if known is None else int(known[0])
            op.with_dims(slices, dims)
    if places is not None:
        return op.type_as(spread(op, slices, axis, size, places), x)
    if op.dims(slices)[axis] == 1:
        index = op.cast(op.reshape(indices, [1]), ir.DataType.INT64)
        before = op.Where(op.Less(index, 0), op.Add(index, size), index)
        after = op.Sub(op.Sub(size, before), 1)
        return op.type_as(pad(op, slices, {axis: (before, after)}), x)
    # Embedding tables. ScatterND on whole rows takes half the time, but loses updates of repeated
    # indices (see scatter_helpers.py). A one-hot MatMul is faster on tables of up to a few hundred
    # rows, but spreads one infinite number over all of them.
    zeros = zeros_at_run_time(op, sizes(op, x), working_type(x), indices)
    return op.shape_as(add_along(op, slices, zeros, axis, indices), x)


def _different_places(indices: ir.Value, size: Dim) -> npt.NDArray[np.int64] | None:
    """Return the indices, none of them negative, if they are known and no two are equal."""
    known, length = constant_array(indices), size if isinstance(size, int) else None
    if known is None or (length is None and np.any(known < 0)):
        return None
    places: npt.NDArray[np.int64] = known.reshape(-1).astype(np.int64)
    if length is not None:
        places = np.where(places < 0, places + length, places)
    return places if np.unique(places).size == places.size else None


@rule("GatherElements")
def gather_elements(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """The elements of the cotangent, added up where they were taken from."""
    x, indices = required(node, 2)
    axis = node.attributes.get_int("axis", 0)
    return (scatter(op, op.zeros_like(x), indices, dy, axis),)


@rule("GatherND")
def gather_nd(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """The slices of the cotangent, added up where they were taken from.

    x is seen as a matrix whose rows are the slices that the indices can name. The same GatherND,
    applied to the numbers of the rows, tells which ones were taken.
    """
    x, indices = required(node, 2)
    batch_dims = node.attributes.get_int("batch_dims", 0)
    depth = (dims_of(indices) or (UNKNOWN,))[-1]
    if not isinstance(depth, int):
        places = op.GatherND(positions(op, x), indices, batch_dims=batch_dims)
        return (add_elements(op, dy, x, places),)
    numbers = row_numbers(op, x, batch_dims + depth)
    taken = op.Reshape(op.GatherND(numbers, indices, batch_dims=batch_dims), [-1])
    table = as_rows(op, op.zeros_like(x), x, batch_dims + depth)
    rows = as_rows(op, dy, x, batch_dims + depth)
    return (op.reshape_like(add_along(op, rows, table, 0, taken), x),)


# ---- by value ----------------------------------------------------------------------------------


@rule("TopK", notes="ties as the operator breaks them")
def top_k(
    op: Ops, node: ir.Node, dvalues: ir.Value, dindices: ir.Value | None = None
) -> Cotangents:
    """The cotangent of the values, where the indices say that they came from."""
    (x,) = required(node)
    axis = node.attributes.get_int("axis", -1)
    return (op.ScatterElements(op.zeros_like(x), node.outputs[1], dvalues, axis=axis),)


@rule("Unique", notes="of equal elements the first one gets the gradient")
def unique(op: Ops, node: ir.Node, dy: ir.Value, *rest: ir.Value | None) -> Cotangents:
    """The cotangent of each value, at its first occurrence."""
    (x,) = required(node)
    if len(node.outputs) > 1 and node.outputs[1].name:
        first = node.outputs[1]
    else:
        _, first = op.call("Unique", x, outputs=2, **attributes_of(node))
        first.dtype = ir.DataType.INT64
    return (_put_back(op, dy, x, node.attributes.get_int("axis"), first),)


@rule("Compress")
def compress(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """The cotangent, with zeros where the condition did not hold."""
    x, condition = required(node, 2)
    axis = node.attributes.get_int("axis")
    numbers = positions(op, x) if axis is None else arange(op, op.dim(x, axis))
    kept = op.Compress(numbers, condition, axis=None if axis is None else 0)
    return (_put_back(op, dy, x, axis, kept),)


def _put_back(op: Ops, dy: ir.Value, x: ir.Value, axis: int | None, places: ir.Value) -> ir.Value:
    """Put slices back along an axis, or elements of the flattened x; the places all differ."""
    if axis is not None:
        axis %= op.rank(x)
        return op.type_as(spread(op, dy, axis, op.dim(x, axis), places), x)
    zeros = zeros_at_run_time(op, [element_count(op, x)], x.dtype, places)
    return op.reshape_like(op.ScatterElements(zeros, places, dy, axis=0), x)


@rule("OneHot", stops=(0, 1))
def one_hot(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """The cotangents of the hot elements add up to that of the on value, the others to off."""
    indices, depth, values = required(node, 3)
    zero_one = op.const(np.array([0, 1], dtype=values.dtype.numpy()))  # type: ignore[union-attr]
    ones = op.OneHot(indices, depth, zero_one, **attributes_of(node))
    hot = op.Cast(op.type_as(ones, dy), to=ir.DataType.BOOL)
    masked = (op.Where(hot, 0.0, dy), op.Where(hot, dy, 0.0))
    sums = [op.Reshape(op.ReduceSum(each, keepdims=0), [1]) for each in masked]
    return None, None, op.reshape_like(op.Concat(*sums, axis=0), values)
