"""Rules for pooling: over windows, over everything, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxtrain.offline.autodiff.registry import Cotangents, refuse, required, rule
from onnxtrain.offline.autodiff.rules.conv_data import flipped_pads, spread
from onnxtrain.offline.autodiff.rules.scatter_helpers import add_elements
from onnxtrain.offline.autodiff.window import Window, pool_window
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import integers, is_half
from onnxtrain.offline.graph.sizes import (
    Size,
    arange,
    product,
    reshape,
    sizes,
    spatial_sizes,
)

# ---- maximum -------------------------------------------------------------------------------------


@rule("MaxPool", notes="of equal maxima, the first of a window gets the gradient")
def max_pool(op: Ops, node: ir.Node, dy: ir.Value, *_: ir.Value | None) -> Cotangents:
    """The cotangent of a window goes to the element that won it, and adds up there."""
    x, y = *required(node), node.outputs[0]
    window = pool_window(op, node, x, y)

    def write() -> list[ir.Value]:
        if _tiles_statically(op, window, x) and not is_half(x):
            space = zip(_static_space(op, y), window.kernel, _static_space(op, x), strict=True)
            if all(count * k <= size for count, k, size in space):
                return [_to_first_maximum(op, window, x, y, dy)]
        return [add_elements(op, dy, x, _indices(op, node, x), repeated=window.overlaps)]

    attributes = _kernel_attributes(window)
    if attributes is None or x.dtype != dy.dtype:  # bytes of a quantized network
        return (write()[0],)
    return (op.kernel("MaxPoolGrad", [x, dy], write, **attributes)[0],)


def _indices(op: Ops, node: ir.Node, x: ir.Value) -> ir.Value:
    """Return the position of each maximum in the flattened x.

    The forward node is left alone, as onnxruntime pools ten times faster without indices; and an
    index that it gives may count columns first.
    """
    columns_first = node.attributes.get_int("storage_order", 0) == 1
    if len(node.outputs) > 1 and node.outputs[1].name and not columns_first:
        return node.outputs[1]
    attributes = {k: a.value for k, a in node.attributes.items() if k != "storage_order"}
    indices = op.call("MaxPool", x, outputs=2, **attributes)[1]
    indices.dtype = ir.DataType.INT64
    return op.shape_as(indices, node.outputs[0])


def _tiles_statically(op: Ops, window: Window, x: ir.Value) -> bool:
    unpadded = all(isinstance(p, int) and p == 0 for p in (*window.before, *window.after))
    known = all(isinstance(d, int) for d in op.dims(x)[2:])
    return window.rank == 2 and window.tiles and unpadded and known


def _to_first_maximum(op: Ops, window: Window, x: ir.Value, y: ir.Value, dy: ir.Value) -> ir.Value:
    """Where windows tile the input, find the winners without indices.

    Elements that equal the maximum of their window are ranked by position, first one highest;
    pooling the ranks finds the winner. Measured, this costs a third of MaxPool with indices.
    """
    counts = _static_space(op, y)
    lengths = [n * k for n, k in zip(counts, window.kernel, strict=True)]
    inside = _resized(op, x, lengths)
    volume = int(np.prod(window.kernel))
    rank = np.arange(volume, 0, -1).reshape(window.kernel).astype(_numpy_type(x))
    ranks = op.with_dims(op.Tile(op.const(rank), counts), lengths)
    equal = op.cast(op.Equal(inside, _repeated(op, window, y)), x.dtype)
    score = op.Mul(equal, ranks)
    best = op.call("MaxPool", score, like=y, kernel_shape=window.kernel, strides=window.kernel)[0]
    best = op.Max(best, 0.5)  # no score is 0.5: a window of NaN has no winner
    won = op.Equal(score, _repeated(op, window, best))
    return _resized(op, op.select(won, _repeated(op, window, dy), of=y), _static_space(op, x))


# ---- average and norm ----------------------------------------------------------------------------


@rule("AveragePool")
def average_pool(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """Each element of a window gets the cotangent divided by the count that was divided by."""
    (x,) = required(node)
    window = pool_window(op, node, x, node.outputs[0])

    def write() -> list[ir.Value]:
        share = _one_over_count(op, node, window, x, dy)
        return [_spread_evenly(op, window, op.Mul(dy, share), x)]

    attributes = _kernel_attributes(window)
    if attributes is None:
        return (write()[0],)
    counts_padding = node.attributes.get_int("count_include_pad", 0)
    return (
        _kernel_like(
            op, "AveragePoolGrad", dy, x, write, count_include_pad=counts_padding, **attributes
        ),
    )


@rule("LpPool")
def lp_pool(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """y = (sum |x|^p)^(1/p), so dx = sign(x) |x|^(p-1) times the sum of dy y^(1-p)."""
    x, y = *required(node), node.outputs[0]
    p = node.attributes.get_int("p", 2)
    window = pool_window(op, node, x, node.outputs[0])
    per_window = _over_norm(op, dy, y, p)
    return (_norm_slope(op, x, _spread_evenly(op, window, per_window, x), p),)


def _over_norm(op: Ops, dy: ir.Value, y: ir.Value, p: int) -> ir.Value:
    """Return dy y^(1-p), and 0 where the norm is 0: every element is 0 there."""
    if p == 1:
        return dy
    positive = op.Greater(y, 0.0)
    power = y if p == 2 else op.Pow(y, float(p - 1))
    return op.Where(positive, dy / op.Where(positive, power, 1.0), 0.0)


def _norm_slope(op: Ops, x: ir.Value, scale: ir.Value, p: int) -> ir.Value:
    """Return sign(x) |x|^(p-1) scale."""
    if p == 2:
        return op.Mul(x, scale)
    slope = op.Sign(x) if p == 1 else op.Sign(x) * op.Pow(op.Abs(x), float(p - 1))
    return op.Mul(slope, scale)


def _one_over_count(
    op: Ops, node: ir.Node, window: Window, x: ir.Value, dy: ir.Value
) -> ir.Value | float:
    """Return what each window was multiplied by, as onnxruntime counts.

    Padding counts if `count_include_pad` says so; what a window reaches beyond the padding
    (ceil_mode) never does.
    """
    with_padding = node.attributes.get_int("count_include_pad", 0) == 1
    padded = any(not isinstance(p, int) or p != 0 for p in (*window.before, *window.after))
    if node.attributes.get_int("ceil_mode", 0) == 0 and (with_padding or not padded):
        return 1.0 / float(np.prod(window.kernel))
    counts, lengths = spatial_sizes(op, dy), spatial_sizes(op, x)
    result: ir.Value | None = None
    for axis in range(window.rank):
        low: Size = 0
        high = lengths[axis]
        if with_padding:
            low, high = 0 - window.before[axis], high + window.after[axis]
        found = _taps_between(op, window, axis, counts[axis], low, high)
        shape = [-1] + [1] * (window.rank - 1 - axis)
        if isinstance(found, ir.Value):
            along = op.Reciprocal(op.Reshape(op.cast(found, dy.dtype), shape))
        else:
            along = op.const((1.0 / found).reshape(shape).astype(_numpy_type(dy)))
        result = along if result is None else op.Mul(result, along)
    assert result is not None
    return result


def _taps_between(
    op: Ops, window: Window, axis: int, count: Size, low: Size, high: Size
) -> ir.Value | NDArray[np.int64]:
    """Count, for each window along an axis, the taps at positions from `low` to before `high`."""
    stride, before = window.strides[axis], window.before[axis]
    taps = np.arange(window.kernel[axis], dtype=np.int64) * window.dilations[axis]
    known = [i for i in (count, before, low, high) if isinstance(i, int)]
    if len(known) == 4:
        number_, start, first_, end = known
        position = np.arange(number_)[:, None] * stride - start + taps
        inside = (position >= first_) & (position < end)
        return np.asarray(inside.sum(axis=1), dtype=np.int64)
    positions = op.unsqueeze(arange(op, count) * stride - before, [1]) + op.const(taps)
    within = op.And(op.GreaterOrEqual(positions, low), op.Less(positions, high))
    return op.sum(op.Cast(within, to=ir.DataType.INT64), [1])


def _spread_evenly(op: Ops, window: Window, per_window: ir.Value, like: ir.Value) -> ir.Value:
    """Add the value of each window to every element under it.

    * Windows that tile the input: every value is repeated.
    * Stride 1: each element sums the windows around it, which is average pooling once more.
    * Else a transposed convolution with ones, each channel by itself.
    """
    if _tiles_statically(op, window, like):
        return _resized(op, _repeated(op, window, per_window), _static_space(op, like))
    pads = flipped_pads(window)
    if pads is not None and set(window.dilations) == {1}:
        volume = float(np.prod(window.kernel))
        return op.call(
            "AveragePool", op.Mul(per_window, volume), like=like,
            kernel_shape=window.kernel, pads=pads, count_include_pad=1,
        )[0]  # fmt: skip
    batch, channels, *space = sizes(op, like)
    images = product(batch, channels)
    flat = reshape(op, like, [images, 1, *space])
    small = reshape(op, per_window, [images, 1, *spatial_sizes(op, per_window)])
    ones = op.const(np.ones((1, 1, *window.kernel), dtype=_numpy_type(like)))
    return op.reshape_like(spread(op, window, small, ones, 1, like=flat), like)


# ---- over everything -----------------------------------------------------------------------------


@rule("GlobalAveragePool")
def global_average_pool(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """Every element gets the cotangent divided by their number."""
    (x,) = required(node)

    def write() -> list[ir.Value]:
        return [op.expand_like(dy * op.one_over_count(x, range(2, op.rank(x))), x)]

    return (_kernel_like(op, "GlobalAveragePoolGrad", dy, x, write),)


@rule("GlobalMaxPool", notes="of equal maxima, the first gets the gradient")
def global_max_pool(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """The cotangent goes to the element that won."""
    (x,) = required(node)
    batch, channels, *space = sizes(op, x)
    length = product(*space)
    flat = reshape(op, x, [batch, channels, length])
    winner = op.ArgMax(flat, axis=2, keepdims=1)
    here = op.Equal(arange(op, length), winner)
    placed = op.Where(here, reshape(op, dy, [batch, channels, 1]), 0.0)
    return (op.reshape_like(placed, x),)


@rule("GlobalLpPool")
def global_lp_pool(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """As LpPool, with one window over everything."""
    x, y = *required(node), node.outputs[0]
    p = node.attributes.get_int("p", 2)
    return (_norm_slope(op, x, _over_norm(op, dy, y, p), p),)


# ---- back ----------------------------------------------------------------------------------------


@rule("MaxUnpool", notes="positions that occur twice each get the gradient of their position")
def max_unpool(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """Values were placed at flat positions of the output; their cotangents are read there."""
    indices = node.inputs[1]
    return (op.Gather(op.Reshape(dy, [-1]), indices, axis=0),)


refuse(
    "MaxRoiPool",
    reason="it does not tell where its maxima were, and to find them again takes the memory of "
    "every region times the whole image; use RoiAlign, in mode 'max' if need be",
)


# ---- kernels -------------------------------------------------------------------------------------

_MOST_AXES = 3  # that kernels know


def _kernel_attributes(window: Window) -> dict[str, Any] | None:
    """Return the attributes of kernels; None where padding is known at run time only."""
    pads = [p for p in (*window.before, *window.after) if isinstance(p, int)]
    if len(pads) < 2 * window.rank or window.rank > _MOST_AXES:
        return None
    return {
        "kernel_shape": window.kernel, "strides": window.strides,
        "dilations": window.dilations, "pads": pads,
    }  # fmt: skip


def _kernel_like(
    op: Ops,
    kind: str,
    dy: ir.Value,
    x: ir.Value,
    write: Callable[[], list[ir.Value]],
    **attributes: Any,
) -> ir.Value:
    """Return what a kernel computes from dy in the shape of x."""
    axes = integers(op.dims(x)[2:])
    dx: ir.Value
    if axes is not None:  # batch and channels are those of dy
        dx = op.kernel(kind, [dy], write, sizes=axes, **attributes)[0]
    else:
        dx = op.kernel(kind, [dy, op.shape_of(x)], write, **attributes)[0]
    return dx


# ---- helpers -------------------------------------------------------------------------------------


def _repeated(op: Ops, window: Window, value: ir.Value) -> ir.Value:
    """Repeat each element over its window, which tiles the result."""
    lengths = [n * k for n, k in zip(_static_space(op, value), window.kernel, strict=True)]
    if value.dtype == ir.DataType.DOUBLE:  # onnxruntime does not resize doubles
        batch, channels, *space = sizes(op, value)
        apart = reshape(op, value, [batch, channels, *(i for n in space for i in (n, 1))])
        copies = op.Expand(apart, [1, 1, *(i for k in window.kernel for i in (1, k))])
        return reshape(op, copies, [batch, channels, *lengths])
    scales = op.const(np.array([1, 1, *window.kernel], dtype=np.float32))
    grown = op.Resize(
        value, None, scales,
        mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor",
    )  # fmt: skip
    return op.with_dims(grown, [*op.dims(value)[:2], *lengths])


def _resized(op: Ops, value: ir.Value, lengths: list[int]) -> ir.Value:
    """Cut the spatial axes at the end, or fill them with zeros, to the given lengths."""
    have = _static_space(op, value)
    cut = [axis for axis, (n, h) in enumerate(zip(lengths, have, strict=True)) if n < h]
    if cut:
        ends = [lengths[axis] for axis in cut]
        value = op.Slice(value, [0] * len(cut), ends, [axis + 2 for axis in cut])
    missing = [max(n - h, 0) for n, h in zip(lengths, have, strict=True)]
    if any(missing):
        front = [0] * (len(lengths) + 4)
        dims = [*op.dims(value)[:2], *lengths]
        value = op.with_dims(op.Pad(value, [*front, *missing]), dims)
    return value


def _static_space(op: Ops, value: ir.Value) -> list[int]:
    """Return the spatial sizes of a value where they are all known."""
    return [d for d in op.dims(value)[2:] if isinstance(d, int)]


def _numpy_type(value: ir.Value) -> np.dtype[Any]:
    assert value.dtype is not None
    return value.dtype.numpy()
