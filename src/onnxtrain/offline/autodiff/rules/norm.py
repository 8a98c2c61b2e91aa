"""Rules for normalization within one sample; `batch_norm.py` has the one across samples.

All of them divide by a deviation that depends on the whole row. With c = x - mean,
r = 1/√(var + ε), the scale s and averages over the row, the gradient of y = c r s is

    dx = r (s dy - mean(s dy) - c r² mean(s dy c)).

The averages are taken as products with the small scale wherever the layout allows it: that leaves
out a pass over the activations for each. Half types are computed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import Cotangents, optional, output_of, required, rule
from onnxtrain.offline.graph.kernels import mark_kernel
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import Dim, same_dims, working_type

# ---- over the last axes ------------------------------------------------------------------------


@rule("LayerNormalization", since=17)
def layer_normalization(
    op: Ops,
    node: ir.Node,
    dy: ir.Value | None,
    dmean: ir.Value | None = None,
    dinv_std: ir.Value | None = None,
) -> Cotangents:
    """As at the top of this file; dmean spreads evenly, and d(1/σ) = -c (1/σ)³ dx / count."""
    x, scale, bias = *required(node, 2), optional(node, 2)
    axes = _last_axes(op, node, x)
    wide = working_type(x)
    xw = op.cast(x, wide)
    mean, inv_std = _layer_statistics(op, node, xw, axes)
    if dy is not None and dmean is None and dinv_std is None and wide == x.dtype:
        return _layer_kernel(op, node, dy, mean, inv_std)
    centred = xw - mean
    dx: list[ir.Value] = []
    dscale = dbias = None
    if dy is not None:
        from_y, dscale, dbias = scaled_rows(
            op, op.cast(dy, wide), centred, inv_std, scale, bias, axes, True
        )
        dx.append(from_y)
    if dmean is not None:
        share = op.cast(dmean, wide) / op.count(xw, axes)
        dx.append(op.expand_like(share, xw))
    if dinv_std is not None:
        cube = inv_std * inv_std * inv_std
        dx.append(centred * (-(op.cast(dinv_std, wide) * cube) / op.count(xw, axes)))
    return op.cast(op.add_all(dx), x.dtype), dscale, dbias


def _layer_kernel(
    op: Ops, node: ir.Node, dy: ir.Value, mean: ir.Value, inv_std: ir.Value
) -> Cotangents:
    """Write the gradient with respect to all inputs where only y is differentiated."""
    x, scale, bias = *required(node, 2), optional(node, 2)
    axes = _last_axes(op, node, x)

    def write() -> Sequence[ir.Value | None]:
        return scaled_rows(op, dy, x - mean, inv_std, scale, bias, axes, True)

    factors = [scale] if bias is None else [scale, bias]
    if not all(same_dims(op.dims(v), op.dims(x)[axes[0] :]) for v in factors):
        return tuple(write())
    about: dict[str, Any] = {"axis": axes[0], "epsilon": node.attributes.get_float("epsilon", 1e-5)}
    if node.attributes.get_int("stash_type", 1) == ir.DataType.FLOAT:
        mark_kernel(
            [node], "LayerNorm", [x, *factors], node.outputs,
            has_bias=int(bias is not None), **about,
        )  # fmt: skip
    return tuple(op.kernel("LayerNormGrad", [dy, x, scale, mean, inv_std], write, **about))


@rule("RMSNormalization", since=23)
def rms_normalization(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """As at the top of this file, without the mean: c = x."""
    x, scale = required(node, 2)
    axes = _last_axes(op, node, x)

    def write() -> list[ir.Value]:
        wide = working_type(x)
        xw = op.cast(x, wide)
        inv_rms = _inverse_root(op, node, op.mean(xw * xw, axes))
        dx, dscale, _ = scaled_rows(op, op.cast(dy, wide), xw, inv_rms, scale, None, axes, False)
        return [op.cast(dx, x.dtype), dscale]

    if not same_dims(op.dims(scale), op.dims(x)[axes[0] :]):
        return tuple(write())
    about: dict[str, Any] = {"axis": axes[0], "epsilon": node.attributes.get_float("epsilon", 1e-5)}
    if node.attributes.get_int("stash_type", 1) == ir.DataType.FLOAT:
        mark_kernel([node], "RMSNorm", [x, scale], node.outputs, **about)
    return tuple(op.kernel("RMSNormGrad", [dy, x, scale], write, **about))


def _last_axes(op: Ops, node: ir.Node, x: ir.Value) -> list[int]:
    rank = op.rank(x)
    return list(range(node.attributes.get_int("axis", -1) % rank, rank))


def _layer_statistics(
    op: Ops, node: ir.Node, x: ir.Value, axes: Sequence[int]
) -> tuple[ir.Value, ir.Value]:
    """Return mean and inverse deviation, kept as axes of size one.

    The forward kernel has them, so they are made outputs of the node where they are not yet. It
    states them in float32 though, so for float64 they are computed again.
    """
    if x.dtype == ir.DataType.DOUBLE:
        mean = op.mean(x, axes)
        centred = x - mean
        return mean, _inverse_root(op, node, op.mean(centred * centred, axes))
    kept: list[Dim] = [1 if i in axes else d for i, d in enumerate(op.dims(x))]
    stash = ir.DataType(node.attributes.get_int("stash_type", ir.DataType.FLOAT))
    statistics = [output_of(op, node, 1, "mean"), output_of(op, node, 2, "inv_std")]
    for value in statistics:
        value.dtype = stash
        op.with_dims(value, kept)
    mean, inv_std = (op.cast(value, x.dtype) for value in statistics)
    return mean, inv_std


def scaled_rows(
    op: Ops,
    dy: ir.Value,
    centred: ir.Value,
    inv: ir.Value,
    scale: ir.Value,
    bias: ir.Value | None,
    axes: Sequence[int],
    has_mean: bool,
) -> tuple[ir.Value, ir.Value, ir.Value | None]:
    """Return dx, dscale and dbias of y = centred · inv · scale + bias.

    `inv` is 1/√(mean of centred² + ε) over `axes`, which are the last ones.
    """
    first = axes[0]
    if max(op.rank(v) for v in (scale, bias) if v is not None) > len(axes):
        # They also vary along the other axes.
        scaled = dy * op.cast(scale, dy.dtype)
        inner = scaled - centred * (op.mean(scaled * centred, axes) * inv * inv)
        if has_mean:
            inner = inner - op.mean(scaled, axes)
        dscale = op.cast(op.sum_to(dy * centred * inv, scale), scale.dtype)
        dbias = None if bias is None else op.cast(op.sum_to(dy, bias), bias.dtype)
        return inner * inv, dscale, dbias
    wide = _spread_over_row(op, scale, centred, first)
    share = op.reshape(wide / op.count(centred, axes), [-1, 1])
    product = dy * centred
    # A product with a column or a row of numbers is one read of the activations: for 2048×768,
    # 0.05 ms against 0.20 for Mul and ReduceMean, or 0.13 for ReduceSum over the rows.
    flat_dy, flat_product = _flatten(op, dy, first), _flatten(op, product, first)
    slope = op.reshape_like(op.MatMul(flat_product, share), inv) * inv * inv
    inner = dy * wide - centred * slope
    if has_mean:
        inner = inner - op.reshape_like(op.MatMul(flat_dy, share), inv)
    row = op.MatMul(op.reshape(inv, [1, -1]), flat_product)
    dscale, dbias = _from_row(op, row, scale, centred, first), None
    if bias is not None:
        ones = op.Expand(op.const(1.0, dy.dtype), op.dims_vector(1, op.dim(flat_dy, 0)))
        dbias = _from_row(op, op.MatMul(ones, flat_dy), bias, centred, first)
    return inner * inv, dscale, dbias


def _spread_over_row(op: Ops, scale: ir.Value, x: ir.Value, first: int) -> ir.Value:
    """Return a scale, which may broadcast, in the shape of x from the axis `first` on."""
    wide, dims = op.cast(scale, x.dtype), op.dims(x)[first:]
    if same_dims(op.dims(scale), dims):
        return wide
    return op.with_dims(op.Expand(wide, _row_shape(op, x, first)), dims)


def _from_row(op: Ops, row: ir.Value, like: ir.Value, x: ir.Value, first: int) -> ir.Value:
    """Bring a row of sums back to the shape and type of a scale, which may have broadcast."""
    dims = op.dims(x)[first:]
    if not same_dims(op.dims(like), dims):
        row = op.with_dims(op.reshape(row, _row_shape(op, x, first)), dims)
        return op.cast(op.sum_to(row, like), like.dtype)
    return op.cast(op.reshape_like(row, like), like.dtype)


def _row_shape(op: Ops, x: ir.Value, first: int) -> ir.Value:
    return op.dims_vector(*(op.dim(x, axis) for axis in range(first, op.rank(x))))


def _flatten(op: Ops, value: ir.Value, axis: int) -> ir.Value:
    """Merge the axes before `axis`, and those from it on."""
    return value if op.rank(value) == 2 and axis == 1 else op.Flatten(value, axis=axis)


# ---- over groups of channels -------------------------------------------------------------------


@rule("GroupNormalization", since=18)
def group_normalization(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """As at the top of this file, for each group of channels of each sample.

    Up to opset 20 scale and bias are per group, from then on per channel.
    """
    groups = node.attributes.get_int("num_groups")
    return _group_kernel(op, node, dy, groups, per_channel=op.opset >= 21)


@rule("InstanceNormalization")
def instance_normalization(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """As at the top of this file, for each channel of each sample."""
    return _group_kernel(op, node, dy, 0, per_channel=True)


def _group_kernel(
    op: Ops, node: ir.Node, dy: ir.Value, groups: int, per_channel: bool
) -> Cotangents:
    x, scale, bias = required(node, 3)
    about: dict[str, Any] = {
        "groups": groups,
        "per_channel": int(per_channel),
        "epsilon": node.attributes.get_float("epsilon", 1e-5),
    }
    mark_kernel([node], "GroupNorm", [x, scale, bias], node.outputs, **about)

    def write() -> list[ir.Value]:
        return _grouped(op, node, dy, groups, per_channel)

    return tuple(op.kernel("GroupNormGrad", [dy, x, scale], write, **about))


def _grouped(
    op: Ops, node: ir.Node, dy: ir.Value, groups: int, per_channel: bool
) -> list[ir.Value]:
    """Write the gradient for (samples, groups, the rest); 0 groups: each channel is one.

    Sums are taken per channel first, which is all that scale and bias need, and the averages of
    the groups come from these few numbers.
    """
    x, scale, bias = required(node, 3)
    wide = working_type(x)
    by_group, by_channel = [0, groups, -1], [0, 0, -1]  # 0 keeps the dimension of the input
    xg = op.Reshape(op.cast(x, wide), by_group)
    centred = xg - op.mean(xg, [2])
    inv = _inverse_root(op, node, op.mean(centred * centred, [2]))
    cc = op.Reshape(op.reshape_like(centred, x), by_channel)
    dyc = op.type_as(op.Reshape(op.cast(dy, wide), by_channel), cc)
    sums = op.Reshape(op.sum(dyc, [2]), by_group)  # (samples, groups, channels of one)
    dots = op.Reshape(op.sum(dyc * cc, [2]), by_group)
    s = op.Reshape(op.cast(scale, wide), [groups or -1, -1 if groups else 1])
    share = s / op.count(xg, [2])
    average = op.sum(sums * share, [2], keepdims=True)
    slope = op.sum(dots * share, [2], keepdims=True) * inv * inv
    if per_channel:
        scaled = op.reshape_like(dyc * op.Reshape(s * inv, [0, -1, 1]), x)
        scaled = op.Reshape(scaled, by_group)
    else:
        scaled = op.Reshape(dyc, by_group) * (s * inv)
    dx = op.reshape_like(scaled - centred * (slope * inv) - average * inv, x)
    over = [0] if per_channel else [0, 2]
    dscale = op.reshape_like(op.sum(dots * inv, over), scale)
    dbias = op.reshape_like(op.sum(sums, over), bias)
    return [op.cast(dx, x.dtype), op.cast(dscale, scale.dtype), op.cast(dbias, bias.dtype)]


# ---- without scale -----------------------------------------------------------------------------


@rule("MeanVarianceNormalization")
def mean_variance_normalization(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """dx = (dy - mean(dy)) / (σ + 10⁻⁹) - y mean(dy y) / σ, the last term 0 where σ is."""
    (x,) = required(node)
    wide = working_type(x)
    axes = node.attributes.get_ints("axes", [0, 2, 3])
    xw, seed, y = (op.cast(v, wide) for v in (x, dy, node.outputs[0]))
    centred = xw - op.mean(xw, axes)
    deviation = op.Sqrt(op.mean(centred * centred, axes))
    dx = (seed - op.mean(seed, axes)) / (deviation + 1e-9)
    slope = _safe_quotient(op, op.mean(seed * y, axes), deviation)
    return (op.cast(dx - y * slope, x.dtype),)


@rule("LpNormalization", notes="0 where the norm is 0")
def lp_normalization(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """With s the sum of dy y along the axis: dx = (dy - s y) / |x|₂, or (dy - s sign(x)) / |x|₁."""
    x, y = *required(node), node.outputs[0]
    axis = [node.attributes.get_int("axis", -1) % op.rank(x)]
    along = op.sum(dy * y, axis, keepdims=True)
    if node.attributes.get_int("p", 2) == 1:
        norm, direction = op.ReduceL1(x, axis, keepdims=1), op.Sign(x)
    else:
        norm, direction = op.ReduceL2(x, axis, keepdims=1), y
    return (_safe_quotient(op, dy - direction * along, norm),)


@rule("LRN")
def lrn(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """With D = bias + α · average of x² over the window, and y = x D^-β.

    dx = dy D^-β - 2 α β x · average of (dy y / D) over the mirrored window.
    """
    (x,) = required(node)
    attribute = node.attributes.get_float
    alpha, beta, bias = attribute("alpha", 1e-4), attribute("beta", 0.75), attribute("bias", 1.0)
    wide = working_type(x)
    xw, seed, y = (op.cast(v, wide) for v in (x, dy, node.outputs[0]))
    base = _average_over_channels(op, node, xw * xw) * alpha + bias
    spread = _average_over_channels(op, node, seed * y / base, mirrored=True)
    return (op.cast(seed * op.Pow(base, -beta) - xw * spread * (2.0 * alpha * beta), x.dtype),)


def _average_over_channels(
    op: Ops, node: ir.Node, value: ir.Value, mirrored: bool = False
) -> ir.Value:
    """Average over the window of an LRN node, as a pooling that takes the channels for rows."""
    size = node.attributes.get_int("size")
    before, after = (size - 1) // 2, size // 2
    if mirrored:
        before, after = after, before
    rows = op.unsqueeze(op.Reshape(value, [0, 0, -1]), [1])
    (average,) = op.call(
        "AveragePool", rows, like=rows,
        kernel_shape=[size, 1], pads=[before, 0, after, 0], count_include_pad=1,
    )  # fmt: skip
    return op.reshape_like(op.squeeze(average, [1]), value)


# ---- shared ------------------------------------------------------------------------------------


def _inverse_root(op: Ops, node: ir.Node, variance: ir.Value) -> ir.Value:
    return op.Reciprocal(op.Sqrt(variance + node.attributes.get_float("epsilon", 1e-5)))


def _safe_quotient(op: Ops, value: ir.Value, divisor: ir.Value) -> ir.Value:
    """Divide, with 0 for a division by 0."""
    zero = op.Equal(divisor, 0.0)
    return op.Where(zero, 0.0, value / op.Where(zero, 1.0, divisor))
