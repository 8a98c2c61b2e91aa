"""The rule for pooling regions of interest out of an image.

RoiAlign divides every region into bins, samples each bin at the points of a small grid by linear
interpolation, and takes the average or the maximum. The grid is a product of one set of points for
the rows and one for the columns, and so are the weights of the interpolation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.autodiff.engine import current_path, pull_back
from onnxtrain.offline.autodiff.registry import Cotangents, required, rule
from onnxtrain.offline.autodiff.rules.scatter_helpers import scatter
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import working_type
from onnxtrain.offline.graph.sizes import arange, float_size


@rule("RoiAlign", stops=(2,), notes="to image and regions; in mode max ties share equally")
def roi_align(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """The gradient goes back to the pixels that were averaged, or to those that won.

    To the regions it goes through the weights of the pixels: they are computed once more.
    """
    image, regions, batch = required(node, 3)
    x, rois, dy = (op.cast(v, working_type(v)) for v in (image, regions, dy))
    average = node.attributes.get_string("mode", "avg") == "avg"

    def samples() -> tuple[_Samples, _Samples]:
        return _sample(op, node, x, rois, axis=2), _sample(op, node, x, rois, axis=3)

    def pooled() -> ir.Value:
        return (_averages if average else _maxima)(op, x, batch, *samples())

    dx = op.type_as((_average if average else _maximum)(op, x, batch, *samples(), dy), x)
    drois = None
    if regions in current_path().depends:
        (found,) = pull_back(op, pooled, dy, [rois])
        drois = None if found is None else op.cast(found, regions.dtype)
    return op.cast(dx, image.dtype), drois


@dataclass(frozen=True)
class _Samples:
    """Where the bins of each region are sampled along one axis.

    All are [region, bin, sample]. Regions have as many samples as the largest one needs; `exists`
    tells which are real, or is None where all are.
    """

    coordinate: ir.Value  # inside the image
    inside: ir.Value  # whether it was: more than a pixel outside counts as zero
    exists: ir.Value | None
    count: ir.Value  # samples of a bin, at least one


def _sample(op: Ops, node: ir.Node, x: ir.Value, rois: ir.Value, axis: int) -> _Samples:
    attributes = node.attributes
    bins = attributes.get_int("output_height" if axis == 2 else "output_width", 1)
    scale = attributes.get_float("spatial_scale", 1.0)
    half_pixel = attributes.get_string("coordinate_transformation_mode", "half_pixel")
    offset = 0.5 if half_pixel == "half_pixel" else 0.0
    first = 3 - axis  # a region is x₁ y₁ x₂ y₂

    def corner(column: int) -> ir.Value:
        value = op.unsqueeze(op.Slice(rois, [column], [column + 1], [1]), [2])
        return op.Sub(op.Mul(value, scale), offset)

    start = corner(first)
    extent = op.Sub(corner(first + 2), start)
    if not offset:
        extent = op.Max(extent, 1.0)
    width = op.Div(extent, float(bins))
    number = op.cast(op.const(np.arange(bins).reshape(1, -1, 1)), x.dtype)
    ratio = attributes.get_int("sampling_ratio", 0)
    exists = None
    if ratio > 0:
        steps = op.cast(op.const(np.arange(ratio).reshape(1, 1, -1)), x.dtype)
        count = op.Reshape(op.const(float(ratio), x.dtype), [1, 1, 1])
    else:
        needed, one = op.Ceil(width), op.const(np.ones(1, working_type(x).numpy()))
        most = op.ReduceMax(op.Concat(op.Reshape(needed, [-1]), one, axis=0), keepdims=0)
        steps = arange(op, op.Reshape(op.Cast(most, to=ir.DataType.INT64), [1]))
        steps = op.Cast(op.Unsqueeze(steps, [0, 1]), to=x.dtype)
        exists = op.Less(steps, needed)
        count = op.Max(needed, 1.0)
    point = start + number * width + (steps + 0.5) * width / count
    size = float_size(op, x, axis, x.dtype)
    inside = op.And(op.GreaterOrEqual(point, -1.0), op.LessOrEqual(point, size))
    return _Samples(op.Min(op.Max(point, 0.0), size - 1.0), inside, exists, count)


# ---- average -----------------------------------------------------------------------------------


def _average(
    op: Ops, x: ir.Value, batch: ir.Value, rows: _Samples, columns: _Samples, dy: ir.Value
) -> ir.Value:
    """y = A x Bᵀ for each region, so dx = Σ Aᵀ dy B over the regions of an image.

    The sum over regions is the inner dimension of one matrix product, so that no image is built for
    each region.
    """
    a, b = _mean_weights(op, x, rows, axis=2), _mean_weights(op, x, columns, axis=3)
    batch_size, channels, height, width = (op.dim(x, i) for i in range(4))
    regions_and_bins = op.Mul(op.dim(dy, 0), op.dim(dy, 2))
    across = op.MatMul(dy, op.Unsqueeze(b, [1]))  # [R, C, bin, W]
    across = op.Transpose(across, perm=[0, 2, 1, 3])
    across = op.reshape(across, op.dims_vector(regions_and_bins, op.Mul(channels, width)))
    down = op.Unsqueeze(op.Transpose(a, perm=[2, 0, 1]), [0])  # [1, H, R, bin]
    if op.dims(x)[0] != 1:
        mine = op.Equal(op.Unsqueeze(arange(op, batch_size), [1]), op.Unsqueeze(batch, [0]))
        down = down * op.Cast(op.Unsqueeze(mine, [1, 3]), to=x.dtype)
    down = op.reshape(down, op.dims_vector(op.Mul(batch_size, height), regions_and_bins))
    image = op.MatMul(down, across)
    image = op.reshape(image, op.dims_vector(batch_size, height, channels, width))
    return op.Transpose(image, perm=[0, 2, 1, 3])


def _averages(op: Ops, x: ir.Value, batch: ir.Value, rows: _Samples, columns: _Samples) -> ir.Value:
    """Return y = A x Bᵀ for each region."""
    a, b = _mean_weights(op, x, rows, axis=2), _mean_weights(op, x, columns, axis=3)
    images = op.Gather(x, batch, axis=0)  # [R, C, H, W]
    down = op.MatMul(op.Unsqueeze(a, [1]), images)
    return op.MatMul(down, op.Unsqueeze(op.Transpose(b, perm=[0, 2, 1]), [1]))


def _mean_weights(op: Ops, x: ir.Value, samples: _Samples, axis: int) -> ir.Value:
    """Return [region, bin, pixel]: the weights of pixels, averaged over the samples of a bin."""
    pixels = op.Cast(arange(op, op.dim(x, axis)), to=x.dtype)
    distance = op.Abs(op.Unsqueeze(samples.coordinate, [3]) - pixels)
    counts = samples.inside
    if samples.exists is not None:
        counts = op.And(counts, samples.exists)
    weights = op.Where(op.Unsqueeze(counts, [3]), op.Relu(1.0 - distance), 0.0)
    return op.ReduceSum(op.Div(weights, op.Unsqueeze(samples.count, [3])), [2], keepdims=0)


# ---- maximum -----------------------------------------------------------------------------------


def _maximum(
    op: Ops, x: ir.Value, batch: ir.Value, rows: _Samples, columns: _Samples, dy: ir.Value
) -> ir.Value:
    """y is the largest of all weight · pixel, before the four of a sample are added up.

    That is how the operator is implemented everywhere, if not what one would expect.
    """
    value, place, weight, exists = _candidates(op, x, batch, rows, columns)
    won = op.Equal(value, op.ReduceMax(value, [3, 4], keepdims=1))
    if exists is not None:
        won = op.And(won, exists)
    winners = op.ReduceSum(op.Cast(won, to=x.dtype), [3, 4], keepdims=1)
    share = op.Unsqueeze(op.Transpose(dy, perm=[0, 2, 3, 1]), [3, 4]) / op.Max(winners, 1.0)
    update = op.Where(won, share * weight, 0.0)
    count = op.Reshape(op.Size(place), [1])
    update = op.reshape(update, op.dims_vector(count, op.dim(x, 1)))
    places = op.Expand(op.reshape(place, op.dims_vector(count, 1)), op.Shape(update))
    batch_size, channels, height, width = (op.dim(x, i) for i in range(4))
    pixels = op.Mul(op.Mul(batch_size, height), width)
    zeros = op.Expand(op.const(0.0, x.dtype), op.dims_vector(pixels, channels))
    dimage = scatter(op, zeros, places, update, axis=0)
    shape = op.dims_vector(batch_size, height, width, channels)
    return op.Transpose(op.reshape(dimage, shape), perm=[0, 3, 1, 2])


def _maxima(op: Ops, x: ir.Value, batch: ir.Value, rows: _Samples, columns: _Samples) -> ir.Value:
    """Return the largest candidate of each bin."""
    value, *_ = _candidates(op, x, batch, rows, columns)
    return op.Transpose(op.ReduceMax(value, [3, 4], keepdims=0), perm=[0, 3, 1, 2])


def _candidates(
    op: Ops, x: ir.Value, batch: ir.Value, rows: _Samples, columns: _Samples
) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value | None]:
    """Return each weight · pixel, the place of the pixel, the weight, and which are real.

    All have the axes [region, bin, bin, sample, sample], and one for the channels.
    """
    row, row_weight, row_exists = _corners(op, x, rows, 2, [2, 4])
    column, column_weight, column_exists = _corners(op, x, columns, 3, [1, 3])
    height, width = op.dim(x, 2), op.dim(x, 3)
    image = op.Reshape(batch, [-1, 1, 1, 1, 1])
    place = op.Add(op.Mul(op.Add(op.Mul(image, height), row), width), column)
    weight = op.Unsqueeze(op.Mul(row_weight, column_weight), [5])
    size = op.Mul(op.Mul(op.dim(x, 0), height), width)
    flat = op.dims_vector(size, op.dim(x, 1))
    channels_last = op.Transpose(x, perm=[0, 2, 3, 1])
    value = op.Gather(op.reshape(channels_last, flat), place, axis=0) * weight
    exists = None
    if row_exists is not None and column_exists is not None:
        exists = op.Unsqueeze(op.And(row_exists, column_exists), [5])
        value = op.Where(exists, value, float("-inf"))
    return value, place, weight, exists


def _corners(
    op: Ops, x: ir.Value, samples: _Samples, axis: int, ones: list[int]
) -> tuple[ir.Value, ir.Value, ir.Value | None]:
    """Return the two pixels beside each sample, their weights, and whether the sample is real."""
    below = op.Floor(samples.coordinate)
    above = op.Min(below + 1.0, float_size(op, x, axis, x.dtype) - 1.0)
    weight = samples.coordinate - below
    places = op.Cast(op.Concat(below, above, axis=2), to=ir.DataType.INT64)
    pairs = op.Concat(1.0 - weight, weight, axis=2)
    weights = op.Where(op.Concat(samples.inside, samples.inside, axis=2), pairs, 0.0)
    exists = samples.exists
    if exists is not None:
        exists = op.Unsqueeze(op.Concat(exists, exists, axis=2), ones)
    return op.Unsqueeze(places, ones), op.Unsqueeze(weights, ones), exists
