"""The data gradients of convolutions: small to large (`spread`) and large to small (`gather`).

See `conv.py` for what is called large and small.
"""

from __future__ import annotations

import math
from itertools import product as all_of
from typing import Any

import onnx_ir as ir

from onnxtrain.offline.autodiff.definitions import split
from onnxtrain.offline.autodiff.window import Window, padded
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.sizes import Size, divide, product, reshape, sizes, spatial_sizes


def spread(
    op: Ops, window: Window, small: ir.Value, w: ir.Value, groups: int, like: ir.Value
) -> ir.Value:
    """Add small[o] * w[t] to position o * stride + t * dilation - before, for each o and t.

    The result has the shape of `like`.
    """
    return SPREADS[choose(op, window, small, w, groups, like)](op, window, small, w, groups, like)


def choose(
    op: Ops, window: Window, small: ir.Value, w: ir.Value, groups: int, like: ir.Value
) -> str:
    """Choose a formulation of `spread` by shape; benchmarks/conv_backward.py has the figures.

    ConvTranspose multiplies first and adds up a column for each tap afterwards. A Conv with the
    weights turned around needs stride 1 and does the opposite, on onnxruntime's tuned kernels:
    it is 10 % faster where the large side has no fewer channels, three times for depthwise
    weights, twice for a single tap, and loses where the weights that it has to turn around are
    large beside the image. Both work image by image; where images are small and weights are
    large, one product over the whole batch reads the weights once: a third faster.
    """
    flippable = flipped_pads(window) is not None
    dims = (*op.dims(w)[:2], *op.dims(like)[2:], *op.dims(small)[2:])
    static = [d for d in dims if isinstance(d, int)]
    if groups > 1 or len(static) < len(dims):
        return "conv" if flippable else "conv transpose"
    rows, columns, *space = static
    positions = math.prod(space[: window.rank])
    windows = math.prod(space[window.rank :])
    few = math.prod(window.kernel) <= 64  # the products are one node or more for each tap
    if few and rows * columns >= 2048 * windows and window.has_static_padding:
        return "products"
    if not flippable:
        return "conv transpose"
    if set(window.kernel) == {1}:
        return "conv"
    light = rows * columns <= 100 * windows and rows * positions <= 2 * columns * windows
    return "conv" if light else "conv transpose"


def gather(
    op: Ops, window: Window, large: ir.Value, w: ir.Value, groups: int, like: ir.Value
) -> ir.Value:
    """Sum large[o * stride + t * dilation - before] * w[t] over t: the operator Conv."""
    pads = [*window.before, *window.after]
    if not all(isinstance(p, int) for p in pads):
        large = padded(op, window, large, spatial_sizes(op, like))
        pads = [0] * len(pads)
    return op.call(
        "Conv", large, w, like=like, group=groups,
        strides=window.strides, dilations=window.dilations, pads=pads,
    )[0]  # fmt: skip


def flipped_pads(window: Window) -> list[int] | None:
    """Return the padding of the Conv that spreads with flipped weights, or None without one."""
    if set(window.strides) != {1}:
        return None
    pads = []
    for sides in (window.before, window.after):
        for extent, pad in zip(window.extent, sides, strict=True):
            if not isinstance(pad, int) or pad >= extent:
                return None
            pads.append(extent - 1 - pad)
    return pads


def _spread_by_conv(
    op: Ops, window: Window, small: ir.Value, w: ir.Value, groups: int, like: ir.Value
) -> ir.Value:
    """With stride 1, walk over `small` with the weights turned around.

    Padding is what the window reaches beyond the padding of the forward operator.
    """
    rows, columns = sizes(op, w)[:2]
    axes = list(range(2, window.rank + 2))
    if groups == 1:
        turned = op.Transpose(w, perm=[1, 0, *axes])
    elif op.dims(w)[:2] == (groups, 1):
        turned = w
    else:
        per_group = divide(op, rows, groups)
        apart = reshape(op, w, [groups, per_group, columns, *window.kernel])
        turned = op.Transpose(apart, perm=[0, 2, 1, *(a + 1 for a in axes)])
        turned = reshape(op, turned, [columns * groups, per_group, *window.kernel])
    if any(k > 1 for k in window.kernel):
        ends = [-k - 1 for k in window.kernel]
        turned = op.Slice(turned, [-1] * window.rank, ends, axes, [-1] * window.rank)
    return op.call(
        "Conv", small, turned, like=like, group=groups,
        dilations=window.dilations, pads=flipped_pads(window),
    )[0]  # fmt: skip


