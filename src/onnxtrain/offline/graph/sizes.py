"""Sizes along axes: numbers where they are known, computed at run time where they are not.

A `Size` is a number, or an int64 vector of length one; Python's arithmetic works on both alike.
What is written with sizes needs no second form for symbolic dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import UNKNOWN, Dim, constant_array

Size = int | ir.Value


def sizes(op: Ops, value: ir.Value) -> list[Size]:
    """Return the sizes of all axes."""
    return [d if isinstance(d, int) else op.dim(value, i) for i, d in enumerate(op.dims(value))]


def spatial_sizes(op: Ops, value: ir.Value) -> list[Size]:
    """Return the sizes of all axes after batch and channel."""
    return sizes(op, value)[2:]


def float_size(op: Ops, value: ir.Value, axis: int, dtype: ir.DataType | None) -> ir.Value:
    """Return the size of one axis as a scalar of a floating type."""
    size = op.dims(value)[axis]
    if isinstance(size, int):
        return op.const(float(size), dtype)
    return op.Cast(op.Squeeze(op.dim(value, axis), [0]), to=dtype)


def entry(op: Ops, vector: ir.Value, index: int) -> ir.Value:
    """Return one number of a vector as a vector of length one; integers as int64."""
    known = constant_array(vector)
    if known is not None:
        number = known.reshape(-1)[index]
        return op.const(np.array([number], np.int64 if known.dtype.kind == "i" else known.dtype))
    found = op.slice(vector, 0, index, index + 1)
    return op.cast(found, ir.DataType.INT64) if vector.dtype == ir.DataType.INT32 else found


def divide(op: Ops, size: Size, by: int) -> Size:
    """Divide a size that is not negative, rounding down."""
    return size // by if isinstance(size, int) else op.Div(size, by)


def at_least_zero(op: Ops, size: Size) -> Size:
    """Return the size, or zero where it is negative."""
    return max(size, 0) if isinstance(size, int) else op.Max(size, 0)


def product(*factors: Size) -> Size:
    """Multiply sizes."""
    total: Size = 1
    for factor in factors:
        total = factor if isinstance(total, int) and total == 1 else total * factor
    return total


def dim_of(size: Size) -> Dim:
    """Return a size as a dimension of a shape."""
    return size if isinstance(size, int) else UNKNOWN


def reshape(op: Ops, value: ir.Value, shape: Sequence[Size]) -> ir.Value:
    """Reshape to sizes; a single unknown size is left to the runtime (-1)."""
    dims = [dim_of(size) for size in shape]
    unknown = [i for i, size in enumerate(shape) if not isinstance(size, int)]
    if len(unknown) == 1 and 0 not in shape:
        numbers = [size if isinstance(size, int) else -1 for size in shape]
        return op.with_dims(op.reshape(value, numbers), dims)
    return op.with_dims(op.reshape(value, op.dims_vector(*shape)), dims)


def arange(op: Ops, count: Size) -> ir.Value:
    """Return the int64 vector 0, 1 … count - 1."""
    end = count if isinstance(count, ir.Value) else op.int64([count])
    numbers = op.Range(op.int64(0), op.Squeeze(end, [0]), op.int64(1))
    # Neither a constant, which would make the file grow, nor of a stated length: onnx takes vectors
    # of known length for shapes, whatever is done to them, and objects to arithmetic with these.
    return op.with_dims(numbers, [UNKNOWN])


def arange_of(op: Ops, value: ir.Value, axis: int) -> ir.Value:
    """Return 0, 1, and so on, as many as an axis is long; a symbolic length keeps its name."""
    length = op.dims(value)[axis]
    if isinstance(length, int):
        return arange(op, length)
    return op.with_dims(arange(op, op.dim(value, axis)), [length])


def zeros_at_run_time(
    op: Ops, shape: Sequence[Size], dtype: ir.DataType | None, indices: ir.Value
) -> ir.Value:
    """Return zeros to scatter to, made when `indices` say where.

    onnxruntime would fold an expanded constant into a tensor that lives as long as the session, and
    copy it before each write. An empty slice of the indices, padded to the shape, is made anew in
    each run, in half the time of an Expand.
    """
    nothing = op.Cast(op.Slice(op.Reshape(indices, [-1]), [0], [0], [0]), to=dtype)
    zeros = op.Pad(nothing, op.dims_vector(0, product(*shape)))
    return reshape(op, zeros, shape) if len(shape) != 1 else op.with_dims(zeros, [dim_of(shape[0])])
