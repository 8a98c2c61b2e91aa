"""The weight gradient of convolutions: how both sides correlate.

    dw[k, c, t] = sum over n, o of small[n, k, o] * large[n, c, o * stride + t * dilation - before]

There is no ONNX operator for it. Convolving with the roles exchanged (batch as channels) is right
but two to eight times slower than the products written here, whose shapes suit a matrix product;
it is kept for kernels with very many taps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product as all_of

import onnx_ir as ir

from onnxtrain.offline.autodiff.window import Window, flat_channels, padded
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import Dim
from onnxtrain.offline.graph.sizes import Size, divide, product, reshape, sizes, spatial_sizes


@dataclass(frozen=True)
class Pair:
    """Both sides of a convolution, with the sizes that the formulations need."""

    window: Window
    large: ir.Value
    small: ir.Value
    groups: int
    like: ir.Value  # the weight

    @property
    def taps(self) -> int:
        """How many taps the kernel has."""
        return math.prod(self.window.kernel)


def correlate(
    op: Ops, window: Window, large: ir.Value, small: ir.Value, groups: int, like: ir.Value
) -> ir.Value:
    """Return dw, in the shape of the weight `like`."""
    pair = Pair(window, large, small, groups, like)
    return FORMULATIONS[choose(op, pair)](op, pair)


# Beyond this many taps a few nodes for each make a graph that takes longer to load than to run
# (the 511 taps of a Fourier basis: 35,000 nodes, minutes); one Conv does it, if more slowly.
MOST_TAPS = 64
# What is not known beforehand is taken to be this large when a formulation is chosen. Any choice
# is right for every size.
TYPICAL_BATCH = 16
TYPICAL_CHANNELS = 64
TYPICAL_SIZE = 32


def choose(op: Ops, pair: Pair) -> str:
    """Choose a formulation by shape; benchmarks/conv_backward.py has the figures.

    Per tap, a slice of the input is copied and multiplied. The copies are fast with channels last,
    where they move whole pixels. What remains is how to treat the batch: a product per image leaves
    one dw per image to be summed, which costs more than it saves as soon as weights are large
    beside an image; a single product over the batch keeps both threads busy only where weights are
    large. Two halves are the compromise, for the price of a copy of `small`. With few channels in,
    so that a slice is too thin for a matrix product, all taps go into one matrix instead.
    """
    batch = op.dims(pair.small)[0]
    images = _number(batch, TYPICAL_BATCH)
    rows, columns = op.dims(pair.like)[:2]
    weights = _number(rows, TYPICAL_CHANNELS) * _number(columns, TYPICAL_CHANNELS)
    windows = math.prod(_number(d, TYPICAL_SIZE) for d in op.dims(pair.small)[2:])
    if pair.taps > MOST_TAPS:
        return "exchanged"
    if op.on_gpu and not pair.window.is_pointwise:
        return "depthwise columns" if columns == 1 and rows == pair.groups else "columns"
    if pair.groups > 1 and columns == 1:
        return _choose_depthwise(pair, windows, batch, rows)
    if pair.window.is_pointwise and (pair.groups > 1 or weights <= 128 * windows):
        return "pointwise"
    if pair.taps * _number(columns, TYPICAL_CHANNELS) <= (150 if pair.groups == 1 else 600):
        return "columns"
    if pair.groups > 1 or weights > 128 * windows * images:
        return "folded"
    if weights < 4 * windows:
        return "per image"
    if isinstance(batch, int) and batch % 2 == 0 and not op.lean:
        return "halves"
    return "per image" if weights <= 64 * windows else "folded"


def _choose_depthwise(pair: Pair, windows: int, batch: Dim, rows: Dim) -> str:
    """Choose among the formulations for one input channel per group.

    There is no product of matrices in it. Channels last suits small images; large ones are better
    left as they are, if stride 1 allows to copy whole rows. Strided slices along the innermost axis
    are slow, so that a Conv, slow by itself, wins there; it needs to know the batch.
    """
    multiplied = not isinstance(rows, int) or rows != pair.groups
    if multiplied and _number(rows, TYPICAL_CHANNELS) > 4 * pair.groups:
        return "columns"
    if multiplied or windows < 1000:
        return "depthwise"
    if set(pair.window.strides) == {1}:
        return "depthwise shifted"
    static = isinstance(batch, int) and pair.window.has_static_padding
    return "depthwise conv" if static else "depthwise"


def _number(dim: object, otherwise: int) -> int:
    return dim if isinstance(dim, int) else otherwise


# ---- the input of each tap -----------------------------------------------------------------------


def taps_of(op: Ops, pair: Pair, large: ir.Value, first_axis: int) -> Iterator[ir.Value]:
    """Yield, for each tap, the elements that it meets: one per window.

    `large` has its spatial axes from `first_axis` on; the other axes are left alone.
    """
    window = pair.window
    axes = list(range(first_axis, first_axis + window.rank))
    counts = spatial_sizes(op, pair.small)
    reach = [(n - 1) * s + 1 for n, s in zip(counts, window.strides, strict=True)]
    large = padded(op, window, large, counts, first_axis)
    steps = [list(window.strides)] if set(window.strides) != {1} else []
    for tap in all_of(*(range(k) for k in window.kernel)):
        starts = [t * d for t, d in zip(tap, window.dilations, strict=True)]
        ends = op.dims_vector(*(r + s for r, s in zip(reach, starts, strict=True)))
        dims = list(op.dims(large))
        dims[first_axis : first_axis + window.rank] = op.dims(pair.small)[2:]
        yield op.with_dims(op.Slice(large, starts, ends, axes, *steps), dims)


def channels_last(op: Ops, value: ir.Value) -> ir.Value:
    """Transpose [N, C, …] to [N, …, C]."""
    return op.Transpose(value, perm=[0, *range(2, op.rank(value)), 1])


def _flat_taps(
    op: Ops, pair: Pair, large: ir.Value, shape: Sequence[Size], first_axis: int
) -> list[ir.Value]:
    """Return, for each tap, the elements that it meets, in a shape.

    Formulations write all taps before they touch `small`: onnxruntime computes the inputs of a node
    from the newest one on, and copies no tap before the gradients that `small` waits for are known.
    """
    return [reshape(op, tap, shape) for tap in taps_of(op, pair, large, first_axis)]


# Concatenating along the innermost axis writes number by number, and needs a node more for each
# tap; from this many weights on, it is faster than transposing all taps at once (for 512 × 512
# kernels of 9 taps 1.2 ms instead of 1.9, for 256 × 256 0.27 instead of 0.23).
_MANY_WEIGHTS = 200_000


def _assemble(op: Ops, pair: Pair, per_tap: list[ir.Value]) -> ir.Value:
    """Put the products of the taps, each [K, C / groups], behind one another.

    Where they have another axis in front, of halves of the batch, it is summed over.
    """
    parts = op.rank(per_tap[0]) == 3
    if len(per_tap) == 1:
        return op.reshape_like(op.sum(per_tap[0], [0]) if parts else per_tap[0], pair.like)
    rows, columns = op.dims(pair.like)[:2]
    weights = _number(rows, TYPICAL_CHANNELS) * _number(columns, TYPICAL_CHANNELS)
    if not parts and weights > _MANY_WEIGHTS:
        stacked = op.Concat(*(op.unsqueeze(v, [2]) for v in per_tap), axis=2)
        return op.reshape_like(stacked, pair.like)
    stacked = op.Concat(*per_tap, axis=int(parts))
    by_tap = op.Reshape(op.sum(stacked, [0]) if parts else stacked, [len(per_tap), -1])
    return op.reshape_like(op.Transpose(by_tap, perm=[1, 0]), pair.like)


# ---- formulations --------------------------------------------------------------------------------


def pointwise(op: Ops, pair: Pair) -> ir.Value:
    """One tap that meets every element: a product per image, summed over the batch."""
    large = flat_channels(op, pair.large, pair.groups)
    small = flat_channels(op, pair.small, pair.groups)
    summed = op.sum(op.MatMul(small, op.swap_last(large)), [0])
    return op.reshape_like(summed, pair.like)


def columns(op: Ops, pair: Pair) -> ir.Value:
    """All taps behind one another, then one product per image (and group)."""
    groups = pair.groups
    batch, channels = sizes(op, pair.large)[:2]
    count = product(*spatial_sizes(op, pair.small))
    apart = [] if groups == 1 else [groups]
    stacked = _columns(op, pair)
    matrix = reshape(op, stacked, [batch, *apart, divide(op, channels * pair.taps, groups), count])
    small = flat_channels(op, pair.small, groups)
    summed = op.sum(op.MatMul(small, op.swap_last(matrix)), [0])
    return op.reshape_like(summed, pair.like)


def _columns(op: Ops, pair: Pair) -> ir.Value:
    """Return what each tap meets in each channel: [batch, channels, taps, windows]."""
    batch, channels = sizes(op, pair.large)[:2]
    count = product(*spatial_sizes(op, pair.small))
    taps = [reshape(op, v, [batch, channels, 1, count]) for v in taps_of(op, pair, pair.large, 2)]
    return op.concat(taps, axis=2)


def depthwise_columns(op: Ops, pair: Pair) -> ir.Value:
    """One channel per group, in few nodes: a product of a matrix and a vector for each channel."""
    batch, channels = sizes(op, pair.large)[:2]
    count = product(*spatial_sizes(op, pair.small))
    small = reshape(op, pair.small, [batch, channels, count, 1])
    return op.reshape_like(op.sum(op.MatMul(_columns(op, pair), small), [0]), pair.like)


def per_image(op: Ops, pair: Pair) -> ir.Value:
    """Channels last; one product per tap and image, summed over the batch."""
    batch, channels = sizes(op, pair.large)[:2]
    count = product(*spatial_sizes(op, pair.small))
    taps = _flat_taps(op, pair, channels_last(op, pair.large), [batch, count, channels], 1)
    small = flat_channels(op, pair.small, 1)
    return _assemble(op, pair, [op.sum(op.MatMul(small, tap), [0]) for tap in taps])


def halves(op: Ops, pair: Pair) -> ir.Value:
    """As per image, with each half of the batch as one image: less to sum afterwards."""
    batch, channels = sizes(op, pair.large)[:2]
    rows, *space = sizes(op, pair.small)[1:]
    half, count = divide(op, batch, 2), product(*space)
    taps = _flat_taps(op, pair, channels_last(op, pair.large), [2, half * count, channels], 1)
    apart = reshape(op, pair.small, [2, half, rows, count])
    small = reshape(op, op.Transpose(apart, perm=[0, 2, 1, 3]), [2, rows, half * count])
    return _assemble(op, pair, [op.MatMul(small, tap) for tap in taps])


def folded(op: Ops, pair: Pair) -> ir.Value:
    """Channels last; one product per tap (and group) over the whole batch, nothing to sum."""
    groups, rank = pair.groups, pair.window.rank
    batch, channels, *extents = sizes(op, pair.large)
    rows, *space = sizes(op, pair.small)[1:]
    count = batch * product(*space)
    if groups == 1:
        taps = _flat_taps(op, pair, channels_last(op, pair.large), [count, channels], 1)
        small = op.Transpose(pair.small, perm=[1, 0, *range(2, rank + 2)])
        small = reshape(op, small, [rows, count])
        return _assemble(op, pair, [op.MatMul(small, tap) for tap in taps])
    rows_each, columns_each = divide(op, rows, groups), divide(op, channels, groups)
    large = reshape(op, pair.large, [batch, groups, columns_each, *extents])
    large = op.Transpose(large, perm=[1, 0, *range(3, rank + 3), 2])
    taps = _flat_taps(op, pair, large, [groups, count, columns_each], 2)
    small = reshape(op, pair.small, [batch, groups, rows_each, product(*space)])
    small = reshape(op, op.Transpose(small, perm=[1, 2, 0, 3]), [groups, rows_each, count])
    per_tap = [op.MatMul(small, tap) for tap in taps]
    return _assemble(op, pair, [reshape(op, p, [rows, columns_each]) for p in per_tap])


def depthwise(op: Ops, pair: Pair) -> ir.Value:
    """One input channel per group: multiply, then sum by a product with ones, channels last."""
    groups = pair.groups
    batch, rows, *space = sizes(op, pair.small)
    each = divide(op, rows, groups)
    count = batch * product(*space)
    large = channels_last(op, pair.large)
    if isinstance(rows, int) and rows == groups:
        taps = list(taps_of(op, pair, large, 1))
        small = channels_last(op, pair.small)
    else:  # each input channel meets several
        taps = _flat_taps(op, pair, large, [count, groups, 1], 1)
        small = reshape(op, channels_last(op, pair.small), [count, groups, each])
    ones = op.Expand(op.const(1.0, small.dtype), op.dims_vector(1, count))
    summed = [op.MatMul(ones, reshape(op, op.Mul(tap, small), [count, rows])) for tap in taps]
    stacked = op.concat(summed, axis=0)
    return op.reshape_like(op.Transpose(stacked, perm=[1, 0]), pair.like)


def depthwise_shifted(op: Ops, pair: Pair) -> ir.Value:
    """One input channel per group and stride 1: multiply and sum, with few and cheap copies.

    Only the last axis is sliced. On the others it is `small` that moves, by rows of zeros in front
    and behind, which copies whole rows.
    """
    window = pair.window
    *moved, last = (
        [t * d for t in range(k)] for k, d in zip(window.kernel, window.dilations, strict=True)
    )
    counts = spatial_sizes(op, pair.small)
    large = padded(op, window, pair.large, counts)
    axis = op.rank(large) - 1
    sliced = []
    for start in last:
        piece = op.slice(large, axis, start, counts[-1] + start)
        sliced.append(op.with_dims(piece, [*op.dims(large)[:-1], op.dims(pair.small)[-1]]))
    axes = [0, *range(2, axis + 1)]
    result = []
    for starts in all_of(*moved):
        front = [0, 0, *starts, 0]
        back = [0, 0, *(e - 1 - s for e, s in zip(window.extent, starts, strict=False)), 0]
        dims = [*op.dims(pair.small)[:2], *op.dims(large)[2:-1], op.dims(pair.small)[-1]]
        lone = not any((*front, *back))
        small = pair.small if lone else op.with_dims(op.Pad(pair.small, front + back), dims)
        result += [op.unsqueeze(op.sum(op.Mul(piece, small), axes), [1]) for piece in sliced]
    return op.reshape_like(op.concat(result, axis=1), pair.like)


def depthwise_conv(op: Ops, pair: Pair) -> ir.Value:
    """One channel per group: a Conv in which every image and channel is a group of its own.

    The kernel is the whole of `small`, strides and dilations exchange their places.
    """
    window = pair.window
    images = math.prod(d for d in op.dims(pair.large)[:2] if isinstance(d, int))
    met = op.Conv(
        reshape(op, pair.large, [1, images, *spatial_sizes(op, pair.large)]),
        reshape(op, pair.small, [images, 1, *spatial_sizes(op, pair.small)]),
        group=images, pads=[*window.before, *window.after],
        strides=window.dilations, dilations=window.strides,
    )  # fmt: skip
    axes = list(range(2, window.rank + 2))
    met = op.Slice(met, [0] * window.rank, list(window.kernel), axes)  # of more places than taps
    op.with_dims(met, [1, images, *window.kernel])
    batch, channels = sizes(op, pair.large)[:2]
    return op.reshape_like(op.sum(reshape(op, met, [batch, channels, pair.taps]), [0]), pair.like)


def exchanged(op: Ops, pair: Pair) -> ir.Value:
    """One Conv with the roles exchanged: the batch is its channels, `small` its kernel."""
    window, groups, rank = pair.window, pair.groups, pair.window.rank
    axes = list(range(2, rank + 2))
    large = padded(op, window, pair.large, spatial_sizes(op, pair.small))
    batch, channels, *extents = sizes(op, large)
    each = divide(op, channels, groups)
    apart = reshape(op, large, [batch, groups, each, *extents])
    images = op.Transpose(apart, perm=[2, 1, 0, *(a + 1 for a in axes)])
    met = op.Conv(
        reshape(op, images, [each, batch * groups, *extents]),
        op.Transpose(pair.small, perm=[1, 0, *axes]),
        group=groups, strides=window.dilations, dilations=window.strides,
    )  # fmt: skip
    met = op.Slice(met, [0] * rank, list(window.kernel), axes)  # of more places than taps
    op.with_dims(met, [*op.dims(pair.like)[1::-1], *window.kernel])
    return op.Transpose(met, perm=[1, 0, *axes])


FORMULATIONS = {
    "exchanged": exchanged,
    "pointwise": pointwise,
    "columns": columns,
    "per image": per_image,
    "halves": halves,
    "folded": folded,
    "depthwise": depthwise,
    "depthwise shifted": depthwise_shifted,
    "depthwise columns": depthwise_columns,
    "depthwise conv": depthwise_conv,
}
