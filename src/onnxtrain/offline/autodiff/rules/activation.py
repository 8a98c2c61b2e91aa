"""Rules for activation functions, and for Dropout.

Piecewise functions select by a mask; smooth ones use the forward output where it serves.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import Cotangents, rule
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import constant_array

# ---- piecewise linear --------------------------------------------------------------------------


@rule("Relu", notes="0 at 0")
def relu(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """Dx = dy where y > 0. The mask comes from the output, so the input need not be kept."""
    y = node.outputs[0]
    return (op.select(op.Greater(y, 0.0), dy, of=y),)


@rule("LeakyRelu", notes="alpha at 0; alpha may be negative")
def leaky_relu(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """Dx = dy where x > 0, alpha dy elsewhere."""
    alpha = node.attributes.get_float("alpha", 0.01)
    return (op.Where(op.Greater(node.inputs[0], 0.0), dy, dy * alpha),)


@rule("PRelu", broadcasts=True, notes="slope at 0")
def prelu(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """Dx = dy where x > 0, slope dy elsewhere; dslope = x dy where x ≤ 0."""
    x, slope = node.inputs
    positive = op.Greater(x, 0.0)
    return op.Where(positive, dy, dy * slope), op.Where(positive, 0.0, dy * x)


@rule("ThresholdedRelu", notes="0 at alpha")
def thresholded_relu(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """Dx = dy where x > alpha."""
    alpha = node.attributes.get_float("alpha", 1.0)
    return (op.select(op.Greater(node.inputs[0], alpha), dy, of=node.outputs[0]),)


@rule("Shrink", notes="0 at ±lambd")
def shrink(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """Dx = dy where |x| > lambd."""
    lambd = node.attributes.get_float("lambd", 0.5)
    return (op.select(op.Greater(op.Abs(node.inputs[0]), lambd), dy, of=node.outputs[0]),)


@rule("HardSigmoid", notes="0 at both ends")
def hard_sigmoid(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """Dx = alpha dy where 0 < y < 1."""
    y, alpha = node.outputs[0], node.attributes.get_float("alpha", 0.2)
    inside = op.And(op.Greater(y, 0.0), op.Less(y, 1.0))
    return (op.select(inside, dy * alpha, of=y),)


@rule("HardSwish", notes="0 at -3, 1 at 3")
def hard_swish(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """Dx = (x/3 + 1/2) dy between -3 and 3, 0 below, dy above."""
    x = node.inputs[0]
    slope = op.Where(op.Less(x, 3.0), op.Mul(x, 1.0 / 3.0) + 0.5, 1.0)
    return (op.Where(op.Greater(x, -3.0), dy * slope, 0.0),)


# ---- exponential -------------------------------------------------------------------------------


@rule("Sigmoid")
def sigmoid(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """Dx = y (1 - y) dy."""
    y = node.outputs[0]
    return (dy * y * (1.0 - y),)


@rule("Elu")
def elu(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """Y = alpha (exp(x) - 1) below 0, so dx = (y + alpha) dy there."""
    return (_elu_like(op, node, dy, node.attributes.get_float("alpha", 1.0), 1.0),)


@rule("Selu")
def selu(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """Elu times gamma."""
    alpha = node.attributes.get_float("alpha", 1.67326319217681884765625)
    gamma = node.attributes.get_float("gamma", 1.05070102214813232421875)
    return (_elu_like(op, node, dy, alpha * gamma, gamma),)


def _elu_like(op: Ops, node: ir.Node, dy: ir.Value, saturation: float, slope: float) -> ir.Value:
    above = dy if slope == 1.0 else dy * slope
    below = dy * (node.outputs[0] + saturation)
    return op.Where(op.Greater(node.inputs[0], 0.0), above, below)


@rule("Celu")
def celu(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """Y = alpha (exp(x/alpha) - 1) below 0, so dx = (y/alpha + 1) dy there."""
    alpha = node.attributes.get_float("alpha", 1.0)
    below = dy * (node.outputs[0] * (1.0 / alpha) + 1.0)
    return (op.Where(op.Greater(node.inputs[0], 0.0), dy, below),)


@rule("Softplus")
def softplus(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """d log(1 + exp(x)) = sigmoid(x) dx."""
    return (dy * op.Sigmoid(node.inputs[0]),)


@rule("Softsign")
def softsign(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """d x/(1 + |x|) = dx / (1 + |x|)²."""
    base = op.Abs(node.inputs[0]) + 1.0
    return (dy / (base * base),)


@rule("Mish")
def mish(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """With t = tanh(softplus(x)): y = x t, dx = (t + x (1 - t²) sigmoid(x)) dy."""
    x = node.inputs[0]
    t = op.Tanh(op.Softplus(x))
    return (dy * (t + op.Mul(x, op.Sigmoid(x)) * (1.0 - t * t)),)


@rule("Swish")
def swish(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """With s = sigmoid(alpha x): y = x s, dx = (s + alpha y (1 - s)) dy."""
    alpha = node.attributes.get_float("alpha", 1.0)
    x, y = node.inputs[0], node.outputs[0]
    s = op.Sigmoid(x if alpha == 1.0 else op.Mul(x, alpha))
    scaled = y if alpha == 1.0 else y * alpha
    return (dy * (s + scaled * (1.0 - s)),)


# ---- dropout -----------------------------------------------------------------------------------


@rule("Dropout", stops=(1, 2), notes="training or not; the mask output is added where missing")
def dropout(op: Ops, node: ir.Node, dy: ir.Value | None, dmask: None = None) -> Cotangents:
    """Dx = dy / (1 - ratio) where the mask kept x; the identity outside training."""
    training = node.inputs[2] if len(node.inputs) > 2 else None
    known = constant_array(training)
    if dy is None or training is None or (known is not None and not known.any()):
        return (dy,)
    scale = _dropout_scale(op, node, dy)
    if known is None:  # decided at run time; out of training the mask is all true
        scale = op.Where(training, scale, op.const(1.0, dy.dtype))
    return (op.select(_dropout_mask(op, node), dy * scale, of=node.outputs[0]),)


def _dropout_scale(op: Ops, node: ir.Node, dy: ir.Value) -> ir.Value:
    ratio = node.inputs[1]
    if ratio is None:
        return op.const(2.0, dy.dtype)
    known = constant_array(ratio)
    if known is not None:
        keep = 1.0 - float(known)
        return op.const(1.0 / keep if keep else 0.0, dy.dtype)
    return op.Reciprocal(1.0 - op.cast(ratio, dy.dtype))


def _dropout_mask(op: Ops, node: ir.Node) -> ir.Value:
    if len(node.outputs) < 2:
        node.resize_outputs(2)
    mask = node.outputs[1]
    if not mask.name:
        mask.name = op.names.fresh(f"{node.outputs[0].name}_mask")
    mask.dtype = ir.DataType.BOOL
    return op.shape_as(mask, node.outputs[0])
