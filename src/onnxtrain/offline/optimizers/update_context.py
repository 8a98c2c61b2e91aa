"""UpdateContext: the numbers of a step that a formula uses, for the parameters of one group.

They are computed once for each group, in float64: for a small t, 1 − 0.999^t has three good digits
in float32. What tensors are multiplied by is then rounded once, to their type.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

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
