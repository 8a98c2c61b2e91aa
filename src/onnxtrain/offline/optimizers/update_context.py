"""Parameter groups, and UpdateContext: the numbers of a step that the formula of a group uses.

They are computed once for each group, in float64: for a small t, 1 − 0.999^t has three good digits
in float32. What tensors are multiplied by is then rounded once, to their type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import onnx_ir as ir

from onnxtrain.errors import BlockError, UnknownNameError
from onnxtrain.offline.graph.ops import Ops

Number = float | ir.Value  # known beforehand, or a float64 scalar at run time


@dataclass(frozen=True)
class UpdateContext:
    """The numbers of a step, as scalars of type float64, and how a formula uses them."""

    op: Ops
    dtype: ir.DataType  # that the formula computes in
    rate: ir.Value  # the learning rate of the group
    step: ir.Value  # 1.0 in the first step
    weight_decay: float
    clip: ir.Value | None  # a factor that gradients still lack

    def power(self, base: float) -> ir.Value:
        """Return base^step."""
        return self.op.Pow(self.op.const(base, ir.DataType.DOUBLE), self.step)

    def number(self, number: Number) -> Number:
        """Return a number in the type that the formula computes in."""
        return self.op.cast(number, self.dtype) if isinstance(number, ir.Value) else number

    def gradient_factor(self, number: Number) -> Number:
        """Return a number that gradients are multiplied by, with the clipping in it."""
        if self.clip is not None:
            number = self.clip if number == 1.0 else self.op.Mul(self.clip, number)
        return self.number(number)

    def scale(self, tensor: ir.Value, number: Number) -> ir.Value:
        """Return a tensor times a number of this context; times one writes nothing."""
        is_one = not isinstance(number, ir.Value) and number == 1.0
        return tensor if is_one else self.op.Mul(tensor, number)


@dataclass(frozen=True)
class ParameterGroup:
    """Settings for the parameters whose names match a pattern, or one of several.

    Args:
        pattern: names with `*`, `?` and `[...]`, as in file names: `"*.bias"`.
        weight_decay: overrides that of the optimizer; None keeps it.
        lr_scale: the learning rate of the group is this times that of the step.

    """

    pattern: str | Sequence[str]
    weight_decay: float | None = None
    lr_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("weight_decay", "lr_scale"):
            if (getattr(self, name) or 0) < 0:
                raise BlockError(f"{name} of a group is {getattr(self, name)}, which is below zero")

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns as a tuple."""
        return (self.pattern,) if isinstance(self.pattern, str) else tuple(self.pattern)


def settings_of(
    groups: Sequence[ParameterGroup], weight_decay: float, names: Sequence[str]
) -> list[tuple[float, float]]:
    """Return weight decay and rate factor of each parameter, from the first group that matches."""
    for group in groups:
        for pattern in group.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UnknownNameError(
                    f"the parameter group {pattern!r} matches no trainable parameter; there are "
                    f"{', '.join(map(repr, names))}"
                )
    found = []
    for name in names:
        matching = (g for g in groups if any(fnmatchcase(name, p) for p in g.patterns))
        group = next(matching, ParameterGroup(name))
        own = group.weight_decay
        found.append((weight_decay if own is None else own, group.lr_scale))
    return found


def at_least_zero(name: str, number: float) -> float:
    """Return a setting that must not be negative."""
    if not number >= 0:
        raise BlockError(f"{name} is {number}; it must not be below zero")
    return number


def below_one(name: str, *numbers: float) -> tuple[float, ...]:
    """Return settings that must be at least 0 and below 1."""
    if not all(0 <= number < 1 for number in numbers):
        raise BlockError(f"{name} is {numbers}; it must be at least 0 and below 1")
    return numbers
