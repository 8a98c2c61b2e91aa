"""The rule for sampling an image at given points.

A sample is a weighted sum of a few pixels around its point, its *taps*: along each axis one for
nearest, two for linear, four for cubic interpolation. The gradient of the image adds the weights
times dy to the taps; the gradient of the points needs the derivatives of the weights, and what the
taps are worth: their pixels times dy, summed over channels.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import reduce

import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import Cotangents, required, rule
from onnxtrain.offline.autodiff.rules.scatter_helpers import scatter
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import working_type
from onnxtrain.offline.graph.sizes import float_size

_CUBIC = -0.75  # the coefficient that ONNX fixes for cubic sampling


@dataclass(frozen=True)
class _Tap:
    """One of the pixels along one axis that a sample is made of, for each point."""

    place: ir.Value  # int64, inside the image
    weight: ir.Value | None  # None for one
    slope: ir.Value | None  # the derivative of the weight by the coordinate; None for zero


@rule("GridSample", notes="the derivative by the grid at pixel centres and borders is torch's")
def grid_sample(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """y = Σ w(grid) x[taps], so dx[taps] += w dy and dgrid = Σ w'(grid) ⟨x[taps], dy⟩."""
    given_x, given_grid = required(node, 2)
    # Half types cannot tell the pixels of a large image apart.
    x, grid, dy = (op.cast(v, working_type(v)) for v in (given_x, given_grid, dy))
    rank = op.rank(x) - 2
    sampler = _Sampler(op, node, grid)
    points = op.Reshape(grid, [0, -1, rank])
    axes = [
        # The grid names the axes from last to first.
        sampler.taps(op.squeeze(op.Slice(points, [c], [c + 1], [2]), [2]), x, 2 + rank - 1 - c)
        for c in reversed(range(rank))
    ]
    image = op.Reshape(x, [0, 0, -1])
    flat_dy = op.Reshape(dy, [0, 0, -1])
    everywhere = op.Shape(flat_dy)
    dimage = op.Expand(op.const(0.0, x.dtype), op.Shape(image))
    dpoints: list[list[ir.Value]] = [[] for _ in axes]
    for taps in itertools.product(*axes):
        places = op.Expand(op.Unsqueeze(_flat_place(op, x, taps), [1]), everywhere)
        weight = _product(op, [tap.weight for tap in taps])
        share = flat_dy
        if weight is not None:
            share = flat_dy * op.Unsqueeze(op.cast(weight, x.dtype), [1])
        dimage = scatter(op, dimage, places, share, axis=2)
        if sampler.mode == "nearest":
            continue
        pixels = op.GatherElements(image, places, axis=2)
        worth = op.cast(op.ReduceSum(pixels * flat_dy, [1], keepdims=0), grid.dtype)
        for axis, tap in enumerate(taps):
            others = [t.weight for i, t in enumerate(taps) if i != axis]
            factor = _product(op, [tap.slope, *others])
            assert factor is not None
            dpoints[axis].append(worth * factor)
    dx = op.cast(op.reshape_like(dimage, x), given_x.dtype)
    if sampler.mode == "nearest":
        return dx, op.zeros_like(given_grid)
    columns = [
        op.Unsqueeze(op.add_all(parts) * sampler.pixels_per_unit(x, 2 + axis), [2])
        for axis, parts in enumerate(dpoints)
    ]
    dgrid = op.reshape_like(op.Concat(*reversed(columns), axis=2), grid)
    return dx, op.cast(dgrid, given_grid.dtype)


def _product(op: Ops, factors: list[ir.Value | None]) -> ir.Value | None:
    present = [factor for factor in factors if factor is not None]
    return reduce(op.Mul, present) if present else None


def _flat_place(op: Ops, x: ir.Value, taps: tuple[_Tap, ...]) -> ir.Value:
    """Number the pixels of the image row by row."""
    flat = taps[0].place
    for axis, tap in enumerate(taps[1:], start=1):
        flat = op.Add(op.Mul(flat, op.dim(x, 2 + axis)), tap.place)
    return flat