def _spread_by_conv_transpose(
    op: Ops, window: Window, small: ir.Value, w: ir.Value, groups: int, like: ir.Value
) -> ir.Value:
    """The operator ConvTranspose; positions at the end that no window reached are zero."""
    attributes: dict[str, Any] = {
        "strides": window.strides, "dilations": window.dilations, "group": groups
    }  # fmt: skip
    target, counts = spatial_sizes(op, like), spatial_sizes(op, small)
    reach = [
        (count - 1) * stride + extent
        for count, stride, extent in zip(counts, window.strides, window.extent, strict=True)
    ]
    beyond = [r - b - t for r, b, t in zip(reach, window.before, target, strict=True)]
    known = [b for b in beyond if isinstance(b, int)]
    if window.has_static_padding and len(known) == window.rank:
        return op.call(
            "ConvTranspose", small, w, like=like, **attributes,
            pads=[*window.before, *(max(b, 0) for b in known)],
            output_padding=[max(-b, 0) for b in known],
        )[0]  # fmt: skip
    # How many positions are left over is not known: take as many as there may be, then cut.
    longest = op.ConvTranspose(
        small, w, output_padding=[s - 1 for s in window.strides], **attributes
    )
    axes = list(range(2, window.rank + 2))
    ends = op.dims_vector(*(b + t for b, t in zip(window.before, target, strict=True)))
    return op.type_as(op.Slice(longest, op.dims_vector(*window.before), ends, axes), like)


def _spread_by_products(
    op: Ops, window: Window, small: ir.Value, w: ir.Value, groups: int, like: ir.Value
) -> ir.Value:
    """Channels last: one product per tap over the whole batch, added up where taps meet.

    Positions of the result are taken apart by their remainder modulo the stride: all positions of
    one remainder meet the same taps, each with `small` moved by a whole number of windows.
    """
    batch, rows, *counts = sizes(op, small)
    columns = sizes(op, w)[1]
    before = [b for b in window.before if isinstance(b, int)]
    outside = [d for d in op.dims(like)[2:] if isinstance(d, int)]
    inside = [n for n in counts if isinstance(n, int)]
    steps = window.strides
    moves = [
        [divmod(t * d - b, s) for t in range(k)]
        for k, d, b, s in zip(window.kernel, window.dilations, before, steps, strict=True)
    ]
    grid = [-(-n // s) for n, s in zip(outside, steps, strict=True)]
    front = [max(0, *(m for m, _ in along)) for along in moves]
    back = [
        max(0, *(g - n - m for m, _ in along))
        for g, n, along in zip(grid, inside, moves, strict=True)
    ]
    axes = list(range(1, window.rank + 1))
    source = op.Transpose(small, perm=[0, *range(2, window.rank + 2), 1])
    if any((*front, *back)):
        dims = [f + n + b for f, n, b in zip(front, inside, back, strict=True)]
        source = op.Pad(source, [0, *front, 0, 0, *back, 0])
        op.with_dims(source, [op.dims(small)[0], *dims, op.dims(small)[1]])
    matrices = _matrix_per_tap(op, window, w, rows, columns)
    count = batch * product(*grid)

    def phase(remainders: tuple[int, ...]) -> ir.Value:
        total: ir.Value | None = None
        for tap in all_of(*(range(k) for k in window.kernel)):
            met = [along[t] for along, t in zip(moves, tap, strict=True)]
            if tuple(r for _, r in met) != remainders:
                continue
            starts = [f - m for f, (m, _) in zip(front, met, strict=True)]
            ends = [s + g for s, g in zip(starts, grid, strict=True)]
            piece = reshape(op, op.Slice(source, starts, ends, axes), [count, rows])
            term = op.MatMul(piece, matrices[tap])
            total = term if total is None else op.Add(total, term)
        if total is None:
            return op.Expand(op.const(0.0, small.dtype), op.dims_vector(batch, *grid, columns))
        return reshape(op, total, [batch, *grid, columns])

    def interleave(remainders: tuple[int, ...]) -> ir.Value:
        axis = len(remainders)
        if axis == window.rank:
            return phase(remainders)
        parts = [interleave((*remainders, r)) for r in range(steps[axis])]
        if len(parts) == 1:
            return parts[0]
        inner = [g * s for g, s in zip(grid[axis + 1 :], steps[axis + 1 :], strict=True)]
        apart = [batch, *grid[: axis + 1], 1, *inner, columns]
        stacked = op.Concat(*(reshape(op, p, apart) for p in parts), axis=axis + 2)
        shape = [batch, *grid[:axis], grid[axis] * steps[axis], *inner, columns]
        return reshape(op, stacked, shape)

    result = interleave(())
    if any(g * s != n for g, s, n in zip(grid, steps, outside, strict=True)):
        result = op.Slice(result, [0] * window.rank, outside, axes)
    return op.type_as(
        op.Transpose(result, perm=[0, window.rank + 1, *range(1, window.rank + 1)]), like
    )


def _matrix_per_tap(
    op: Ops, window: Window, w: ir.Value, rows: Size, columns: Size
) -> dict[tuple[int, ...], ir.Value]:
    taps = list(all_of(*(range(k) for k in window.kernel)))
    first = op.Transpose(reshape(op, w, [rows, columns, len(taps)]), perm=[2, 0, 1])
    if len(taps) == 1:
        return {taps[0]: reshape(op, first, [rows, columns])}
    pieces = split(op, first, len(taps), axis=0)
    return {
        tap: reshape(op, piece, [rows, columns]) for tap, piece in zip(taps, pieces, strict=True)
    }


SPREADS = {
    "conv": _spread_by_conv,
    "conv transpose": _spread_by_conv_transpose,
    "products": _spread_by_products,
}
