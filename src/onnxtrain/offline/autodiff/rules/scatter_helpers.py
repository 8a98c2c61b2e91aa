"""Putting elements back where they were picked from: what the rules on picking have in common.

Two traps of onnxruntime's CPU kernels (seen in 1.31) decide what is written here:

- ScatterND with a reduction splits its updates over threads without a lock, so updates that fall
  on one element get lost. ScatterElements adds them up one after the other. Only the latter is
  used to add; ScatterND writes nothing but values for which the order does not matter.
- Pad with its `axes` input next to a Transpose is rewritten as if all axes were padded: it fails,
  or pads the wrong axes. Pads are always given for all axes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import UNKNOWN, constant_array, static_dims, working_type
from onnxtrain.offline.graph.sizes import Size, arange, zeros_at_run_time


def element_count(op: Ops, value: ir.Value) -> ir.Value:
    """Return the number of elements as an int64 vector of length one."""
    known = static_dims(value)
    if known is not None:
        return op.int64([int(np.prod(known, dtype=np.int64))])
    return op.Reshape(op.Size(value), [1])


def positions(op: Ops, x: ir.Value) -> ir.Value:
    """Number the elements of x: int64, in the shape of x.

    An operator that picks elements, applied to this, tells which ones it picked.
    """
    return row_numbers(op, x, op.rank(x))


def row_numbers(op: Ops, x: ir.Value, lead: int) -> ir.Value:
    """Number the slices that the first `lead` axes of x tell apart."""
    shape = op.dims_vector(*(op.dim(x, axis) for axis in range(lead)))
    # Range, not a constant: the file would grow by twice the size of x.
    count = op.ReduceProd(shape, keepdims=0)
    numbers = op.reshape(op.Range(op.int64(0), count, op.int64(1)), shape)
    return op.with_dims(numbers, op.dims(x)[:lead])


def as_rows(op: Ops, value: ir.Value, x: ir.Value, lead: int) -> ir.Value:
    """See a value as a matrix; a row has the elements of x behind its first `lead` axes."""
    row = op.dims(x)[lead:]
    numbers = [size for size in row if isinstance(size, int)]
    if len(numbers) == len(row):
        return op.Reshape(value, [-1, int(np.prod(numbers, dtype=np.int64))])
    width = op.ReduceProd(op.Shape(x, start=lead), keepdims=1)
    return op.with_dims(op.Reshape(value, op.dims_vector(-1, width)), [UNKNOWN, UNKNOWN])


def pad(op: Ops, value: ir.Value, widths: Mapping[int, tuple[Size, Size]]) -> ir.Value:
    """Pad axes with zeros: `widths` gives (before, after) by axis; a negative width crops."""
    dims = op.dims(value)
    nothing: tuple[Size, Size] = (0, 0)
    sides = [[widths.get(axis, nothing)[side] for axis in range(len(dims))] for side in (0, 1)]
    pads = op.dims_vector(*sides[0], *sides[1])
    known = constant_array(pads)
    if known is None:
        result = op.Pad(value, pads)
        return op.with_dims(result, [UNKNOWN if a in widths else d for a, d in enumerate(dims)])
    if not known.any():
        return value
    before, after = known.reshape(2, -1)
    if np.all(known <= 0):  # Slice is faster than Pad where there is nothing to fill in
        axes = [a for a in range(len(dims)) if before[a] or after[a]]
        ends = [int(after[a]) if after[a] else int(np.iinfo(np.int64).max) for a in axes]
        return op.Slice(value, [int(-before[a]) for a in axes], ends, axes)
    grown = [d + int(b + a) if isinstance(d, int) else UNKNOWN if b + a else d
             for d, b, a in zip(dims, before, after, strict=True)]  # fmt: skip
    return op.with_dims(op.Pad(value, pads), grown)


def spread(
    op: Ops,
    dy: ir.Value,
    axis: int,
    size: ir.Value,
    places: ir.Value | npt.NDArray[np.int64],
) -> ir.Value:
    """Put slice i of dy at places[i] of an axis that is `size` long, zeros elsewhere.

    The places are all different and not negative. Seen from the result, every slice is either one
    of dy or zero, so this is a Gather from dy with a zero slice appended.
    """
    rank = op.rank(dy)
    length = constant_array(size)
    if isinstance(places, np.ndarray):
        first, count = int(places[:1].sum()), places.size
        if np.array_equal(places, np.arange(first, first + count)):
            rest = first + count
            after = op.Sub(size, rest) if length is None else int(length[0]) - rest
            return pad(op, dy, {axis: (first, after)})
    if isinstance(places, np.ndarray) and length is not None:
        source = np.full(int(length[0]), count, dtype=np.int64)
        source[places] = np.arange(count)
        inverse, complete = op.const(source), source.size == count
    else:
        taken = op.const(places) if isinstance(places, np.ndarray) else places
        number = op.dim(dy, axis)
        nowhere = op.with_dims(op.Expand(number, size), [UNKNOWN])
        inverse = op.ScatterElements(nowhere, taken, arange(op, number), axis=0)
        complete = False
    padded = dy if complete else pad(op, dy, {axis: (0, 1)})
    if axis != rank - 1 or rank == 1:
        return op.Gather(padded, inverse, axis=axis)
    # Gather copies single elements along the last axis: five times slower than two transposes.
    front = op.Transpose(padded, perm=[axis, *range(axis)])
    picked = op.Gather(front, inverse, axis=0)
    return op.Transpose(picked, perm=[*range(1, rank), 0])


def scatter(
    op: Ops,
    onto: ir.Value,
    indices: ir.Value | None,
    updates: ir.Value,
    axis: int,
    reduction: str = "add",
) -> ir.Value:
    """ScatterElements with a reduction.

    Half precision is computed in single: there are no kernels for it, and long sums would suffer.
    """
    wide = working_type(updates)
    operands = (op.cast(onto, wide), indices, op.cast(updates, wide))
    return op.cast(op.ScatterElements(*operands, axis=axis, reduction=reduction), updates.dtype)


def add_along(op: Ops, dy: ir.Value, onto: ir.Value, axis: int, places: ir.Value) -> ir.Value:
    """Add slice i of dy to slice places[i] of another tensor; places may repeat."""
    column = op.reshape(places, [-1 if a == axis else 1 for a in range(op.rank(onto))])
    return scatter(op, onto, op.Expand(column, op.shape_of(dy)), dy, axis)


def add_elements(
    op: Ops, dy: ir.Value, x: ir.Value, places: ir.Value, repeated: bool = True
) -> ir.Value:
    """Add each element of dy to the element of zeros like x that `places` numbers."""
    numbers, flat = (op.Reshape(v, [-1]) for v in (places, dy))
    dtype = working_type(x) if repeated else x.dtype
    zeros = zeros_at_run_time(op, [element_count(op, x)], dtype, places)
    if repeated:
        return op.reshape_like(scatter(op, zeros, numbers, flat, 0), x)
    return op.reshape_like(op.ScatterElements(zeros, numbers, flat, axis=0), x)
