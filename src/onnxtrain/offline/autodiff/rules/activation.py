"""Rules for activation functions, and for Dropout.

Piecewise functions select by a mask; smooth ones use the forward output where it serves.
"""

from __future__ import annotations

import math
from functools import partial

import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import Cotangents, optional, output_of, required, rule
from onnxtrain.offline.autodiff.rules.elementwise import unary
from onnxtrain.offline.graph.kernels import mark_kernel
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import constant_array, static_dims

# ---- piecewise linear --------------------------------------------------------------------------

# The mask comes from the output where it can, so that the input need not be kept.
unary("Relu", notes="0 at 0", kernel="ReluGrad", reads="y")(
    lambda op, x, y, dy: op.select(op.Greater(y, 0.0), dy, of=y)
)
unary("LeakyRelu", notes="alpha at 0; alpha may be negative", kernel="LeakyReluGrad")(
    lambda op, x, y, dy, alpha=0.01: op.Where(op.Greater(x, 0.0), dy, dy * alpha)
)
unary("ThresholdedRelu", notes="0 at alpha")(
    lambda op, x, y, dy, alpha=1.0: op.select(op.Greater(x, alpha), dy, of=y)
)
unary("Shrink", notes="0 at ±lambd")(
    lambda op, x, y, dy, lambd=0.5, bias=0.0: op.select(op.Greater(op.Abs(x), lambd), dy, of=y)
)
unary("HardSigmoid", notes="0 at both ends", kernel="HardSigmoidGrad", reads="y")(
    lambda op, x, y, dy, alpha=0.2, beta=0.5: op.select(
        op.And(op.Greater(y, 0.0), op.Less(y, 1.0)), dy * alpha, of=y
    )
)


