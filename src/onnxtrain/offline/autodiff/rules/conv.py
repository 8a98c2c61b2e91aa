"""Rules for Conv and ConvTranspose.

The two are each other's transpose. Written for Conv, with x the *large* side (what windows slide
over) and y the *small* one (one element per window), there are three linear maps:

    y  = conv(x, w)           large to small, the operator Conv
    dx = spread(dy, w)        small to large, the operator ConvTranspose
    dw = correlate(x, dy)     of both sides, no operator

A ConvTranspose is `spread` itself, so its gradients are `conv` and `correlate` with the sides
exchanged. `conv_data.py` writes the first two and `conv_weight.py` the third; each chooses among
several formulations by shape.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import Cotangents, required, rule
from onnxtrain.offline.autodiff.rules.conv_data import gather, spread
from onnxtrain.offline.autodiff.rules.conv_weight import correlate
from onnxtrain.offline.autodiff.window import conv_transpose_window, conv_window
from onnxtrain.offline.graph.ops import Ops


@rule("Conv")
def conv(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """y = conv(x, w) + b: dx spreads dy with w, dw correlates x with dy, db sums dy."""
    x, w = required(node, 2)
    window = conv_window(op, node, x, w)
    groups = node.attributes.get_int("group", 1)
    dx = spread(op, window, dy, w, groups, like=x)
    dw = correlate(op, window, x, dy, groups, like=w)
    return dx, dw, *_bias(op, node, dy)


@rule("ConvTranspose")
def conv_transpose(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """y = spread(x, w) + b: dx convolves dy with w, dw correlates dy with x, db sums dy."""
    x, w = required(node, 2)
    window = conv_transpose_window(op, node, x, w, node.outputs[0])
    groups = node.attributes.get_int("group", 1)
    dx = gather(op, window, dy, w, groups, like=x)
    dw = correlate(op, window, dy, x, groups, like=w)
    return dx, dw, *_bias(op, node, dy)


def _bias(op: Ops, node: ir.Node, dy: ir.Value) -> tuple[ir.Value, ...]:
    if len(node.inputs) < 3 or node.inputs[2] is None:
        return ()
    return (op.sum(dy, [0, *range(2, op.rank(dy))]),)
