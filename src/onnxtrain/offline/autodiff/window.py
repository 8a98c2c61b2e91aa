"""How the windows of a convolution or a pooling operator lie on their input.

Conv, ConvTranspose and the pools share `kernel_shape`, `strides`, `pads`, `dilations`, `auto_pad`
and `ceil_mode`. They are resolved here and nowhere else, into one fact per spatial axis: tap t of
window o lies at position

    o * stride + t * dilation - before

of the input; positions outside of it are padding. How many windows there are is the size of the
output, so that floor or ceil, and what is left over at the end, need no further thought.

Sizes that are symbolic make `auto_pad` a computation at run time: padding is a `Size`, see
`sizes.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from onnxtrain.errors import ModelError, ShapeInferenceError
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import integers
from onnxtrain.offline.graph.sizes import (
    Size,
    at_least_zero,
    dim_of,
    divide,
    product,
    reshape,
    sizes,
    spatial_sizes,
)


@dataclass(frozen=True)
class Window:
    """The taps, steps and padding of a window, each with one entry per spatial axis.

    `before` and `after` are what lies in front of and behind the input; `after` counts only where
    padding is averaged over.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[Size, ...]
    after: tuple[Size, ...]

    @property
    def rank(self) -> int:
        """The number of spatial axes."""
        return len(self.kernel)

    @property
    def extent(self) -> tuple[int, ...]:
        """How many positions a window spans, from its first tap to its last."""
        return tuple(d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilations, strict=True))

    @property
    def tiles(self) -> bool:
        """Tell whether windows lie side by side without gap or overlap."""
        return self.kernel == self.strides and set(self.dilations) == {1}

    @property
    def overlaps(self) -> bool:
        """Tell whether an element may lie in more than one window."""
        return any(e > s for e, s in zip(self.extent, self.strides, strict=True))

    @property
    def is_pointwise(self) -> bool:
        """Tell whether every window is exactly one element of the input, and no other."""
        return {*self.kernel, *self.strides} == {1} and {*self.before, *self.after} == {0}

    @property
    def has_static_padding(self) -> bool:
        """Tell whether the padding in front is known beforehand."""
        return all(isinstance(b, int) for b in self.before)


def conv_window(op: Ops, node: ir.Node, x: ir.Value, w: ir.Value) -> Window:
    """Resolve the window of a Conv on its input x."""
    window = _sliding(op, node, x, _kernel_of_weight(op, node, w))
    group = node.attributes.get_int("group", 1)
    filters, depth = integers(op.dims(w)[:1]), integers([op.dims(x)[1], op.dims(w)[1]])
    differs = depth is not None and depth[0] != depth[1] * group
    if group < 1 or differs or (filters is not None and filters[0] % group):
        raise ModelError(
            f"Conv {node.name!r} has group={group}, for which its input {x.shape} and its weight "
            f"{w.shape} do not fit: the weight has one filter per output channel, a multiple of "
            "group, each as deep as the input channels divided by group"
        )
    _require_room(op, node, window, x)
    return window


def pool_window(op: Ops, node: ir.Node, x: ir.Value, y: ir.Value) -> Window:
    """Resolve the window of a pooling operator on its input x; y is its output."""
    kernel = tuple(node.attributes.get_ints("kernel_shape"))
    window = _sliding(op, node, x, kernel)
    if _auto_pad(node).startswith("SAME") and set(window.dilations) != {1}:
        raise ModelError(
            f"{node.op_type} {node.name!r} has auto_pad={_auto_pad(node)} and dilations: the ONNX "
            "standard and onnxruntime disagree on its padding. Give it explicit pads"
        )
    # A last window that would lie in the padding alone is dropped when the operator runs, but
    # counted by shape inference, so that every shape computed from it would be wrong.
    for axis, before in enumerate(window.before, start=2):
        known = [i for i in (op.dims(x)[axis], op.dims(y)[axis], before) if isinstance(i, int)]
        if len(known) == 3 and (known[1] - 1) * window.strides[axis - 2] >= known[0] + known[2]:
            raise ModelError(
                f"{node.op_type} {node.name!r} has ceil_mode=1 and a last window that lies in its "
                f"padding: onnx infers the output shape {y.shape}, onnxruntime computes less. Use "
                "ceil_mode=0, or less padding at the end"
            )
    return window


def conv_transpose_window(op: Ops, node: ir.Node, x: ir.Value, w: ir.Value, y: ir.Value) -> Window:
    """Resolve the window of a ConvTranspose, which lies on its *output*; there is one per x."""
    plain = _stated(node, _kernel_of_weight(op, node, w))
    auto_pad = _auto_pad(node)
    extra = _ints(node, "output_padding", [0] * plain.rank)
    same = auto_pad.startswith("SAME")
    if any(e >= s for e, s in zip(extra, plain.strides, strict=True)):
        raise ModelError(
            f"ConvTranspose {node.name!r} has output_padding={list(extra)} with strides="
            f"{list(plain.strides)}: onnxruntime does not run it. Lower its pads, or append a Pad"
        )
    if same and any(extra) and not node.attributes.get_ints("output_shape", ()):
        raise ModelError(
            f"ConvTranspose {node.name!r} has auto_pad={auto_pad} and output_padding: the ONNX "
            "standard and onnxruntime disagree on its output. Give it explicit pads"
        )
    if not same and not node.attributes.get_ints("output_shape", ()):
        return plain
    # The output is given, and what the windows cover beyond it is cut off on both sides.
    ends = []
    inner, outer = spatial_sizes(op, x), spatial_sizes(op, y)
    for axis, extent in enumerate(plain.extent):
        covered = (inner[axis] - 1) * plain.strides[axis] + extra[axis] + extent
        ends.append(_halves(op, at_least_zero(op, covered - outer[axis]), auto_pad))
    before, after = zip(*ends, strict=True)
    return replace(plain, before=before, after=after)