class _Sampler:
    """What a GridSample node does along one axis."""

    def __init__(self, op: Ops, node: ir.Node, grid: ir.Value) -> None:
        mode = node.attributes.get_string("mode", "linear")
        self.op = op
        self.dtype = grid.dtype
        # The names before opset 20 spoke of two dimensions.
        self.mode = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
        self.padding = node.attributes.get_string("padding_mode", "zeros")
        self.align_corners = bool(node.attributes.get_int("align_corners", 0))

    def taps(self, normalized: ir.Value, x: ir.Value, axis: int) -> list[_Tap]:
        """Return the taps of one axis for coordinates in [-1, 1]."""
        last = self._size(x, axis) - 1.0
        coordinate = self._pixel_coordinate(normalized, x, axis)
        if self.mode == "nearest":
            return [self._tap(self._padded(self.op.Round(coordinate), last), last, None, None)]
        if self.mode == "cubic":
            return self._cubic_taps(coordinate, last)
        return self._linear_taps(coordinate, last)

    def pixels_per_unit(self, x: ir.Value, axis: int) -> ir.Value:
        """Return the derivative of the pixel coordinate by the normalized one."""
        size = self._size(x, axis)
        return self.op.Mul(size - 1.0 if self.align_corners else size, 0.5)

    def _size(self, x: ir.Value, axis: int) -> ir.Value:
        return float_size(self.op, x, axis, self.dtype)

    def _pixel_coordinate(self, normalized: ir.Value, x: ir.Value, axis: int) -> ir.Value:
        size, shifted = self._size(x, axis), normalized + 1.0
        if self.align_corners:
            return self.op.Mul(shifted * 0.5, size - 1.0)
        return self.op.Mul(shifted * size - 1.0, 0.5)

    # ---- weights -------------------------------------------------------------------------------

    def _linear_taps(self, coordinate: ir.Value, last: ir.Value) -> list[_Tap]:
        op = self.op
        slope = op.const(1.0, self.dtype)
        if self.padding != "zeros":
            if self.padding == "reflection":
                coordinate, slope = self._reflected(coordinate, last)
            inside = op.And(op.Greater(coordinate, 0.0), op.Less(coordinate, last))
            slope = op.Where(inside, slope, 0.0)
            coordinate = op.Min(op.Max(coordinate, 0.0), last)
        below = op.Floor(coordinate)
        weight = coordinate - below
        return [
            self._tap(below, last, 1.0 - weight, -slope),
            self._tap(below + 1.0, last, weight, slope),
        ]

    def _cubic_taps(self, coordinate: ir.Value, last: ir.Value) -> list[_Tap]:
        op, a = self.op, _CUBIC
        below = op.Floor(coordinate)
        t = coordinate - below

        def far(u: ir.Value) -> tuple[ir.Value, ir.Value]:
            weight = ((u - 5.0) * u + 8.0) * u - 4.0
            return weight * a, ((u * 3.0 - 10.0) * u + 8.0) * a

        def near(u: ir.Value) -> tuple[ir.Value, ir.Value]:
            weight = (u * (a + 2.0) - (a + 3.0)) * u * u + 1.0
            return weight, (u * (3.0 * (a + 2.0)) - 2.0 * (a + 3.0)) * u

        parts = [far(t + 1.0), near(t), near(1.0 - t), far(2.0 - t)]
        signs = [1.0, 1.0, -1.0, -1.0]  # the last two are functions of -t
        return [
            self._tap(self._padded(below + (i - 1.0), last), last, weight, slope * sign)
            for i, ((weight, slope), sign) in enumerate(zip(parts, signs, strict=True))
        ]

    # ---- borders -------------------------------------------------------------------------------

    def _tap(
        self, place: ir.Value, last: ir.Value, weight: ir.Value | None, slope: ir.Value | None
    ) -> _Tap:
        """Make a tap; where it falls outside the image it counts for nothing."""
        op = self.op
        inside = op.Min(op.Max(place, 0.0), last)
        if self.padding == "zeros":
            exists = op.Equal(place, inside)
            weight = op.Where(exists, 1.0 if weight is None else weight, op.const(0.0, self.dtype))
            slope = None if slope is None else op.Where(exists, slope, 0.0)
        return _Tap(op.Cast(inside, to=ir.DataType.INT64), weight, slope)

    def _padded(self, place: ir.Value, last: ir.Value) -> ir.Value:
        """Return the pixel that stands for one outside; the border itself is seen to later."""
        return self._reflected(place, last)[0] if self.padding == "reflection" else place

    def _reflected(self, coordinate: ir.Value, last: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Mirror at the outermost pixels, or their outer edges, until it is inside; its slope."""
        op = self.op
        low = 0.0 if self.align_corners else -0.5
        span = op.Max(last - 2.0 * low, 1.0)  # one pixel has no extent: anything will do
        distance = op.Abs(coordinate - low)
        phase = op.Mod(distance, span * 2.0, fmod=1)
        back = phase - span  # negative on the way up, positive on the way back
        slope = op.Where(op.Less(back, 0.0), 1.0, op.const(-1.0, self.dtype))
        forward = op.Where(op.Less(coordinate, low), -slope, slope)
        return span - op.Abs(back) + low, forward
