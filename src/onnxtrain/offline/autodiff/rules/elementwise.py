"""Rules for operators that act on each element by itself.

Masks select with Where instead of multiplying, because 0 * inf is nan; where a mask can be taken
from the output of the forward operator, it is, so that the input need not be kept.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import Cotangents, rule
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import constant_array, is_float, is_half, working_type

# ---- arithmetic --------------------------------------------------------------------------------


@rule("Add", broadcasts=True)
def add(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """d(a + b) = da + db."""
    return dy, dy


@rule("Sub", broadcasts=True)
def sub(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """d(a - b) = da - db."""
    return dy, -dy


@rule("Mul", broadcasts=True)
def mul(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """d(a b) = b da + a db."""
    a, b = node.inputs
    return dy * b, dy * a


@rule("Div", broadcasts=True)
def div(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """d(a / b) = da / b - (a / b) db / b."""
    _, b = node.inputs
    da = dy / b
    return da, -(da * node.outputs[0])


@rule("Pow", broadcasts=True)
def pow_(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """d(a^b) = b a^(b-1) da + a^b log(a) db.

    The exponent may be of another type, integers included. Its derivative is taken as zero where
    the base is not positive, as the logarithm does not exist there.
    """
    a, b = node.inputs
    assert a is not None and b is not None
    exponent = op.cast(b, a.dtype)
    da = dy * exponent * op.Pow(a, exponent - 1.0)
    da = op.Where(op.Equal(exponent, 0.0), 0.0, da)  # 0 * 0^-1 is nan, the derivative is 0
    if not is_float(b):
        return da, None
    positive = op.Greater(a, 0.0)
    log_base = op.Log(op.Where(positive, a, 1.0))
    return da, op.cast(dy * node.outputs[0] * log_base, b.dtype)


@rule("Sum", broadcasts=True)
def sum_(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """Every operand has the cotangent of the sum."""
    return (dy,) * len(node.inputs)


@rule("Mean", broadcasts=True)
def mean(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """Every operand has its share of the cotangent."""
    count = len(node.inputs)
    return (dy if count == 1 else dy * (1.0 / count),) * count


@rule("Max", "Min", broadcasts=True, notes="ties share the gradient equally")
def extremum(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """The gradient goes to the operand that won, in equal parts where several did."""
    operands, y = [x for x in node.inputs if x is not None], node.outputs[0]
    if len(operands) == 1:
        return (dy,)
    if is_half(y):
        operands = [op.cast(x, working_type(x)) for x in operands]
        y = op.Max(*operands) if node.op_type == "Max" else op.Min(*operands)
    won = [op.Equal(x, y) for x in operands]
    ones = [op.Cast(w, to=dy.dtype) for w in won]
    share = dy / op.Sum(*ones)
    return tuple(op.Where(w, share, 0.0) for w in won)


@rule("Mod", broadcasts=True, notes="of the dividend, and of the divisor by the quotient")
def mod(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """a mod b = a - q b with q piecewise constant, so d = da - q db."""
    a, b = node.inputs
    quotient = op.Round((a - node.outputs[0]) / b)
    return dy, -(dy * quotient)


# ---- functions of one variable -----------------------------------------------------------------


@rule("Identity")
def identity(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """The identity."""
    return (dy,)


@rule("Neg")
def neg(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """d(-x) = -dx."""
    return (-dy,)


@rule("Abs", notes="0 at 0")
def abs_(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """d|x| = sign(x) dx."""
    return (dy * op.Sign(node.inputs[0]),)


@rule("Reciprocal")
def reciprocal(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """d(1/x) = -y² dx."""
    y = node.outputs[0]
    return (-(dy * y * y),)


@rule("Sqrt")
def sqrt(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """d√x = dx / 2y."""
    return (dy * 0.5 / node.outputs[0],)


@rule("Exp")
def exp(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """d exp(x) = y dx."""
    return (dy * node.outputs[0],)


@rule("Log")
def log(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """d log(x) = dx / x."""
    return (dy / node.inputs[0],)


@rule("Sin")
def sin(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """d sin(x) = cos(x) dx."""
    return (dy * op.Cos(node.inputs[0]),)


@rule("Cos")
def cos(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """d cos(x) = -sin(x) dx."""
    return (-(dy * op.Sin(node.inputs[0])),)


@rule("Tan")
def tan(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """d tan(x) = (1 + y²) dx."""
    y = node.outputs[0]
    return (dy * (y * y + 1.0),)


@rule("Asin", "Acos")
def arcsine(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """d asin(x) = dx / √(1 - x²), and the negative of it for acos."""
    dx = dy / op.Sqrt(1.0 - _square(op, node.inputs[0]))
    return (dx if node.op_type == "Asin" else -dx,)


@rule("Atan")
def atan(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """d atan(x) = dx / (1 + x²)."""
    return (dy / (_square(op, node.inputs[0]) + 1.0),)


@rule("Sinh")
def sinh(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """d sinh(x) = cosh(x) dx."""
    return (dy * op.Cosh(node.inputs[0]),)


@rule("Cosh")
def cosh(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """d cosh(x) = sinh(x) dx."""
    return (dy * op.Sinh(node.inputs[0]),)


@rule("Tanh")
def tanh(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """d tanh(x) = (1 - y²) dx."""
    return (dy * (1.0 - _square(op, node.outputs[0])),)


@rule("Asinh")
def asinh(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """d asinh(x) = dx / √(x² + 1)."""
    return (dy / op.Sqrt(_square(op, node.inputs[0]) + 1.0),)


@rule("Acosh")
def acosh(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """d acosh(x) = dx / √(x² - 1)."""
    return (dy / op.Sqrt(_square(op, node.inputs[0]) - 1.0),)


@rule("Atanh")
def atanh(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """d atanh(x) = dx / (1 - x²)."""
    return (dy / (1.0 - _square(op, node.inputs[0])),)


@rule("Erf")
def erf(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """d erf(x) = 2/√π exp(-x²) dx."""
    return (dy * (2.0 / math.sqrt(math.pi)) * op.Exp(-_square(op, node.inputs[0])),)


def _square(op: Ops, x: ir.Value | None) -> ir.Value:
    return op.Mul(x, x)


# ---- selection and conversion ------------------------------------------------------------------


@rule("Where", broadcasts=True)
def where(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """The gradient goes to the branch that was taken."""
    condition = node.inputs[0]
    return None, op.Where(condition, dy, 0.0), op.Where(condition, 0.0, dy)


@rule("Clip", notes="1 at the bounds; from 0 to 6 it is ReLU6, with 0 at the bounds")
def clip(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """The gradient passes where the bounds did not act; a bound has it from where it did.

    At a bound that is met exactly, torch passes it through clamp but not through relu6, and both
    are exported as Clip. Exact zeros are frequent only before the latter: behind a dead channel.
    """
    x, low, high, *_ = (*node.inputs, None, None)
    y = node.outputs[0]
    assert x is not None
    if is_half(x):
        x, low, high = (None if v is None else op.cast(v, working_type(v)) for v in (x, low, high))
        y = op.Clip(x, low, high)
    untouched = op.Equal(x, y)
    inside = untouched
    if _bounds(node) == (0.0, 6.0):
        inside = op.And(op.Greater(y, 0.0), op.Less(y, 6.0))
    dx = op.select(inside, dy, of=node.outputs[0])
    lowered = op.Not(untouched)
    dlow = dhigh = None
    if low is not None:
        # Not where the lower bound lies above the upper one: there, the upper one acts alone.
        raised = op.And(op.Less(x, y), op.Equal(y, low))
        lowered = op.And(lowered, op.Not(raised))
        dlow = op.sum_to(op.Where(raised, dy, 0.0), low)
    if high is not None:
        dhigh = op.sum_to(op.Where(lowered, dy, 0.0), high)
    return dx, dlow, dhigh


def _bounds(node: ir.Node) -> tuple[float | None, ...]:
    known = [constant_array(v) for v in node.inputs[1:3]]
    return tuple(None if a is None or a.size != 1 else float(a.reshape(())) for a in known)


@rule("Cast", notes="between floating types")
def cast(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """The cotangent is cast back."""
    x = node.inputs[0]
    assert x is not None
    return (op.cast(dy, x.dtype),)


@rule("CastLike", stops=(1,), notes="between floating types")
def cast_like(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """The cotangent is cast back."""
    return cast(op, node, dy)
