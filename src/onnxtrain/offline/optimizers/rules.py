"""The optimizers: a class with a formula each.

p, g, m, v are the parameter, its gradient and its states. onnxruntime does not fuse element-wise
operators, so every operator on a tensor is a pass over memory. Numbers are therefore multiplied
with numbers first: a chain of separate transforms (scale by Adam, decay, scale by the learning
rate) would need more passes. Each class says how many it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import onnx_ir as ir

from onnxtrain.errors import BlockError
from onnxtrain.offline.optimizers.clip import GradientClip
from onnxtrain.offline.optimizers.optimizer import Optimizer
from onnxtrain.offline.optimizers.update_context import (
    Number,
    ParameterGroup,
    UpdateContext,
    at_least_zero,
    below_one,
)
from onnxtrain.offline.optimizers.update_writer import Formula

Values = Sequence[ir.Value]
Settings = dict[str, int | float]
Flavour = Literal["huggingface", "torch"]


class AdamW(Optimizer):
    """Adam with decoupled weight decay, 12 passes (13 with decay).

    m' = b1·m + (1−b1)·g,  v' = b2·v + (1−b2)·g²,  c1 = 1−b1^t,  c2 = √(1−b2^t)

    - flavour "huggingface", which is that of ONNX Runtime's training API:
      p' = (p − rate·c2/c1 · m' / (√v' + eps)) · (1 − rate·decay)
    - flavour "torch":
      p' = p·(1 − rate·decay) − rate·c2/c1 · m' / (√v' + eps·c2)

    Without bias correction c1 = c2 = 1. `AdamW.torch()` has torch's default settings as well.

    The states are the plain m and v, as in checkpoints of ONNX Runtime. Sums without the factors
    (1−b1) and (1−b2) would save two passes: for 4.7 million parameters and one thread (median of
    40 on a busy machine) 20.6 ms instead of 25.0, but chunked only 13.2 instead of 14.1.
    """

    initial = (0.0, 0.0)
    squares = True

    def __init__(
        self,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        clip_grad: GradientClip | None = None,
        *,
        groups: Sequence[ParameterGroup] = (),
        flavour: Flavour = "huggingface",
    ) -> None:
        super().__init__(weight_decay, clip_grad, groups)
        if flavour not in ("huggingface", "torch"):
            raise BlockError(f"flavour is {flavour!r}; there are 'huggingface' and 'torch'")
        self.bias_correction = bias_correction
        self.betas = below_one("betas", *betas)
        self.eps = at_least_zero("eps", eps)
        self.flavour = flavour

    @classmethod
    def torch(
        cls,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        clip_grad: GradientClip | None = None,
        *,
        groups: Sequence[ParameterGroup] = (),
    ) -> AdamW:
        """Return the equivalent of torch.optim.AdamW, with the same defaults."""
        return cls(True, betas, eps, weight_decay, clip_grad, groups=groups, flavour="torch")

    def kernel(self, weight_decay: float) -> Settings:
        """Return the attributes of the native kernel."""
        flavour = {"as_torch": int(self.flavour == "torch")}
        return (
            _adam_settings(self.betas, self.eps)
            | flavour
            | {"bias_correction": int(self.bias_correction)}
        )

    def formula(self, ctx: UpdateContext) -> Formula:
        """Return the update above."""
        torch = self.flavour == "torch"
        adam = _adam(ctx, self.betas, self.eps, self.bias_correction, torch)
        keep = _keep(ctx)

        def update(p: ir.Value, g: ir.Value, m: ir.Value, v: ir.Value) -> Values:
            change, m, v = adam(g, m, v)
            if torch:
                return ctx.scale(p, keep) - change, m, v
            return ctx.scale(p - change, keep), m, v

        return update


class Adam(Optimizer):
    """Adam as in torch, with weight decay as a part of the gradient: 12 passes (14 with decay).

    g' = g + decay·p, and then as AdamW of flavour "torch" without decay.
    """

    initial = (0.0, 0.0)
    squares = True

    def __init__(
        self,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        clip_grad: GradientClip | None = None,
        *,
        groups: Sequence[ParameterGroup] = (),
    ) -> None:
        super().__init__(weight_decay, clip_grad, groups)
        self.betas = below_one("betas", *betas)
        self.eps = at_least_zero("eps", eps)

    def kernel(self, weight_decay: float) -> Settings:
        """Return the attributes of the native kernel."""
        return _adam_settings(self.betas, self.eps)

    def formula(self, ctx: UpdateContext) -> Formula:
        """Return the update above."""
        decayed, ctx = _decayed(ctx)
        adam = _adam(ctx, self.betas, self.eps, bias_correction=True, torch=True)

        def update(p: ir.Value, g: ir.Value, m: ir.Value, v: ir.Value) -> Values:
            change, m, v = adam(decayed(p, g), m, v)
            return p - change, m, v

        return update


class SGD(Optimizer):
    """Gradient descent, 2 passes; with momentum as in torch, 4 (6 with Nesterov's).

    g' = g + decay·p,  m' = momentum·m + (1−dampening)·g',  m' = g' in the first step,
    p' = p − rate·m';  with Nesterov's momentum p' = p − rate·(g' + momentum·m')

    Without momentum there is no state.
    """

    def __init__(
        self,
        clip_grad: GradientClip | None = None,
        *,
        momentum: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        groups: Sequence[ParameterGroup] = (),
    ) -> None:
        super().__init__(weight_decay, clip_grad, groups)
        self.momentum = at_least_zero("momentum", momentum)
        self.dampening, self.nesterov = dampening, nesterov
        if nesterov and (not momentum or dampening):
            raise BlockError("Nesterov's momentum needs a momentum, and no dampening")
        self.initial = (0.0,) if momentum else ()

    def kernel(self, weight_decay: float) -> Settings:
        """Return the attributes of the native kernel."""
        return {
            "momentum": float(self.momentum),
            "dampening": float(self.dampening),
            "nesterov": int(self.nesterov),
        }

    def formula(self, ctx: UpdateContext) -> Formula:
        """Return the update above."""
        if self.momentum:
            return self._with_momentum(ctx)
        rate, keep = ctx.gradient_factor(ctx.rate), _keep(ctx)
        return lambda p, g: (ctx.scale(p, keep) - ctx.scale(g, rate),)

    def _with_momentum(self, ctx: UpdateContext) -> Formula:
        part: Number = 1.0
        if self.dampening:
            # m is zero before the first step, where the factor 1 makes m' = g'
            double = ir.DataType.DOUBLE
            first = ctx.op.Equal(ctx.step, 1.0)
            one, rest = (ctx.op.const(n, double) for n in (1.0, 1.0 - self.dampening))
            part = ctx.op.Where(first, one, rest)
        of_gradient = ctx.gradient_factor(part)
        of_weight = ctx.number(part * ctx.weight_decay) if ctx.weight_decay else None
        rate = ctx.number(ctx.rate)

        def update(p: ir.Value, g: ir.Value, m: ir.Value) -> Values:
            g = ctx.scale(g, of_gradient)
            if of_weight is not None:
                g = g + ctx.scale(p, of_weight)
            m = ctx.scale(m, self.momentum) + g
            change = g + ctx.scale(m, self.momentum) if self.nesterov else m
            return p - ctx.scale(change, rate), m

        return update


class RMSprop(Optimizer):
    """RMSprop as in torch: 9 passes, 11 with momentum, 15 centered.

    g' = g + decay·p,  v' = alpha·v + (1−alpha)·g'²,  d = √v' + eps,  p' = p − rate·g'/d

    - centered: a' = alpha·a + (1−alpha)·g',  d = √(v' − a'²) + eps
    - with momentum: b' = momentum·b + g'/d,  p' = p − rate·b'

    The states are v, then b with momentum, then a if centered.
    """

    squares = True

    def __init__(
        self,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        clip_grad: GradientClip | None = None,
        *,
        groups: Sequence[ParameterGroup] = (),
    ) -> None:
        super().__init__(weight_decay, clip_grad, groups)
        (self.alpha,) = below_one("alpha", alpha)
        self.eps = at_least_zero("eps", eps)
        self.momentum = at_least_zero("momentum", momentum)
        self.centered = centered
        self.initial = (0.0,) * (1 + bool(momentum) + centered)

    def kernel(self, weight_decay: float) -> Settings:
        """Return the attributes of the native kernel."""
        return {
            "alpha": float(self.alpha),
            "one_minus_alpha": 1.0 - self.alpha,
            "epsilon": float(self.eps),
            "momentum": float(self.momentum),
            "centered": int(self.centered),
        }

    def formula(self, ctx: UpdateContext) -> Formula:
        """Return the update above."""
        op, alpha = ctx.op, self.alpha
        decayed, ctx = _decayed(ctx)
        to_square = ctx.gradient_factor((1 - alpha) ** 0.5)
        to_mean = ctx.gradient_factor(1 - alpha)
        # The factor that clips is part of the rate, unless g/d is added to a momentum first.
        to_quotient = ctx.gradient_factor(1.0)
        rate = ctx.number(ctx.rate) if self.momentum else ctx.gradient_factor(ctx.rate)

        def update(p: ir.Value, g: ir.Value, v: ir.Value, *more: ir.Value) -> Values:
            others = list(more)
            g = decayed(p, g)
            root = ctx.scale(g, to_square)
            v = ctx.scale(v, alpha) + root * root
            spread, tail = v, []
            if self.centered:
                mean = ctx.scale(others.pop(), alpha) + ctx.scale(g, to_mean)
                # below zero only by rounding, where torch returns nan
                spread, tail = op.Max(v - mean * mean, 0.0), [mean]
            change = g / (op.Sqrt(spread) + self.eps)
            if self.momentum:
                change = ctx.scale(others.pop(), self.momentum) + ctx.scale(change, to_quotient)
                tail = [change, *tail]
            return p - ctx.scale(change, rate), v, *tail

        return update


class Adagrad(Optimizer):
    """Adagrad as in torch: 7 passes, 8 with an initial value.

    g' = g + decay·p,  v' = v + g'²,
    p' = p − rate / (1 + (t−1)·lr_decay) · g' / (√(v' + initial) + eps)

    The initial value is not part of v, which is zero before the first step, as all states are.
    """

    initial = (0.0,)
    squares = True

    def __init__(
        self,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        clip_grad: GradientClip | None = None,
        *,
        groups: Sequence[ParameterGroup] = (),
    ) -> None:
        super().__init__(weight_decay, clip_grad, groups)
        self.lr_decay = at_least_zero("lr_decay", lr_decay)
        self.eps = at_least_zero("eps", eps)
        self.initial_accumulator_value = at_least_zero(
            "initial_accumulator_value", initial_accumulator_value
        )

    def kernel(self, weight_decay: float) -> Settings:
        """Return the attributes of the native kernel."""
        return {
            "rate_decay": float(self.lr_decay),
            "initial": float(self.initial_accumulator_value),
            "epsilon": float(self.eps),
        }

    def formula(self, ctx: UpdateContext) -> Formula:
        """Return the update above."""
        op = ctx.op
        decayed, ctx = _decayed(ctx)
        rate = ctx.number(
            ctx.rate / (1.0 + (ctx.step - 1.0) * self.lr_decay) if self.lr_decay else ctx.rate
        )
        clip = ctx.gradient_factor(1.0)

        def update(p: ir.Value, g: ir.Value, v: ir.Value) -> Values:
            g = ctx.scale(decayed(p, g), clip)
            v = v + g * g
            total = v + self.initial_accumulator_value if self.initial_accumulator_value else v
            return p - ctx.scale(g / (op.Sqrt(total) + self.eps), rate), v

        return update


class Lion(Optimizer):
    """Lion: the sign of a momentum, 8 passes (9 with decay).

    p' = p·(1 − rate·decay) − rate·sign(b1·m + (1−b1)·g),  m' = b2·m + (1−b2)·g
    """

    initial = (0.0,)

    def __init__(
        self,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        clip_grad: GradientClip | None = None,
        *,
        groups: Sequence[ParameterGroup] = (),
    ) -> None:
        super().__init__(weight_decay, clip_grad, groups)
        self.betas = below_one("betas", *betas)
        if 0.0 in self.betas:
            raise BlockError(f"betas is {betas}; Lion needs both above zero")

    def kernel(self, weight_decay: float) -> Settings:
        """Return the attributes of the native kernel."""
        b1, b2 = self.betas
        return {
            "beta2": float(b2),
            "one_minus_beta2": 1.0 - b2,
            "gradient_to_sign": (1 - b1) * b2 / b1,
        }

    def formula(self, ctx: UpdateContext) -> Formula:
        """Return the update above.

        The sign of b2/b1 times its argument is the same, and b2·m is then common to both results:
        m is read once.
        """
        b1, b2 = self.betas
        to_sign = ctx.gradient_factor((1 - b1) * b2 / b1)
        to_m = ctx.gradient_factor(1 - b2)
        rate, keep = ctx.number(ctx.rate), _keep(ctx)

        def update(p: ir.Value, g: ir.Value, m: ir.Value) -> Values:
            m = ctx.scale(m, b2)
            sign = ctx.op.Sign(m + ctx.scale(g, to_sign))
            return ctx.scale(p, keep) - ctx.scale(sign, rate), m + ctx.scale(g, to_m)

        return update


def _adam(
    ctx: UpdateContext, betas: tuple[float, ...], eps: float, bias_correction: bool, torch: bool
) -> Formula:
    """Return a function of g, m, v that returns `change, m', v'`, where p' = p − change."""
    op, (b1, b2) = ctx.op, betas
    to_m = ctx.gradient_factor(1 - b1)
    to_v = ctx.gradient_factor((1 - b2) ** 0.5)
    rate, least = ctx.number(ctx.rate), ctx.number(eps)
    if bias_correction:
        c1, c2 = 1.0 - ctx.power(b1), op.Sqrt(1.0 - ctx.power(b2))
        rate = ctx.number(ctx.rate * c2 / c1)
        least = ctx.number(c2 * eps if torch else eps)

    def update(g: ir.Value, m: ir.Value, v: ir.Value) -> Values:
        m = ctx.scale(m, b1) + ctx.scale(g, to_m)
        root = ctx.scale(g, to_v)
        v = ctx.scale(v, b2) + root * root
        return ctx.scale(m / (op.Sqrt(v) + least), rate), m, v

    return update


def _adam_settings(betas: tuple[float, ...], eps: float) -> Settings:
    """Return the attributes of the kernels; one minus a number keeps digits that it lacks."""
    b1, b2 = map(float, betas)
    rest = {"one_minus_beta1": 1.0 - b1, "one_minus_beta2": 1.0 - b2}
    return {"beta1": b1, "beta2": b2, **rest, "epsilon": float(eps)}


def _keep(ctx: UpdateContext) -> Number:
    """Return 1 − rate·decay, the factor of decoupled weight decay."""
    return ctx.number(1.0 - ctx.rate * ctx.weight_decay) if ctx.weight_decay else 1.0


def _decayed(ctx: UpdateContext) -> tuple[Callable[[ir.Value, ir.Value], ir.Value], UpdateContext]:
    """Return `g + decay·p` as a function of p and g, and the context for the rest of the formula.

    The sum needs the clipped gradient. Without decay, clipping is left to the numbers.
    """
    if not ctx.weight_decay:
        return (lambda p, g: g), ctx
    clip = ctx.gradient_factor(1.0)
    decay = ctx.weight_decay
    return (lambda p, g: ctx.scale(g, clip) + ctx.scale(p, decay)), replace(ctx, clip=None)
