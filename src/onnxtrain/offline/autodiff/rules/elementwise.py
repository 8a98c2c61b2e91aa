"""Rules for operators that act on each element by itself.

Masks select with Where instead of multiplying, because 0 * inf is nan; where a mask can be taken
from the output of the forward operator, it is, so that the input need not be kept.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import TypeVar

import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import Cotangents, optional, required, rule
from onnxtrain.offline.graph.kernels import mark_kernel
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import constant_array, is_float, is_half, working_type
from onnxtrain.offline.graph.writer import attributes_of

F = TypeVar("F", bound=Callable[..., ir.Value])

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
    a, b = required(node, 2)
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
    operands, y = required(node, len(node.inputs)), node.outputs[0]
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


def unary(
    *op_types: str, notes: str = "", kernel: str = "", reads: str = "x", forward: str = ""
) -> Callable[[F], F]:
    """Register dx of a function y of x alone, as `formula(op, x, y, dy, **attributes)`.

    The formula has the defaults of the attributes. `kernel` names a native kernel of the gradient,
    which takes dy and `reads`, "x" or "y"; `forward` names one of the function itself.
    """

    def register(formula: F) -> F:
        parameters = inspect.signature(formula).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}

        @rule(*op_types, notes=notes)
        def differentiate(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
            (x,), y, given = required(node), node.outputs[0], attributes_of(node)
            attributes = {**defaults, **given}
            if forward:
                mark_kernel([node], forward, [x], [y], **attributes)

            def write() -> list[ir.Value]:
                return [formula(op, x, y, dy, **given)]

            inputs = [dy, y if reads == "y" else x]
            (dx,) = op.kernel(kernel, inputs, write, **attributes) if kernel else write()
            return (op.keep_zeros(dx, dy),)

        return formula

    return register


unary("Identity")(lambda op, x, y, dy: dy)
unary("Neg")(lambda op, x, y, dy: -dy)
unary("Abs", notes="0 at 0")(lambda op, x, y, dy: dy * op.Sign(x))
unary("Reciprocal")(lambda op, x, y, dy: -(dy * y * y))
unary("Sqrt")(lambda op, x, y, dy: dy * 0.5 / y)
unary("Exp")(lambda op, x, y, dy: dy * y)
unary("Log")(lambda op, x, y, dy: dy / x)
unary("Sin")(lambda op, x, y, dy: dy * op.Cos(x))
unary("Cos")(lambda op, x, y, dy: -(dy * op.Sin(x)))
unary("Tan")(lambda op, x, y, dy: dy * (y * y + 1.0))
unary("Asin")(lambda op, x, y, dy: dy / op.Sqrt(1.0 - x * x))
unary("Acos")(lambda op, x, y, dy: -(dy / op.Sqrt(1.0 - x * x)))
unary("Atan")(lambda op, x, y, dy: dy / (x * x + 1.0))
unary("Sinh")(lambda op, x, y, dy: dy * op.Cosh(x))
unary("Cosh")(lambda op, x, y, dy: dy * op.Sinh(x))
unary("Tanh", kernel="TanhGrad", reads="y")(lambda op, x, y, dy: dy * (1.0 - y * y))
unary("Asinh")(lambda op, x, y, dy: dy / op.Sqrt(x * x + 1.0))
unary("Acosh")(lambda op, x, y, dy: dy / op.Sqrt(x * x - 1.0))
unary("Atanh")(lambda op, x, y, dy: dy / (1.0 - x * x))
unary("Erf")(lambda op, x, y, dy: dy * (2.0 / math.sqrt(math.pi)) * op.Exp(-(x * x)))


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
    x, y, low, high = *required(node), node.outputs[0], optional(node, 1), optional(node, 2)
    if (kernel := _clip_kernel(node)) is not None:
        kind, (least, most) = kernel
        read = y if kind == "ClipInsideGrad" else x

        def write() -> list[ir.Value]:
            return [op.select(_inside(op, node, x, y), dy, of=y)]

        return op.kernel(kind, [dy, read], write, low=least, high=most)
    if is_half(x):
        x = op.cast(x, working_type(x))
        low, high = (None if v is None else op.cast(v, working_type(v)) for v in (low, high))
        y = op.Clip(x, low, high)
    untouched = op.Equal(x, y)
    inside = _inside(op, node, x, y) if _is_relu6(node) else untouched
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


def _inside(op: Ops, node: ir.Node, x: ir.Value, y: ir.Value) -> ir.Value:
    """Tell where the gradient of Clip passes."""
    if _is_relu6(node):
        return op.And(op.Greater(y, 0.0), op.Less(y, 6.0))
    return op.Equal(x, y)


def _is_relu6(node: ir.Node) -> bool:
    return _bounds(node) == (0.0, 6.0)


def _clip_kernel(node: ir.Node) -> tuple[str, tuple[float, float]] | None:
    """Return the kernel of a gradient that goes to x alone, and its bounds: both are known."""
    if any(v is not None and constant_array(v) is None for v in node.inputs[1:3]):
        return None
    known = [*_bounds(node), None, None]
    low = -math.inf if known[0] is None else known[0]
    high = math.inf if known[1] is None else known[1]
    if not low <= high or is_half(required(node)[0]):
        return None
    return "ClipInsideGrad" if _is_relu6(node) else "ClipGrad", (low, high)


def _bounds(node: ir.Node) -> tuple[float | None, ...]:
    known = [constant_array(v) for v in node.inputs[1:3]]
    return tuple(None if a is None or a.size != 1 else float(a.reshape(())) for a in known)


@rule("CastLike", stops=(1,), notes="between floating types")
def cast_like(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """The cotangent is cast back."""
    return (op.cast(dy, required(node)[0].dtype),)
