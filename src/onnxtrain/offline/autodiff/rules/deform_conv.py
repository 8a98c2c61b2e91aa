"""The rule for DeformConv.

Each tap of each window reads the input at a position of its own, displaced by an offset, and
between pixels by bilinear interpolation:

    column[c, t, o] = mask[t, o] * sum over the four pixels around of weight * x[c, pixel]
    y[k, o] = sum over c, t of w[k, c, t] * column[c, t, o] + b[k]

Samples are kept as a matrix of one row per (image, offset group, tap, window) and one column per
channel, so that a pixel is read, and its gradient added, as a whole row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import Cotangents, optional, required, rule
from onnxtrain.offline.autodiff.rules.scatter_helpers import add_along
from onnxtrain.offline.autodiff.window import Window, conv_window, flat_channels
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import working_type
from onnxtrain.offline.graph.sizes import (
    Size,
    arange,
    divide,
    product,
    reshape,
    sizes,
    zeros_at_run_time,
)


@rule("DeformConv", notes="in two dimensions; offsets as the limit from above at whole pixels")
def deform_conv(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """The chain rule through interpolation and product, with the samples computed again."""
    x, w, offset = required(node, 3)
    bias, mask = optional(node, 3), optional(node, 4)
    groups = node.attributes.get_int("group", 1)
    samples = Samples(
        op, conv_window(op, node, x, w), x, offset, node.attributes.get_int("offset_group", 1), dy
    )
    read, slope_y, slope_x = samples.read()
    factor = None if mask is None else samples.rows(mask)

    products = flat_channels(op, dy, groups)
    matrix = _per_group(op, w, groups)
    column_shape = [*sizes(op, products)[:-2], sizes(op, matrix)[-1], sizes(op, products)[-1]]
    dcolumns = op.MatMul(op.swap_last(matrix), products)
    dscaled = samples.from_columns(dcolumns)
    dread = dscaled if factor is None else op.Mul(dscaled, factor)

    columns = samples.to_columns(read if factor is None else op.Mul(read, factor), column_shape)
    dw = op.reshape_like(op.sum(op.MatMul(products, op.swap_last(columns)), [0]), w)
    doffset = samples.offset_gradient(
        op.sum(op.Mul(dread, slope_y), [1], keepdims=True),
        op.sum(op.Mul(dread, slope_x), [1], keepdims=True),
    )
    db = None if bias is None else op.sum(dy, [0, 2, 3])
    dmask = None if mask is None else op.reshape_like(op.sum(op.Mul(dscaled, read), [1]), mask)
    return samples.input_gradient(dread), dw, doffset, db, dmask


def _per_group(op: Ops, w: ir.Value, groups: int) -> ir.Value:
    rows, *rest = sizes(op, w)
    apart = [rows] if groups == 1 else [groups, divide(op, rows, groups)]
    return reshape(op, w, [*apart, product(*rest)])


@dataclass(frozen=True)
class Corner:
    """One of the four pixels around each position: its row in the input, and its share."""

    row: ir.Value
    inside: ir.Value  # 1 in the input, 0 in the padding
    share_y: ir.Value
    share_x: ir.Value
    sign_y: float  # whether the share grows or shrinks with the position
    sign_x: float


class Samples:
    """Where a DeformConv reads its input, and what the way there and back looks like."""

    def __init__(
        self, op: Ops, window: Window, x: ir.Value, offset: ir.Value, groups: int, dy: ir.Value
    ) -> None:
        self._op, self._x, self._offset = op, x, offset
        self._batch, channels, self._height, self._width = sizes(op, x)
        self._area = self._height * self._width
        self._groups, self._channels = groups, divide(op, channels, groups)
        self._taps = int(np.prod(window.kernel))
        self._counts = sizes(op, dy)[2:]
        self._windows = product(*self._counts)
        self._count = product(self._batch, groups * self._taps, *self._counts)
        self._corners = self._find_corners(window)

    def read(self) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Return the samples, and how they change with the vertical and horizontal position."""
        op = self._op
        apart = reshape(op, self._x, [self._batch, self._groups, self._channels, self._area])
        shape = [product(self._batch, self._groups, self._area), self._channels]
        pixels = reshape(op, op.Transpose(apart, perm=[0, 1, 3, 2]), shape)
        values, slopes_y, slopes_x = [], [], []
        for corner in self._corners:
            pixel = op.Mul(op.Gather(pixels, op.squeeze(corner.row, [1]), axis=0), corner.inside)
            values.append(op.Mul(pixel, op.Mul(corner.share_y, corner.share_x)))
            slopes_y.append(op.Mul(pixel, op.Mul(corner.share_x, corner.sign_y)))
            slopes_x.append(op.Mul(pixel, op.Mul(corner.share_y, corner.sign_x)))
        return op.add_all(values), op.add_all(slopes_y), op.add_all(slopes_x)

    def input_gradient(self, dread: ir.Value) -> ir.Value:
        """Add the gradient of every sample to the pixels that it was made of."""
        op = self._op
        shape = [product(self._batch, self._groups, self._area), self._channels]
        rows, updates = [], []
        for corner in self._corners:
            share = op.Mul(op.Mul(corner.share_y, corner.share_x), corner.inside)
            rows.append(corner.row)
            updates.append(op.Mul(dread, share))
        zeros = zeros_at_run_time(op, shape, working_type(self._x), rows[0])
        places = op.Concat(*rows, axis=0)
        added = add_along(op, op.Concat(*updates, axis=0), zeros, 0, places)
        apart = reshape(op, added, [self._batch, self._groups, self._area, self._channels])
        return op.reshape_like(op.Transpose(apart, perm=[0, 1, 3, 2]), self._x)

    def offset_gradient(self, dy: ir.Value, dx: ir.Value) -> ir.Value:
        """Put vertical and horizontal gradients, one number per sample, in the offset's order."""
        op = self._op
        shape = [self._batch, self._groups, self._taps, 1, self._windows]
        pair = op.Concat(reshape(op, dy, shape), reshape(op, dx, shape), axis=3)
        return op.reshape_like(pair, self._offset)

    def rows(self, value: ir.Value) -> ir.Value:
        """Return one number per sample as a matrix of one column."""
        return reshape(self._op, value, [self._count, 1])

    def to_columns(self, samples: ir.Value, shape: list[Size]) -> ir.Value:
        """Rearrange samples from one row each to [N, C, taps, windows], then reshape."""
        op = self._op
        by_window = [self._batch, self._groups, self._taps, self._windows, self._channels]
        apart = reshape(op, samples, by_window)
        return reshape(op, op.Transpose(apart, perm=[0, 1, 4, 2, 3]), shape)

    def from_columns(self, columns: ir.Value) -> ir.Value:
        """Undo `to_columns`."""
        op = self._op
        by_channel = [self._batch, self._groups, self._channels, self._taps, self._windows]
        apart = reshape(op, columns, by_channel)
        return reshape(op, op.Transpose(apart, perm=[0, 1, 3, 4, 2]), [self._count, self._channels])

    def _find_corners(self, window: Window) -> list[Corner]:
        op = self._op
        shape = [self._batch, self._groups, self._taps, 2, *self._counts]
        offsets = reshape(op, self._offset, shape)
        floors, parts = [], []
        for axis in range(2):
            displaced = op.squeeze(op.slice(offsets, 3, axis, axis + 1), [3])
            position = op.Add(displaced, self._regular(window, axis))
            floors.append(op.Floor(position))
            parts.append(op.Sub(position, floors[-1]))
        image = arange(op, product(self._batch, self._groups)) * self._area
        first = reshape(op, image, [self._batch, self._groups, 1, 1, 1])
        return [self._corner(floors, parts, first, (a, b)) for a in (0, 1) for b in (0, 1)]

    def _corner(
        self,
        floors: list[ir.Value],
        parts: list[ir.Value],
        first: ir.Value,
        step: tuple[int, int],
    ) -> Corner:
        op = self._op
        indices, inside, shares = [], [], []
        for axis, size in enumerate((self._height, self._width)):
            index = op.Cast(floors[axis], to=ir.DataType.INT64) + step[axis]
            clipped = op.Max(op.Min(index, size - 1), 0)
            indices.append(clipped)
            inside.append(op.Equal(index, clipped))
            part = parts[axis]
            shares.append(self.rows(part if step[axis] else op.Sub(1.0, part)))
        row = indices[0] * self._width + indices[1] + first
        within = op.Cast(op.And(*inside), to=self._x.dtype)
        return Corner(
            reshape(op, row, [self._count, 1]), self.rows(within), shares[0], shares[1],
            *(1.0 if s else -1.0 for s in step),
        )  # fmt: skip

    def _regular(self, window: Window, axis: int) -> ir.Value:
        """Return the position of each tap and window without offset: [taps, 1, …] by broadcast."""
        op = self._op
        assert self._x.dtype is not None
        tap = np.indices(window.kernel)[axis].reshape(-1, 1, 1) * window.dilations[axis]
        starts = arange(op, self._counts[axis]) * window.strides[axis]
        along = [self._counts[axis], 1] if axis == 0 else [1, self._counts[axis]]
        position = reshape(op, starts, [1, *along]) - window.before[axis]
        return op.Cast(op.Add(position, op.const(tap.astype(np.int64))), to=self._x.dtype)
