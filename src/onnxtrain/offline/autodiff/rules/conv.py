"""Rules for Conv and ConvTranspose.

The two are each other's transpose. Written for Conv, with x the *large* side (what windows slide
over) and y the *small* one (one element per window), there are three linear maps:

    y  = conv(x, w)           large to small, the operator Conv
    dx = spread(dy, w)        small to large, the operator ConvTranspose
    dw = correlate(x, dy)     of both sides, no operator

A ConvTranspose is `spread` itself, so its gradients are `conv` and `correlate` with the sides
exchanged. `conv_data.py` writes the first two and `conv_weight.py` the third; each chooses among
several formulations by shape.

Native kernels compute the same three maps (Conv, ConvGradInput, ConvGradWeight) and the sum for the
bias (ConvGradBias). They stand in for the nodes of a rule, and for the operator itself where
something in it is trained.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import Cotangents, required, rule
from onnxtrain.offline.autodiff.rules.conv_data import gather, spread
from onnxtrain.offline.autodiff.rules.conv_weight import correlate
from onnxtrain.offline.autodiff.window import Window, conv_transpose_window, conv_window
from onnxtrain.offline.graph.kernels import mark_kernel
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import integers


@rule("Conv")
def conv(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """y = conv(x, w) + b: dx spreads dy with w, dw correlates x with dy, db sums dy."""
    x, w = required(node, 2)
    window = conv_window(op, node, x, w)
    groups = node.attributes.get_int("group", 1)
    if (attributes := _attributes(window, groups)) is not None:
        bias = _bias_of(node)
        inputs = [x, w] if bias is None else [x, w, bias]
        mark_kernel([node], "Conv", inputs, node.outputs, has_bias=len(inputs) - 2, **attributes)
    dx = _spread(op, window, dy, w, groups, like=x)
    dw = _correlate(op, window, x, dy, groups, like=w)
    return dx, dw, *_bias(op, node, dy)


@rule("ConvTranspose")
def conv_transpose(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """y = spread(x, w) + b: dx convolves dy with w, dw correlates dy with x, db sums dy."""
    x, w = required(node, 2)
    y = node.outputs[0]
    window = conv_transpose_window(op, node, x, w, y)
    groups = node.attributes.get_int("group", 1)
    attributes, sizes = _attributes(window, groups), integers(op.dims(y)[2:])
    if attributes is not None and sizes is not None:
        bias = _bias_of(node)
        inputs = [x, w] if bias is None else [x, w, bias]
        mark_kernel(
            [node], "ConvGradInput", inputs, [y],
            has_bias=len(inputs) - 2, sizes=sizes, **attributes,
        )  # fmt: skip
    dx = _gather(op, window, dy, w, groups, like=x)
    dw = _correlate(op, window, dy, x, groups, like=w)
    return dx, dw, *_bias(op, node, dy)


# ---- with kernels --------------------------------------------------------------------------------

_MOST_AXES = 3  # that kernels know


def _attributes(window: Window, groups: int) -> dict[str, Any] | None:
    """Return the attributes of the kernels; None where padding is known at run time only."""
    ends = (*window.before, *window.after)
    pads = [p for p in ends if isinstance(p, int)]
    if len(pads) < len(ends) or window.rank > _MOST_AXES:
        return None
    return {
        "strides": window.strides, "dilations": window.dilations, "pads": pads, "group": groups
    }  # fmt: skip


def _spread(
    op: Ops, window: Window, small: ir.Value, w: ir.Value, groups: int, like: ir.Value
) -> ir.Value:
    def write() -> list[ir.Value]:
        return [spread(op, window, small, w, groups, like)]

    attributes, sizes = _attributes(window, groups), integers(op.dims(like)[2:])
    if attributes is None:
        return write()[0]
    inputs = [small, w]
    if sizes is None:
        inputs.append(op.shape_of(like))
    else:  # batch and channels are those of the inputs
        attributes["sizes"] = sizes
    found: list[ir.Value] = op.kernel("ConvGradInput", inputs, write, **attributes)
    return found[0]


def _gather(
    op: Ops, window: Window, large: ir.Value, w: ir.Value, groups: int, like: ir.Value
) -> ir.Value:
    def write() -> list[ir.Value]:
        return [gather(op, window, large, w, groups, like)]

    attributes = _attributes(window, groups)
    if attributes is None:
        return write()[0]
    found: list[ir.Value] = op.kernel("Conv", [large, w], write, **attributes)
    return found[0]


def _correlate(
    op: Ops, window: Window, large: ir.Value, small: ir.Value, groups: int, like: ir.Value
) -> ir.Value:
    def write() -> list[ir.Value]:
        return [correlate(op, window, large, small, groups, like)]

    attributes = _attributes(window, groups)
    if attributes is None:
        return write()[0]
    attributes["kernel_shape"] = window.kernel
    found: list[ir.Value] = op.kernel("ConvGradWeight", [large, small], write, **attributes)
    return found[0]


def _bias_of(node: ir.Node) -> ir.Value | None:
    return node.inputs[2] if len(node.inputs) > 2 else None


def _bias(op: Ops, node: ir.Node, dy: ir.Value) -> tuple[ir.Value, ...]:
    if _bias_of(node) is None:
        return ()
    axes = [0, *range(2, op.rank(dy))]
    return tuple(op.kernel("ConvGradBias", [dy], lambda: [op.sum(dy, axes)]))
