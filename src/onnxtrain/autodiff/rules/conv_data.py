"""The data gradients of convolutions: small to large (`spread`) and large to small (`gather`).

See `conv.py` for what is called large and small.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff.ops import Ops
from onnxtrain.autodiff.window import (
    Window,
    divide,
    flat_channels,
    padded,
    reshape,
    sizes,
    spatial_sizes,
)


def spread(
    op: Ops, window: Window, small: ir.Value, w: ir.Value, groups: int, like: ir.Value
) -> ir.Value:
    """Add small[o] * w[t] to position o * stride + t * dilation - before, for each o and t.

    The result has the shape of `like`.
    """
    if window.is_pointwise:
        return _spread_by_product(op, small, w, groups, like)
    if _flipped_pads(window) is not None:
        return _spread_by_conv(op, window, small, w, groups, like)
    return _spread_by_conv_transpose(op, window, small, w, groups, like)


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


def _spread_by_product(
    op: Ops, small: ir.Value, w: ir.Value, groups: int, like: ir.Value
) -> ir.Value:
    """A single tap on every element is a product of matrices over the channels."""
    rows, columns = sizes(op, w)[:2]
    if groups == 1:
        matrix = reshape(op, w, [rows, columns])
    else:
        matrix = reshape(op, w, [groups, divide(op, rows, groups), columns])
    return op.reshape_like(op.MatMul(op.swap_last(matrix), flat_channels(op, small, groups)), like)


def _flipped_pads(window: Window) -> list[int] | None:
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
        dilations=window.dilations, pads=_flipped_pads(window),
    )[0]  # fmt: skip


def _spread_by_conv_transpose(
    op: Ops, window: Window, small: ir.Value, w: ir.Value, groups: int, like: ir.Value
) -> ir.Value:
    """The operator ConvTranspose; positions at the end that no window reached are zero."""
    attributes = {"strides": window.strides, "dilations": window.dilations, "group": groups}
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
