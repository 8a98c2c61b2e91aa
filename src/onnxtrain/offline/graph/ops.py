"""Ops: what gradient rules, losses and optimizers write with.

A writer of nodes (see `writer.py`) with helpers that hide the difference between static and
symbolic dimensions: static sizes are folded into constants, the rest is computed at run time.
No rule needs to ask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import ShapeInferenceError
from onnxtrain.offline.graph.shapes import (
    Dim,
    Dims,
    constant_array,
    dims_of,
    integers,
    same_dim,
    same_dims,
    static_dims,
    working_type,
)
from onnxtrain.offline.graph.writer import Writer

# Losses are written for models of any opset, gradients and optimizers for 18 and later.
_SUM_AXES_SINCE, _MEAN_AXES_SINCE = 13, 18  # axes as an input instead of an attribute
_ALLOWZERO_SINCE = 14  # of Reshape
_SHAPE_SLICES_SINCE = 15  # start and end of Shape


class Ops(Writer):
    """A writer of nodes into a graph, and of the small patterns that rules are made of."""

    # ---- shapes --------------------------------------------------------------------------------

    def dims(self, value: ir.Value) -> Dims:
        """Return the dimensions of a value; an unknown rank is an error that names it."""
        dims = dims_of(value)
        if dims is None:
            raise ShapeInferenceError(
                f"the rank of {value.name!r} is not known, and a gradient needs it "
                f"(while writing {self.scope}). Give the value a shape in the model "
                "(value_info), or fix the shape of the inputs that it is computed from."
            )
        return dims

    def rank(self, value: ir.Value) -> int:
        """Return the number of dimensions."""
        return len(self.dims(value))

    def shape_of(self, value: ir.Value) -> ir.Value:
        """Return the shape as an int64 vector: a constant where it is static."""
        static = static_dims(value)
        if static is not None:
            return self.int64(static)
        parts = self._known_sizes(value)
        key = value if parts is None else tuple(parts)
        if key not in self._shapes:
            self._shapes[key] = self.Shape(value) if parts is None else self.dims_vector(*parts)
        return self._shapes[key]

    def _known_sizes(self, value: ir.Value) -> list[int | ir.Value] | None:
        """Return the dimensions from the inputs of the graph, if they have all of them.

        A Shape of the value itself would keep the value in memory until it is read.
        """
        parts = []
        for dim in dims_of(value) or (None,):
            size = dim if isinstance(dim, int) else self._symbol(dim)
            if size is None:
                return None
            parts.append(size)
        return parts

    def _symbol(self, dim: Dim | None) -> ir.Value | None:
        """Return a symbolic dimension as a vector of length one, if an input has it."""
        if dim is None or isinstance(dim, int) or dim.value is None:
            return None
        name = dim.value
        if name not in self._symbols:
            for value in self._root.inputs:
                dims = dims_of(value) or ()
                axis = next((a for a, d in enumerate(dims) if same_dim(d, dim)), None)
                if axis is not None:
                    self._symbols[name] = self._size(value, axis)
                    break
        return self._symbols.get(name)

    def dim(self, value: ir.Value, axis: int) -> ir.Value:
        """Return one dimension as an int64 vector of length one."""
        dims = self.dims(value)
        axis %= len(dims)
        size = dims[axis]
        if isinstance(size, int):
            return self.int64([size])
        known = self._symbol(size)
        return self._size(value, axis) if known is None else known

    def _size(self, value: ir.Value, axis: int) -> ir.Value:
        """Return one dimension, at run time, as a vector of length one."""
        if self.opset < _SHAPE_SLICES_SINCE:
            return self.Gather(self.Shape(value), [axis], axis=0)
        return self.Shape(value, start=axis, end=axis + 1)

    def dims_vector(self, *parts: int | ir.Value | Sequence[int]) -> ir.Value:
        """Concatenate numbers and int64 vectors into one shape vector, folding constants."""
        pieces = [
            p if isinstance(p, ir.Value) else self.const(np.array(p, np.int64, ndmin=1))
            for p in parts
        ]
        arrays = [constant_array(p) for p in pieces]
        if all(a is not None for a in arrays):
            return self.int64([int(i) for a in arrays if a is not None for i in a.reshape(-1)])
        pieces = [p for p, a in zip(pieces, arrays, strict=True) if a is None or a.size]
        return pieces[0] if len(pieces) == 1 else self.Concat(*pieces, axis=0)

    def count(
        self,
        value: ir.Value,
        axes: Sequence[int] | None = None,
        dtype: ir.DataType | None = None,
    ) -> ir.Value:
        """Return how many elements lie along `axes` (default: all).

        The result is of type `dtype`, or of that of `value`: float16 overflows at 65,504.
        """
        dims, dtype = self.dims(value), dtype or value.dtype
        chosen = [a % len(dims) for a in axes] if axes is not None else list(range(len(dims)))
        known = integers([dims[a] for a in chosen])
        if known is not None:
            return self.const(float(math.prod(known)), dtype)
        picked = self.Gather(self.shape_of(value), chosen, axis=0)
        return self.Cast(self.ReduceProd(picked, keepdims=0), to=dtype)

    def one_over_count(self, value: ir.Value, axes: Sequence[int]) -> ir.Value:
        """Return 1 / `count`, which fits into a half type even where the count does not."""
        count = self.count(value, axes, working_type(value))
        known = constant_array(count)
        if known is not None:
            return self.const(1.0 / float(known) if known else 0.0, value.dtype)
        return self.cast(self.Reciprocal(count), value.dtype)

    # ---- rearranging ---------------------------------------------------------------------------

    def reshape(self, value: ir.Value, shape: ir.Value | Sequence[int]) -> ir.Value:
        """Reshape to a shape vector; 0 in it means zero elements, as nowhere else in ONNX."""
        target = shape if isinstance(shape, ir.Value) else self.int64(list(shape))
        known = constant_array(target)
        zero = self.opset >= _ALLOWZERO_SINCE and (known is None or 0 in known)
        return self.Reshape(value, target, allowzero=1 if zero else None)

    def rows(self, value: ir.Value) -> ir.Value:
        """Flatten all axes but the last into rows, once for each value."""
        *lead, size = self.dims(value)
        if len(lead) == 1:
            return value
        if value not in self._rows:
            maker = value.producer()
            source = maker.inputs[0] if maker is not None and maker.op_type == "Reshape" else None
            if source is not None and same_dims((dims_of(source) or ())[1:], (size,)):
                self._rows[value] = source  # these were rows before
            else:
                self._rows[value] = self.Reshape(value, self.dims_vector(-1, self.dim(value, -1)))
        return self._rows[value]

    def reshape_like(self, value: ir.Value, like: ir.Value) -> ir.Value:
        """Reshape to the shape of another value."""
        dims = dims_of(like)
        if same_dims(dims_of(value), dims):
            return value
        if dims and 0 not in dims and sum(not isinstance(d, int) for d in dims) == 1:
            # No Shape, which would keep `like` in memory until then.
            target = self.int64([d if isinstance(d, int) else -1 for d in dims])
        else:
            target = self.shape_of(like)
        return self.shape_as(self.reshape(value, target), like)

    def expand_like(self, value: ir.Value, like: ir.Value) -> ir.Value:
        """Broadcast to the shape of another value."""
        if same_dims(dims_of(value), dims_of(like)):
            return value
        return self.shape_as(self.Expand(value, self.shape_of(like)), like)

    def full_like(self, like: ir.Value, fill: float) -> ir.Value:
        """Return a tensor of one number, with the type and shape of another value."""
        return self.expand_like(self.const(fill, like.dtype), like)

    def zeros_like(self, like: ir.Value) -> ir.Value:
        """Return zeros with the type and shape of another value."""
        return self.full_like(like, 0.0)

    def transpose(self, value: ir.Value, perm: Sequence[int]) -> ir.Value:
        """Permute the axes; the identity writes nothing."""
        return value if list(perm) == sorted(perm) else self.Transpose(value, perm=list(perm))

    def swap_last(self, value: ir.Value) -> ir.Value:
        """Transpose the last two axes."""
        axes = list(range(self.rank(value)))
        return self.Transpose(value, perm=[*axes[:-2], axes[-1], axes[-2]])

    def unsqueeze(self, value: ir.Value, axes: Sequence[int]) -> ir.Value:
        """Insert axes of size one (positions in the result)."""
        return self.Unsqueeze(value, list(axes)) if len(axes) else value

    def squeeze(self, value: ir.Value, axes: Sequence[int]) -> ir.Value:
        """Remove axes of size one."""
        return self.Squeeze(value, list(axes)) if len(axes) else value

    def slice(
        self,
        value: ir.Value,
        axis: int,
        start: int | ir.Value,
        end: int | ir.Value,
        step: int = 1,
    ) -> ir.Value:
        """Slice along one axis; bounds may be numbers or int64 vectors of length one."""
        axis %= self.rank(value)
        bounds = [b if isinstance(b, ir.Value) else self.int64([b]) for b in (start, end)]
        return self.Slice(value, *bounds, [axis], *([[step]] if step != 1 else []))

    def concat(self, values: Sequence[ir.Value], axis: int) -> ir.Value:
        """Concatenate along an axis; nothing is written for a single value."""
        return values[0] if len(values) == 1 else self.Concat(*values, axis=axis)

    def cast(self, value: ir.Value, dtype: ir.DataType | None) -> ir.Value:
        """Convert to an element type; nothing is written where it has it already."""
        return value if value.dtype == dtype else self.Cast(value, to=dtype)

    # ---- reducing ------------------------------------------------------------------------------

    def sum(self, value: ir.Value, axes: Sequence[int], keepdims: bool = False) -> ir.Value:
        """Sum over axes; summing over none changes nothing."""
        if not len(axes):
            return value
        return self._reduce("ReduceSum", value, axes, keepdims, self.opset >= _SUM_AXES_SINCE)

    def mean(self, value: ir.Value, axes: Sequence[int], keepdims: bool = True) -> ir.Value:
        """Average over axes, kept with size one by default."""
        return self._reduce("ReduceMean", value, axes, keepdims, self.opset >= _MEAN_AXES_SINCE)

    def _reduce(
        self, op_type: str, value: ir.Value, axes: Sequence[int], keepdims: bool, as_input: bool
    ) -> ir.Value:
        """Reduce along axes, which older opsets have as an attribute."""
        along = [a % self.rank(value) for a in axes]
        inputs, attribute = ([value, along], None) if as_input else ([value], along)
        return self.call(op_type, *inputs, axes=attribute, keepdims=int(keepdims))[0]

    def select(self, kept: ir.Value, dy: ir.Value, of: ir.Value) -> ir.Value:
        """Return the cotangent `dy` of the value `of` where `kept` is true, and 0 elsewhere.

        That is a product with the mask where the cotangent cannot be infinite (`nan_safety.py`).
        """
        if self.nested or of not in self.finite_cotangents:
            return self.Where(kept, dy, 0.0)
        return self.Mul(dy, self.cast(kept, dy.dtype))

    def keep_zeros(self, dx: ir.Value, dy: ir.Value) -> ir.Value:
        """Return a contribution with zero where it is NaN for a cotangent of zero.

        That is where the forward value was selected away. Only guarded nodes need it.
        """
        if not self.guarded:
            return dx
        undefined = self.And(self.IsNaN(dx), self.Equal(dy, 0.0))
        return self.shape_as(self.Where(undefined, 0.0, dx), dx)

    def without_nan(self, value: ir.Value) -> ir.Value:
        """Return a forward value with zero for NaN, in the gradient of a guarded node."""
        if not self.guarded:
            return value
        return self.shape_as(self.Where(self.IsNaN(value), 0.0, value), value)

    def finite(self, value: ir.Value) -> ir.Value:
        """Return a forward value with zero for NaN and ±∞, in the gradient of a guarded node."""
        if not self.guarded:
            return value
        return self.shape_as(self.Where(self.IsNaN(value - value), 0.0, value), value)

    def add_all(self, values: Sequence[ir.Value]) -> ir.Value:
        """Add values of one shape in a single node.

        Add runs on all threads and Sum on one, which pays only where it spares intermediate sums.
        """
        if len(values) == 1:
            return values[0]
        return self.Add(*values) if len(values) == 2 else self.Sum(*values)

    def sum_to(self, value: ir.Value, like: ir.Value) -> ir.Value:
        """Undo a broadcast: sum `value` down to the shape of `like`.

        Where the shapes say which axes were broadcast, these are summed; where a symbolic dimension
        leaves it open, they are found at run time.
        """
        source, target = dims_of(value), dims_of(like)
        if value is like or same_dims(source, target):
            return value
        if source is None or target is None:
            return self._sum_to_at_run_time(value, like, None)
        lead = len(source) - len(target)
        pairs = list(enumerate(zip(source[lead:], target, strict=True), start=lead))
        certain = [axis for axis, (s, t) in pairs if t == 1 and s != 1]
        open_ = [
            axis for axis, (s, t) in pairs
            if not isinstance(t, int) and s != 1 and not same_dim(s, t)
        ]  # fmt: skip
        if open_:
            return self._sum_to_at_run_time(value, like, lead)
        result = self.sum(value, list(range(lead)) + certain, keepdims=bool(certain))
        return self.reshape_like(result, like) if certain and lead else self.shape_as(result, like)

    def _sum_to_at_run_time(self, value: ir.Value, like: ir.Value, lead: int | None) -> ir.Value:
        """Find the axes to sum at run time; `lead` is by how much the ranks differ, if known."""
        small, large = self.shape_of(like), self.shape_of(value)
        if lead is None:
            difference = self.Sub(self.Shape(large), self.Shape(small))
            small = self.Concat(self.Expand(self.int64([1]), difference), small, axis=0)
        elif lead:
            small = self.Concat([1] * lead, small, axis=0)
        differs = self.Not(self.Equal(small, large))
        axes = self.Squeeze(self.NonZero(differs), [0])
        summed = self.ReduceSum(value, axes, keepdims=1, noop_with_empty_axes=1)
        return self.shape_as(self.Reshape(summed, self.shape_of(like), allowzero=1), like)
