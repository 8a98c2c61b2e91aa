"""The gradient of Resize with respect to its region of interest (tf_crop_and_resize).

Along each axis, output i is read at the coordinate c_i = start (L - 1) + i step, which the region
gives. The interpolation weights are functions of it: they are written out here, and differentiated
as any graph is.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.errors import NotDifferentiableError
from onnxtrain.offline.autodiff.engine import current_path, pull_back
from onnxtrain.offline.autodiff.registry import optional, required
from onnxtrain.offline.graph.names import label_of
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import working_type
from onnxtrain.offline.graph.sizes import arange, entry, float_size


def region_cotangent(op: Ops, node: ir.Node, axes: Sequence[int], dy: ir.Value) -> ir.Value | None:
    """Return the cotangent of the region, or None where none is needed, or it is zero.

    The nearest pixel does not change with a small step of the region.
    """
    mode = node.attributes.get_string("mode", "nearest")
    crops = node.attributes.get_string("coordinate_transformation_mode") == "tf_crop_and_resize"
    (image,), region = required(node), optional(node, 1)
    if region is None or region not in current_path().depends or not crops or mode == "nearest":
        return None
    if node.attributes.get_int("antialias", 0):
        raise NotDifferentiableError(
            f"Resize (node {label_of(node)!r}) is not differentiable with respect to its region: "
            "with antialias, the number of pixels that a result is made of jumps with it"
        )
    x, dy, roi = (op.cast(v, working_type(image)) for v in (image, dy, region))

    def resized() -> ir.Value:
        result = x
        for place, axis in enumerate(axes):
            start, end = entry(op, roi, place), entry(op, roi, place + len(axes))
            weights = _weights(op, node, _coordinates(op, x, dy, axis, start, end), x, axis)
            result = _along(op, result, weights, axis)
        return result

    (droi,) = pull_back(op, resized, dy, [roi])
    return None if droi is None else op.cast(op.type_as(droi, roi), region.dtype)


def _coordinates(
    op: Ops, x: ir.Value, dy: ir.Value, axis: int, start: ir.Value, end: ir.Value
) -> ir.Value:
    """Return where in x each output along an axis is read; a single one is read in the middle."""
    last = float_size(op, x, axis, x.dtype) - 1.0
    steps = float_size(op, dy, axis, x.dtype) - 1.0
    number = op.Cast(arange(op, op.dim(dy, axis)), to=x.dtype)
    share = op.Where(op.Greater(steps, 0.0), number / op.Max(steps, 1.0), 0.5)
    return op.Mul(start + share * (end - start), last)


def _weights(op: Ops, node: ir.Node, place: ir.Value, x: ir.Value, axis: int) -> ir.Value:
    """Return [output, input]: the weights of pixels, zero for a place outside of the image."""
    last = float_size(op, x, axis, x.dtype) - 1.0
    pixels = op.Cast(arange(op, op.dim(x, axis)), to=x.dtype)
    column = op.unsqueeze(place, [1])
    inside = op.And(op.GreaterOrEqual(column, 0.0), op.LessOrEqual(column, last))
    if node.attributes.get_string("mode") == "linear":
        return op.Where(inside, op.Relu(1.0 - op.Abs(column - pixels)), 0.0)
    exclude = node.attributes.get_int("exclude_outside", 0)
    below, parts = op.Floor(column), []
    for offset in (-1.0, 0.0, 1.0, 2.0):
        tap = below + offset
        weight = _cubic(op, node, op.Abs(column - tap))
        nearest = op.Min(op.Max(tap, 0.0), last)
        if exclude:
            weight = op.Where(op.Equal(tap, nearest), weight, 0.0)
        parts.append(op.Where(op.Equal(pixels, nearest), weight, 0.0))
    total = op.add_all(parts)
    if exclude:
        total = total / op.sum(total, [1], keepdims=True)
    return op.Where(inside, total, 0.0)


def _cubic(op: Ops, node: ir.Node, distance: ir.Value) -> ir.Value:
    """Return the cubic convolution kernel of a distance below 2."""
    a = node.attributes.get_float("cubic_coeff_a", -0.75)
    near = (distance * (a + 2.0) - (a + 3.0)) * distance * distance + 1.0
    far = ((distance * a - 5.0 * a) * distance + 8.0 * a) * distance - 4.0 * a
    return op.Where(op.LessOrEqual(distance, 1.0), near, far)


def _along(op: Ops, x: ir.Value, weights: ir.Value, axis: int) -> ir.Value:
    """Multiply one axis with a matrix [output, input]."""
    perm = list(range(op.rank(x)))
    perm[axis], perm[-1] = perm[-1], perm[axis]
    product = op.MatMul(op.transpose(x, perm), op.swap_last(weights))
    return op.transpose(product, perm)
