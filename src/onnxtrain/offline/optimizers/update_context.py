"""Now: the numbers of the step that is being taken, for the parameters of one group.

They are computed once for each group, in float64: 1 − 0.999^t of a small t has three good digits
in float32. What a formula multiplies tensors by is then rounded once to their type.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.optimizers.groups import Settings

Number = float | ir.Value  # known beforehand, or a float64 scalar at run time


@dataclass(frozen=True)
class Now:
    """The numbers of a step: scalars of type float64."""

    op: Ops
    dtype: ir.DataType  # what the formula computes in
    rate: ir.Value  # the learning rate of the group
    step: ir.Value  # 1.0 in the first step
    weight_decay: float
    clip: ir.Value | None  # what gradients are to be multiplied by

    @classmethod
    def of(
        cls,
        op: Ops,
        dtype: ir.DataType,
        settings: Settings,
        rate: ir.Value,
        step: ir.Value,
        clip: ir.Value | None,
    ) -> Now:
        """Apply the settings of a group."""
        own = rate if settings.lr_scale == 1.0 else op.Mul(rate, settings.lr_scale)
        return cls(op, dtype, own, step, settings.weight_decay, clip)

    def power(self, base: float) -> ir.Value:
        """Return base^step."""
        return self.op.Pow(self.op.const(base, ir.DataType.DOUBLE), self.step)

    def clipped(self, number: Number) -> Number:
        """Return a factor for gradients, times the one that clips them."""
        if self.clip is None:
            return number
        return self.clip if number == 1.0 else self.op.Mul(self.clip, number)

    def rounded(self, number: Number) -> Number:
        """Return a number in the type that the formula computes in."""
        return self.op.cast(number, self.dtype) if isinstance(number, ir.Value) else number

    def scaled(self, tensor: ir.Value, number: Number) -> ir.Value:
        """Return a tensor times a number that `rounded` gave; times one is nothing."""
        if isinstance(number, ir.Value):
            return self.op.Mul(tensor, number)
        return tensor if number == 1.0 else self.op.Mul(tensor, number)