def _sliding(op: Ops, node: ir.Node, x: ir.Value, kernel: tuple[int, ...]) -> Window:
    plain, auto_pad = _stated(node, kernel), _auto_pad(node)
    if not auto_pad.startswith("SAME"):
        return plain
    # As many windows as there are strides in the input, rounded up.
    ends = []
    for size, extent, stride in zip(spatial_sizes(op, x), plain.extent, plain.strides, strict=True):
        if stride == 1:
            missing: Size = extent - 1
        else:
            count = divide(op, size + (stride - 1), stride)
            missing = at_least_zero(op, (count - 1) * stride + extent - size)
        ends.append(_halves(op, missing, auto_pad))
    before, after = zip(*ends, strict=True)
    return replace(plain, before=before, after=after)


def _require_room(op: Ops, node: ir.Node, window: Window, x: ir.Value) -> None:
    """Refuse a window that is larger than the input, if that is known, with its padding."""
    spans = zip(op.dims(x)[2:], window.before, window.after, window.extent, strict=True)
    for size, before, after, extent in spans:
        known = [i for i in (size, before, after) if isinstance(i, int)]
        if len(known) == 3 and sum(known) < extent:
            raise ModelError(
                f"{node.op_type} {node.name!r} has windows of {list(window.extent)} elements, "
                f"which do not fit into its input {x.shape} with its padding"
            )


def _halves(op: Ops, total: Size, auto_pad: str) -> tuple[Size, Size]:
    """Divide padding between both ends; SAME_UPPER puts the odd one at the end."""
    half = divide(op, total, 2)
    rest = total - half
    return (half, rest) if auto_pad == "SAME_UPPER" else (rest, half)


def _kernel_of_weight(op: Ops, node: ir.Node, w: ir.Value) -> tuple[int, ...]:
    dims = op.dims(w)[2:]
    stated = node.attributes.get_ints("kernel_shape", ())
    if stated:
        if any(isinstance(d, int) and d != k for d, k in zip(dims, stated, strict=False)):
            raise ModelError(
                f"{node.op_type} {node.name!r} has kernel_shape={list(stated)} and the weight "
                f"{w.name!r} of shape {w.shape}, the last dimensions of which are another kernel"
            )
        return tuple(stated)
    known = integers(dims)
    if known is None:
        raise ShapeInferenceError(
            f"the kernel size of {node.op_type} {node.name!r} is not known: its weight {w.name!r} "
            f"has the shape {w.shape}. Give the node the attribute kernel_shape, or the weight a "
            "static shape"
        )
    return known


def _ints(node: ir.Node, name: str, default: list[int]) -> tuple[int, ...]:
    return tuple(node.attributes.get_ints(name, ()) or default)


def _stated(node: ir.Node, kernel: tuple[int, ...]) -> Window:
    """Return the window that the attributes state, without automatic padding."""
    rank = len(kernel)
    pads: tuple[int, ...] = (0,) * (2 * rank)
    if _auto_pad(node) == "NOTSET":
        pads = _ints(node, "pads", list(pads))
    strides, dilations = (_ints(node, name, [1] * rank) for name in ("strides", "dilations"))
    return Window(kernel, strides, dilations, pads[:rank], pads[rank:])


def _auto_pad(node: ir.Node) -> str:
    return node.attributes.get_string("auto_pad", "NOTSET") or "NOTSET"


# ---- values under a window ----------------------------------------------------------------------


def flat_channels(op: Ops, value: ir.Value, groups: int) -> ir.Value:
    """Reshape [N, C, …] to [N, C, S], or to [N, groups, C / groups, S] where there are groups."""
    batch, channels, *space = sizes(op, value)
    apart = [channels] if groups == 1 else [groups, divide(op, channels, groups)]
    return reshape(op, value, [batch, *apart, product(*space)])


def padded(
    op: Ops, window: Window, value: ir.Value, counts: Sequence[Size], first_axis: int = 2
) -> ir.Value:
    """Make the padding part of a value, so that it holds at least `counts` whole windows.

    The spatial axes start at `first_axis`. Nothing is written where there is no padding.
    """
    if all(isinstance(p, int) and p == 0 for p in (*window.before, *window.after)):
        return value
    have = sizes(op, value)
    front: list[Size] = [0] * len(have)
    back: list[Size] = [0] * len(have)
    dims = list(op.dims(value))
    for i, (before, extent) in enumerate(zip(window.before, window.extent, strict=True)):
        axis = first_axis + i
        reach = (counts[i] - 1) * window.strides[i] + extent
        front[axis] = before
        back[axis] = at_least_zero(op, reach - before - have[axis])
        dims[axis] = dim_of(front[axis] + have[axis] + back[axis])
    if all(isinstance(p, int) and p == 0 for p in (*front, *back)):
        return value
    return op.with_dims(op.Pad(value, op.dims_vector(*front, *back)), dims)
