"""The update rules: a formula each.

p, g, m, v are the parameter, its gradient and what is kept for it. onnxruntime does not fuse
element-wise operators, so every operator on a tensor is a pass over memory: numbers are multiplied
with numbers first, and each formula says how few passes it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import onnx_ir as ir

from onnxtrain.errors import BlockError
from onnxtrain.offline.optimizers.clip import GradientClip
from onnxtrain.offline.optimizers.groups import ParameterGroup
from onnxtrain.offline.optimizers.optimizer import Optimizer, at_least_zero, below_one
from onnxtrain.offline.optimizers.update_context import Now, Number
from onnxtrain.offline.optimizers.writing import Formula

Values = Sequence[ir.Value]
Flavour = Literal["huggingface", "torch"]


class AdamW(Optimizer):
    """Adam with decoupled weight decay, 12 passes (13 with decay).

    m' = b1·m + (1−b1)·g,  v' = b2·v + (1−b2)·g²,  c1 = 1−b1^t,  c2 = √(1−b2^t)

    - flavour "huggingface", which is that of ONNX Runtime's training API:
      p' = (p − rate·c2/c1 · m' / (√v' + eps)) · (1 − rate·decay)
    - flavour "torch":
      p' = p·(1 − rate·decay) − rate·c2/c1 · m' / (√v' + eps·c2)

    Without bias correction c1 = c2 = 1. `AdamW.torch()` has the default numbers of torch too.

    The states are the plain m and v, as in checkpoints of ONNX Runtime. Sums without the factors
    (1−b1) and (1−b2) would save two passes. For 4.7 million parameters and one thread, median of 40
    on a busy machine: 20.6 ms instead of 25.0, but 13.2 instead of 14.1 in pieces.
    """

    initial = (0.0, 0.0)

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
        """Return what torch.optim.AdamW does, by default with its numbers."""
        return cls(True, betas, eps, weight_decay, clip_grad, groups=groups, flavour="torch")

    def formula(self, now: Now) -> Formula:
        """The formula of the class."""
        torch = self.flavour == "torch"
        adam = _adam(now, self.betas, self.eps, self.bias_correction, torch)
        keep = _keep(now)

        def update(p: ir.Value, g: ir.Value, m: ir.Value, v: ir.Value) -> Values:
            change, m, v = adam(g, m, v)
            if torch:
                return now.scaled(p, keep) - change, m, v
            return now.scaled(p - change, keep), m, v

        return update


class Adam(Optimizer):
    """Adam as in torch, with weight decay as a part of the gradient: 12 passes (14 with decay).

    g' = g + decay·p, and then as AdamW of flavour "torch" without decay.
    """

    initial = (0.0, 0.0)

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

    def formula(self, now: Now) -> Formula:
        """The formula of the class."""
        decayed, now = _decayed(now)
        adam = _adam(now, self.betas, self.eps, bias_correction=True, torch=True)

        def update(p: ir.Value, g: ir.Value, m: ir.Value, v: ir.Value) -> Values:
            change, m, v = adam(decayed(p, g), m, v)
            return p - change, m, v

        return update


class SGD(Optimizer):
    """Gradient descent, 2 passes; with momentum as in torch, 4 (6 with Nesterov's).

    g' = g + decay·p,  m' = momentum·m + (1−dampening)·g',  m' = g' in the first step,
    p' = p − rate·m';  with Nesterov's momentum p' = p − rate·(g' + momentum·m')

    Nothing is kept where momentum is zero.
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

    def formula(self, now: Now) -> Formula:
        """The formula of the class."""
        return self._with_momentum(now) if self.momentum else self._plain(now)

    def _plain(self, now: Now) -> Formula:
        rate, keep = now.rounded(now.clipped(now.rate)), _keep(now)
        return lambda p, g: (now.scaled(p, keep) - now.scaled(g, rate),)

    def _with_momentum(self, now: Now) -> Formula:
        part: Number = 1.0
        if self.dampening:
            # m is zero before the first step, so a factor makes m' = g'
            double = ir.DataType.DOUBLE
            first = now.op.Equal(now.step, 1.0)
            part = now.op.Where(
                first, now.op.const(1.0, double), now.op.const(1.0 - self.dampening, double)
            )
        of_gradient = now.rounded(now.clipped(part))
        of_weight = now.rounded(part * now.weight_decay) if now.weight_decay else None
        rate = now.rounded(now.rate)

        def update(p: ir.Value, g: ir.Value, m: ir.Value) -> Values:
            g = now.scaled(g, of_gradient)
            if of_weight is not None:
                g = g + now.scaled(p, of_weight)
            m = now.scaled(m, self.momentum) + g
            change = g + now.scaled(m, self.momentum) if self.nesterov else m
            return p - now.scaled(change, rate), m

        return update


class RMSprop(Optimizer):
    """RMSprop as in torch: 9 passes, 11 with momentum, 15 centered.

    g' = g + decay·p,  v' = alpha·v + (1−alpha)·g'²,  d = √v' + eps,  p' = p − rate·g'/d

    - centered: a' = alpha·a + (1−alpha)·g',  d = √(v' − a'²) + eps
    - with momentum: b' = momentum·b + g'/d,  p' = p − rate·b'

    It keeps v, then b where there is a momentum, then a where it is centered.
    """

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

    def formula(self, now: Now) -> Formula:
        """The formula of the class."""
        op, alpha = now.op, self.alpha
        decayed, now = _decayed(now)
        to_square = now.rounded(now.clipped((1 - alpha) ** 0.5))
        to_mean = now.rounded(now.clipped(1 - alpha))
        # The quotient g/d is clipped with the rate, unless it goes into the momentum before.
        to_quotient = now.rounded(now.clipped(1.0))
        rate = now.rounded(now.rate if self.momentum else now.clipped(now.rate))

        def update(p: ir.Value, g: ir.Value, v: ir.Value, *more: ir.Value) -> Values:
            others = list(more)
            g = decayed(p, g)
            root = now.scaled(g, to_square)
            v = now.scaled(v, alpha) + root * root
            spread, tail = v, []
            if self.centered:
                mean = now.scaled(others.pop(), alpha) + now.scaled(g, to_mean)
                # never below zero but for rounding, where torch gives nan
                spread, tail = op.Max(v - mean * mean, 0.0), [mean]
            change = g / (op.Sqrt(spread) + self.eps)
            if self.momentum:
                change = now.scaled(others.pop(), self.momentum) + now.scaled(change, to_quotient)
                tail = [change, *tail]
            return p - now.scaled(change, rate), v, *tail

        return update


class Adagrad(Optimizer):
    """Adagrad as in torch: 7 passes, 8 with an initial value.

    g' = g + decay·p,  v' = v + g'²,
    p' = p − rate / (1 + (t−1)·lr_decay) · g' / (√(v' + initial) + eps)

    The initial value is not in v, which therefore is zero before the first step, as all states are.
    """

    initial = (0.0,)

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

    def formula(self, now: Now) -> Formula:
        """The formula of the class."""
        op = now.op
        decayed, now = _decayed(now)
        rate = now.rounded(
            now.rate / (1.0 + (now.step - 1.0) * self.lr_decay) if self.lr_decay else now.rate
        )
        clip = now.rounded(now.clipped(1.0))

        def update(p: ir.Value, g: ir.Value, v: ir.Value) -> Values:
            g = now.scaled(decayed(p, g), clip)
            v = v + g * g
            total = v + self.initial_accumulator_value if self.initial_accumulator_value else v
            return p - now.scaled(g / (op.Sqrt(total) + self.eps), rate), v

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

    def formula(self, now: Now) -> Formula:
        """The formula of the class.

        The sign does not change when its argument is multiplied by b2/b1, which leaves b2·m in
        common: m is read once.
        """
        b1, b2 = self.betas
        to_sign = now.rounded(now.clipped((1 - b1) * b2 / b1))
        to_m = now.rounded(now.clipped(1 - b2))
        rate, keep = now.rounded(now.rate), _keep(now)

        def update(p: ir.Value, g: ir.Value, m: ir.Value) -> Values:
            m = now.scaled(m, b2)
            sign = now.op.Sign(m + now.scaled(g, to_sign))
            return now.scaled(p, keep) - now.scaled(sign, rate), m + now.scaled(g, to_m)

        return update


def _adam(
    now: Now, betas: tuple[float, ...], eps: float, bias_correction: bool, torch: bool
) -> Formula:
    """Return `change, m', v'` of g, m, v; the change is to be subtracted from the parameter."""
    op, (b1, b2) = now.op, betas
    to_m = now.rounded(now.clipped(1 - b1))
    to_v = now.rounded(now.clipped((1 - b2) ** 0.5))
    rate, least = now.rounded(now.rate), now.rounded(eps)
    if bias_correction:
        c1, c2 = 1.0 - now.power(b1), op.Sqrt(1.0 - now.power(b2))
        rate = now.rounded(now.rate * c2 / c1)
        least = now.rounded(c2 * eps if torch else eps)

    def update(g: ir.Value, m: ir.Value, v: ir.Value) -> Values:
        m = now.scaled(m, b1) + now.scaled(g, to_m)
        root = now.scaled(g, to_v)
        v = now.scaled(v, b2) + root * root
        return now.scaled(m / (op.Sqrt(v) + least), rate), m, v

    return update


def _keep(now: Now) -> Number:
    """Return 1 − rate·decay, which weights are multiplied by."""
    return now.rounded(1.0 - now.rate * now.weight_decay) if now.weight_decay else 1.0


def _decayed(now: Now) -> tuple[Callable[[ir.Value, ir.Value], ir.Value], Now]:
    """Return `g + decay·p` as a function of p and g, and the numbers for the rest of the formula.

    The sum needs the clipped gradient; without decay, clipping is left to the numbers.
    """
    if not now.weight_decay:
        return (lambda p, g: g), now
    clip = now.rounded(now.clipped(1.0))
    decay = now.weight_decay
    return (lambda p, g: now.scaled(g, clip) + now.scaled(p, decay)), replace(now, clip=None)
