"""The rule of Gelu; the five nodes that exporters write for it have a pass (`passes/gelu.py`)."""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import Cotangents, rule
from onnxtrain.offline.graph.ops import Ops


@rule("Gelu", notes="both approximations, each with its own derivative")
def gelu(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """d x Φ(x) = (Φ(x) + x φ(x)) dx, and the derivative of the tanh form for that."""
    x = node.inputs[0]
    if node.attributes.get_string("approximate", "none") == "tanh":
        return (dy * _tanh_gelu_slope(op, x),)
    return (gelu_cotangent(op, x, dy),)


def gelu_cotangent(op: Ops, x: ir.Value | None, dy: ir.Value) -> ir.Value:
    """With a = -x/√2: dx = dy (1 - (erf(a) + a exp(-a²) 2/√π)) / 2.

    Divided by exp(a²), which takes a pass less and is right where that is infinite. The sign is for
    onnxruntime, which would share x/√2 with the forward pass, and then neither fuse nor free it.
    """
    a = op.Mul(x, -math.sqrt(0.5))
    bell = op.Div(a, op.Exp(op.Mul(a, a)))
    slope = 1.0 - (op.Erf(a) + bell * (2.0 / math.sqrt(math.pi)))
    return op.Mul(dy * slope, 0.5)


def _tanh_gelu_slope(op: Ops, x: ir.Value | None) -> ir.Value:
    """With u = k (x + c x³), t = tanh(u): y = x (1 + t)/2, y' = (1 + t + x (1 - t²) u')/2."""
    k, c = math.sqrt(2.0 / math.pi), 0.044715
    square = op.Mul(x, x)
    t = op.Tanh(op.Mul(x, square * (k * c) + k))
    inner = op.Mul(x, square * (3.0 * k * c) + k)
    return op.Mul(t + 1.0 + inner * (1.0 - t * t), 0.5)
