"""Rules for resizing images.

Resize is linear and separable: along each axis, y = R x with a matrix R of interpolation weights,
so the gradient is a product with the transpose of R, axis by axis. R depends on mode, coordinate
transformation, rounding and borders. None of that is repeated here: R is what the same operator
makes of the unit vectors, so it agrees with the runtime to the last bit. With static sizes the
runtime computes it once, when it loads the model.

Enlarging by whole numbers, which is most of what networks do, has shorter forms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import Cotangents, optional, required, rule
from onnxtrain.offline.autodiff.rules.resize_region import region_cotangent
from onnxtrain.offline.autodiff.rules.scatter_helpers import add_along
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import Dim, constant_array, dims_of, same_dim, working_type
from onnxtrain.offline.graph.sizes import arange, entry
from onnxtrain.offline.graph.writer import attributes_of

_HALF_PIXEL = ("half_pixel", "pytorch_half_pixel", "half_pixel_symmetric")
# From this length on adding at computed places is cheaper than a product with a matrix. Measured
# on 256 sequences, 512 to 1024 and 64 × (4096 to 6000): 0.5 instead of 2.6, 1.2 instead of 43 ms.
_LONG = 1024


@rule("Resize", stops=(2, 3), notes="all modes; to roi, where tf_crop_and_resize reads it")
def resize(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """y = (R₁ ⊗ R₂ ⊗ …) x, so dx = (R₁ᵀ ⊗ R₂ᵀ ⊗ …) dy."""
    plan = _Resampling(op, node)
    (dx,) = _pixels(op, plan, dy)
    return dx, region_cotangent(op, node, plan.axes, dy)


def _pixels(op: Ops, plan: _Resampling, dy: ir.Value) -> Cotangents:
    factors = plan.whole_factors(dy)
    if factors is not None:
        if all(f == 1 for f in factors):
            return (dy,)
        if plan.repeats_blocks():
            return (op.type_as(_sum_blocks(op, plan.x, dy, factors), plan.x),)
        if plan.draws_lines() and _has_channels(op, plan.x, factors, known=True):
            return (op.type_as(_filter(op, plan.x, dy, factors), plan.x),)
    dx = dy
    for axis in reversed(plan.axes):  # the last axis first: it is one large product
        dx = plan.undo(dx, axis)
    return (dx if dx is dy else op.type_as(dx, plan.x),)


class _Resampling:
    """What a Resize node does along each of its axes."""

    def __init__(self, op: Ops, node: ir.Node) -> None:
        (x,) = required(node)
        roi, scales, sizes = [_given(node, i) for i in (1, 2, 3)]
        self.op, self.x = op, x
        # Of another type than what is resized here, onnxruntime would misread it.
        self.roi = None if roi is None else op.cast(roi, working_type(x))
        self.scales, self.sizes = scales, sizes
        attributes = attributes_of(node)
        rank = op.rank(x)
        self.axes = [a % rank for a in attributes.get("axes", range(rank))]
        self.mode: str = attributes.get("mode", "nearest")
        self.coordinates: str = attributes.get("coordinate_transformation_mode", "half_pixel")
        self.nearest: str = attributes.get("nearest_mode", "round_prefer_floor")
        self.policy: str = attributes.get("keep_aspect_ratio_policy", "stretch")
        self.antialias = bool(attributes.get("antialias", 0))
        self.crops = self.coordinates == "tf_crop_and_resize"
        if sizes is None:
            self.policy = "stretch"  # the policy speaks of sizes only
        dropped = ("axes", "keep_aspect_ratio_policy", "extrapolation_value")
        # What lies outside the image is a constant and has no gradient: extrapolate with 0.
        self.options: dict[str, Any] = {k: v for k, v in attributes.items() if k not in dropped}

    # ---- enlarging by whole numbers ------------------------------------------------------------

    def whole_factors(self, dy: ir.Value) -> list[int] | None:
        """Return the factor of every axis of x where all are known whole numbers, or None."""
        if self.crops or self.policy != "stretch":
            return None
        factors = [1] * self.op.rank(self.x)
        scales = constant_array(self.scales)
        for position, axis in enumerate(self.axes):
            before, after = self.op.dims(self.x)[axis], self.op.dims(dy)[axis]
            if scales is not None:
                scale = float(scales.reshape(-1)[position])
            elif self.sizes is not None and same_dim(before, after):
                scale = 1.0
            elif self.sizes is not None and isinstance(before, int) and isinstance(after, int):
                scale = after / before if before else 0.0
            else:
                return None
            if scale < 1 or scale != int(scale):
                return None
            factors[axis] = int(scale)
        return factors

    def repeats_blocks(self) -> bool:
        """Tell whether enlarging by k repeats each element k times."""
        rounds = self.nearest.startswith("round")
        return self.mode == "nearest" and (
            (self.coordinates == "asymmetric" and self.nearest == "floor")
            or (self.coordinates in _HALF_PIXEL and rounds)
        )

    def draws_lines(self) -> bool:
        """Tell whether enlarging interpolates between the centres of pixels."""
        return self.mode == "linear" and self.coordinates in _HALF_PIXEL and not self.antialias

    # ---- any size ------------------------------------------------------------------------------

    def undo(self, dy: ir.Value, axis: int) -> ir.Value:
        """Multiply with the transposed matrix of one axis; find out at run time if it has one."""
        same = self._unchanged(dy, axis)
        if same is True:
            return dy
        if same is False:
            return self._transposed_product(dy, axis)
        op = self.op
        then = op.body([], lambda: [dy], "same_size")
        other = op.body([], lambda: [self._transposed_product(dy, axis)], "resized")
        (dx,) = op.call("If", op.Squeeze(same), like=dy, then_branch=then, else_branch=other)
        return op.with_dims(dx, self._dims_before(dy, axis))

    def _unchanged(self, dy: ir.Value, axis: int) -> bool | ir.Value:
        """Tell whether the matrix of an axis is the identity, or write how to find out."""
        op, before, after = self.op, self.op.dims(self.x)[axis], self.op.dims(dy)[axis]
        if self.policy != "stretch":
            return False
        if self.crops and not self._whole_range(axis):
            return False
        if self.scales is not None:
            scale = self._entry(self.scales, axis)
            known = constant_array(scale)
            return op.Equal(scale, 1.0) if known is None else bool(known.item() == 1.0)
        if same_dim(before, after):
            return True
        if isinstance(before, int) and isinstance(after, int):
            return False
        return op.Equal(op.dim(self.x, axis), op.dim(dy, axis))

    def _whole_range(self, axis: int) -> bool:
        roi = constant_array(self.roi)
        return roi is not None and [*roi.reshape(2, -1)[:, self.axes.index(axis)]] == [0, 1]

    def _transposed_product(self, dy: ir.Value, axis: int) -> ir.Value:
        if self._is_long(axis):
            return self._scatter(dy, axis)
        op, last = self.op, self.op.rank(dy) - 1
        dims = self._dims_before(dy, axis)
        if axis == last:
            product = op.MatMul(dy, self._matrix(dy, axis, transposed=True))
        elif axis == last - 1:
            product = op.MatMul(self._matrix(dy, axis), dy)
        else:
            rows = op.Reshape(dy, [*[0] * (axis + 1), -1])
            product = op.MatMul(self._matrix(dy, axis), rows)
            shape = [op.dim(self.x if i == axis else dy, i) for i in range(last + 1)]
            product = op.reshape(product, op.dims_vector(*shape))
        return op.with_dims(product, dims)

    def _dims_before(self, dy: ir.Value, axis: int) -> list[Dim]:
        dims = list(self.op.dims(dy))
        dims[axis] = self.op.dims(self.x)[axis]
        return dims

    def _entry(self, vector: ir.Value, axis: int, offset: int = 0) -> ir.Value:
        """Return what roi, scales or sizes say of one axis, as a vector of length one."""
        return entry(self.op, vector, self.axes.index(axis) + offset)

    def _resized(self, rows: ir.Value, dy: ir.Value, axis: int, along: int = 1) -> ir.Value:
        """Do to one axis of a matrix what the node does to an axis of x."""
        op = self.op
        roi = scales = sizes = None
        if self.crops and self.roi is not None:
            ends = self._entry(self.roi, axis), self._entry(self.roi, axis, len(self.axes))
            roi = op.Concat(*ends, axis=0)
        if self.scales is not None:
            scales = self._entry(self.scales, axis)
        else:
            sizes = op.dim(dy, axis)
        result = op.Resize(rows, roi, scales, sizes, axes=[along], **self.options)
        dims = list(op.dims(rows))
        dims[along] = op.dims(dy)[axis]
        return op.with_dims(result, dims)

    def _matrix(self, dy: ir.Value, axis: int, transposed: bool = False) -> ir.Value:
        """Return the weights as [input, output], or [output, input]: the images of unit vectors."""
        op = self.op
        if self.policy != "stretch":
            matrix = self._matrix_of_policy(dy, axis)
            return op.swap_last(matrix) if transposed else matrix
        units = self._unit_vectors(axis)
        return op.cast(self._resized(units, dy, axis, 0 if transposed else 1), self.x.dtype)

    def _unit_vectors(self, axis: int) -> ir.Value:
        op, size = self.op, self.op.dim(self.x, axis)
        # Weights are computed in single precision at least, then rounded to the type of x.
        zero = ir.tensor(np.zeros(1, working_type(self.x).numpy()))
        zeros = op.ConstantOfShape(op.dims_vector(size, size), value=zero)
        dim = op.dims(self.x)[axis]
        return op.with_dims(op.EyeLike(op.with_dims(zeros, [dim, dim])), [dim, dim])

    def _matrix_of_policy(self, dy: ir.Value, axis: int) -> ir.Value:
        """Return the matrix of one axis where all axes share the scale of one of them.

        That scale is not the ratio of the sizes of this axis, and cannot be given together with a
        size. So the unit vectors get a second axis, constant along it, that is as long as the one
        which decides, and the operator finds the scale again by itself. That takes a cube of
        numbers for a moment; the policies are rare enough.
        """
        op = self.op
        assert self.sizes is not None
        lengths = op.dims_vector(*[op.dim(self.x, a) for a in self.axes])
        ratios = op.Cast(self.sizes, to=ir.DataType.FLOAT) / op.Cast(lengths, to=ir.DataType.FLOAT)
        smallest = self.policy == "not_larger"
        decides = (op.ArgMin if smallest else op.ArgMax)(ratios, axis=0, keepdims=1)
        size = op.dim(self.x, axis)
        units = op.Expand(
            op.unsqueeze(self._unit_vectors(axis), [1, 3]),
            op.Concat(size, [1], size, op.Gather(lengths, decides), axis=0),
        )
        roi = None
        if self.crops and self.roi is not None:
            start = self._entry(self.roi, axis)
            end = self._entry(self.roi, axis, len(self.axes))
            zero, one = (op.Reshape(op.const(v, start.dtype), [1]) for v in (0.0, 1.0))
            roi = op.Concat(start, zero, end, one, axis=0)
        sizes = op.Concat(self._entry(self.sizes, axis), op.Gather(self.sizes, decides), axis=0)
        images = op.Resize(
            units, roi, None, sizes, axes=[2, 3],
            keep_aspect_ratio_policy=self.policy, **self.options,
        )  # fmt: skip
        matrix = op.squeeze(op.Slice(images, [0], [1], [3]), [1, 3])
        op.with_dims(matrix, [op.dims(self.x)[axis], op.dims(dy)[axis]])
        return op.cast(matrix, self.x.dtype)

    # ---- long axes -----------------------------------------------------------------------------

    def _is_long(self, axis: int) -> bool:
        """Tell whether a matrix would cost more than adding at computed places.

        A symbolic length is taken for long where it is the only spatial one: a sequence.
        """
        if self.mode == "cubic" or self.antialias or self.policy != "stretch":
            return False
        length = self.op.dims(self.x)[axis]
        return length >= _LONG if isinstance(length, int) else self.op.rank(self.x) <= 3

    def _scatter(self, dy: ir.Value, axis: int) -> ir.Value:
        """Add each element of dy to the elements of x that it was made of."""
        op, x = self.op, self.x
        after = [1] * (op.rank(dy) - 1 - axis)
        shape = [op.dim(x if i == axis else dy, i) for i in range(op.rank(dy))]
        total = op.Expand(op.const(0.0, x.dtype), op.dims_vector(*shape))
        op.with_dims(total, self._dims_before(dy, axis))
        for place, weight in self._places(dy, axis):
            share = dy if weight is None else dy * op.Reshape(weight, [-1, *after])
            total = add_along(op, share, total, axis, place)
        return total

    def _places(self, dy: ir.Value, axis: int) -> list[tuple[ir.Value, ir.Value | None]]:
        """Return which elements an axis was made of, and with which weights.

        Which they are is read from the image of 0, 1, 2 …; the weights from the images of
        1, 0, 1, 0 … and 0, 1, 0, 1 …, because of two neighbours one is even and one is odd.
        """
        op, length = self.op, self.op.dim(self.x, axis)
        count = arange(op, length)
        odd = op.Mod(count, 2)
        if self.mode == "linear":
            rows = [count, 1 - odd, odd]
        else:
            rows = [count, op.full_like(count, 1)] if self.crops else [count]
        stacked = op.Concat(*[op.unsqueeze(row, [0]) for row in rows], axis=0)
        images = self._resized(op.Cast(stacked, to=working_type(self.x)), dy, axis)
        middle, *weights = [
            op.squeeze(op.slice(images, 0, i, i + 1), [0]) for i in range(len(rows))
        ]
        shares = [op.cast(weight, self.x.dtype) for weight in weights]
        if self.mode != "linear":
            return [(op.Cast(middle, to=ir.DataType.INT64), shares[0] if shares else None)]
        result: list[tuple[ir.Value, ir.Value | None]] = []
        for parity, share in enumerate(shares):
            nearest = op.Round((middle - float(parity)) * 0.5) * 2.0 + float(parity)
            place = op.Cast(nearest, to=ir.DataType.INT64)
            # Where rounding leaves the image, the weight is zero.
            result.append((op.Clip(place, 0, op.Squeeze(length - 1)), share))
        return result


def _given(node: ir.Node, index: int) -> ir.Value | None:
    """Return an optional input; an empty vector counts as none, as exporters write it so."""
    value = optional(node, index)
    return None if value is None or dims_of(value) == (0,) else value


def _sum_blocks(op: Ops, x: ir.Value, dy: ir.Value, factors: Sequence[int]) -> ir.Value:
    """Sum over the copies of each element; as a pooling where there is one, which is fastest."""
    if _has_channels(op, x, factors):
        window = {"kernel_shape": factors[2:], "strides": factors[2:]}
        count = float(math.prod(factors))
        if _is_padded(dy):
            return op.type_as(op.AveragePool(op.Mul(dy, count), **window), x)
        return op.Mul(op.type_as(op.AveragePool(dy, **window), x), count)
    shape: list[ir.Value | int] = []
    copies: list[int] = []
    for axis, factor in enumerate(factors):
        shape.append(op.dim(x, axis))
        if factor > 1:
            copies.append(len(shape))
            shape.append(factor)
    return op.ReduceSum(op.reshape(dy, op.dims_vector(*shape)), copies, keepdims=0)


def _is_padded(value: ir.Value) -> bool:
    """Tell whether a value comes out of Pad, as the gradient of Slice does.

    onnxruntime 1.31 makes one operator of Pad and a pooling right behind it, also where the pads
    are wider than the window, and then refuses its own work.
    """
    while (producer := value.producer()) and producer.op_type == "Identity":
        (value,) = required(producer)
    return producer is not None and producer.op_type == "Pad"


def _has_channels(op: Ops, x: ir.Value, factors: Sequence[int], known: bool = False) -> bool:
    """Tell whether x is a batch of images with channels that keep their (known) number."""
    if not 3 <= op.rank(x) <= 4 or list(factors[:2]) != [1, 1]:
        return False
    return not known or isinstance(op.dims(x)[1], int)


def _filter(op: Ops, x: ir.Value, dy: ir.Value, factors: Sequence[int]) -> ir.Value:
    """Undo a linear enlargement by whole factors k: a convolution with stride k.

    Element i of x has its centre at (i + ½) k - ½ in y, and its weight falls linearly to zero at
    distance k. What would have come from beyond the border came from the outermost element; by
    symmetry that is what the convolution finds if dy is mirrored there. Measured against the two
    matrix products on 64 channels, doubled to 256 × 256: 10 ms instead of 36.
    """
    channels = op.dims(x)[1]
    kernel = np.ones(())
    for k in factors[2:]:
        border = k // 2
        distance = np.abs(np.arange(-border, k + border) - (k - 1) / 2)
        kernel = np.multiply.outer(kernel, 1 - distance / k)
    assert isinstance(channels, int) and dy.dtype is not None
    weights = np.broadcast_to(kernel, (channels, 1, *kernel.shape)).astype(dy.dtype.numpy())
    padded = _mirror(op, dy, [k // 2 for k in factors])
    return op.Conv(padded, op.const(weights), strides=factors[2:], group=channels)


def _mirror(op: Ops, value: ir.Value, borders: Sequence[int]) -> ir.Value:
    """Extend each axis at both ends by its mirror image, the outermost elements included."""
    if max(borders) <= 1:
        return op.Pad(value, [*borders, *borders], mode="edge")
    for axis, border in enumerate(borders):
        if border:
            before = op.Slice(value, [border - 1], [-(2**62)], [axis], [-1])
            behind = op.Slice(value, [-1], [-1 - border], [axis], [-1])
            value = op.Concat(before, value, behind, axis=axis)
    return value