@rule("PRelu", notes="slope at 0")
def prelu(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """Dx = dy where x > 0, slope dy elsewhere; dslope = x dy where x ≤ 0."""
    x, slope = required(node, 2)

    def write() -> list[ir.Value]:
        positive = op.Greater(x, 0.0)
        dslope = op.sum_to(op.Where(positive, 0.0, dy * x), slope)
        return [op.Where(positive, dy, dy * slope), dslope]

    sizes = static_dims(slope)
    # The kernel is for a slope for each channel, which has elements behind it, or for all.
    if sizes is None or sum(size != 1 for size in sizes) > 1 or sizes[-1:] not in ((), (1,)):
        return tuple(write())
    return tuple(op.kernel("PReluGrad", [dy, x, slope], write))


@unary("HardSwish", notes="0 at -3, 1 at 3", kernel="HardSwishGrad", forward="HardSwish")
def hard_swish(op: Ops, x: ir.Value, y: ir.Value, dy: ir.Value) -> ir.Value:
    """Dx = (x/3 + 1/2) dy between -3 and 3, 0 below, dy above."""
    slope = op.Where(op.Less(x, 3.0), op.Mul(x, 1.0 / 3.0) + 0.5, 1.0)
    return op.Where(op.Greater(x, -3.0), dy * slope, 0.0)


# ---- exponential -------------------------------------------------------------------------------

unary("Sigmoid", kernel="SigmoidGrad", reads="y")(lambda op, x, y, dy: dy * y * (1.0 - y))
unary("Softplus", kernel="SoftplusGrad", forward="Softplus")(
    lambda op, x, y, dy: dy * op.Sigmoid(x)
)


@unary("Softsign")
def softsign(op: Ops, x: ir.Value, y: ir.Value, dy: ir.Value) -> ir.Value:
    """d x/(1 + |x|) = dx / (1 + |x|)²."""
    base = op.Abs(x) + 1.0
    return op.Div(dy, base * base)


@unary("Elu", kernel="EluGrad", forward="Elu")
def elu(
    op: Ops, x: ir.Value, y: ir.Value, dy: ir.Value, alpha: float = 1.0, gamma: float = 1.0
) -> ir.Value:
    """Y = gamma alpha (exp(x) - 1) below 0, so dx = (y + gamma alpha) dy there; gamma dy above."""
    above = dy if gamma == 1.0 else dy * gamma
    below = dy * (y + alpha * gamma)
    return op.Where(op.Greater(x, 0.0), above, below)


unary("Selu", kernel="EluGrad", forward="Elu")(
    partial(elu, alpha=1.67326319217681884765625, gamma=1.05070102214813232421875)
)


@unary("Celu", kernel="CeluGrad")
def celu(op: Ops, x: ir.Value, y: ir.Value, dy: ir.Value, alpha: float = 1.0) -> ir.Value:
    """Y = alpha (exp(x/alpha) - 1) below 0, so dx = (y/alpha + 1) dy there."""
    below = dy * (y * (1.0 / alpha) + 1.0)
    return op.Where(op.Greater(x, 0.0), dy, below)


@unary("Mish", kernel="MishGrad", forward="Mish")
def mish(op: Ops, x: ir.Value, y: ir.Value, dy: ir.Value) -> ir.Value:
    """With t = tanh(softplus(x)): y = x t, dx = (t + x (1 - t²) sigmoid(x)) dy."""
    t = op.Tanh(op.Softplus(x))
    return op.Mul(dy, t + x * op.Sigmoid(x) * (1.0 - t * t))


@unary("Swish", kernel="SwishGrad", forward="Swish")
def swish(op: Ops, x: ir.Value, y: ir.Value, dy: ir.Value, alpha: float = 1.0) -> ir.Value:
    """With s = sigmoid(alpha x): y = x s, dx = (s + alpha y (1 - s)) dy."""
    s = op.Sigmoid(x if alpha == 1.0 else x * alpha)
    scaled = y if alpha == 1.0 else y * alpha
    return op.Mul(dy, s + scaled * (1.0 - s))


@unary("Gelu", notes="both approximations, each with its own derivative")
def gelu(op: Ops, x: ir.Value, y: ir.Value, dy: ir.Value, approximate: str = "none") -> ir.Value:
    """d x Φ(x) = (Φ(x) + x φ(x)) dx, and for the tanh form, with u = k (x + c x³), t = tanh(u).

    Y = x (1 + t)/2, so dx = (1 + t + x (1 - t²) u')/2 dy.
    """
    node = y.producer()
    assert node is not None
    if approximate == "none":
        mark_kernel([node], "Gelu", [x], [y])
        return gelu_cotangent(op, x, dy)
    mark_kernel([node], "GeluTanh", [x], [y])

    def write() -> list[ir.Value]:
        k, c = math.sqrt(2.0 / math.pi), 0.044715
        square = x * x
        t = op.Tanh(x * (square * (k * c) + k))
        inner = x * (square * (3.0 * k * c) + k)
        return [op.Mul(dy, (t + 1.0 + inner * (1.0 - t * t)) * 0.5)]

    dx: ir.Value = op.kernel("GeluTanhGrad", [dy, x], write)[0]
    return dx


def gelu_cotangent(op: Ops, x: ir.Value, dy: ir.Value) -> ir.Value:
    """With a = -x/√2: dx = dy (1 - (erf(a) + a exp(-a²) 2/√π)) / 2.

    Divided by exp(a²), which takes a pass less and is right where that is infinite. The sign is for
    onnxruntime, which would share x/√2 with the forward pass, and then neither fuse nor free it.
    """

    def write() -> list[ir.Value]:
        a = op.Mul(x, -math.sqrt(0.5))
        bell = op.Div(a, op.Exp(op.Mul(a, a)))
        slope = 1.0 - (op.Erf(a) + bell * (2.0 / math.sqrt(math.pi)))
        return [op.Mul(dy * slope, 0.5)]

    dx: ir.Value = op.kernel("GeluGrad", [dy, x], write)[0]
    return dx


# ---- dropout -----------------------------------------------------------------------------------


@rule("Dropout", stops=(1, 2), notes="training or not; the mask output is added where missing")
def dropout(op: Ops, node: ir.Node, dy: ir.Value | None, dmask: None = None) -> Cotangents:
    """Dx = dy / (1 - ratio) where the mask kept x; the identity outside training."""
    training = optional(node, 2)
    known = constant_array(training)
    if dy is None or training is None or (known is not None and not known.any()):
        return (dy,)
    scale = _dropout_scale(op, node, dy)
    if known is None:  # decided at run time; out of training the mask is all true
        scale = op.Where(training, scale, op.const(1.0, dy.dtype))
    mask = output_of(op, node, 1, "mask")
    mask.dtype = ir.DataType.BOOL
    op.shape_as(mask, node.outputs[0])
    return (op.select(mask, dy * scale, of=node.outputs[0]),)


def _dropout_scale(op: Ops, node: ir.Node, dy: ir.Value) -> ir.Value:
    ratio = node.inputs[1]
    if ratio is None:
        return op.const(2.0, dy.dtype)
    known = constant_array(ratio)
    if known is not None:
        keep = 1.0 - float(known)
        return op.const(1.0 / keep if keep else 0.0, dy.dtype)
    return op.Reciprocal(1.0 - op.cast(ratio, dy.dtype))
