"""Losses of numbers, element by element."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.errors import BlockError
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.losses.loss import Array, ElementwiseLoss, weights


class MSELoss(ElementwiseLoss):
    """(x - t)²."""

    def terms(self, op: Ops, x: ir.Value, target: ir.Value) -> ir.Value:
        """Write the squares."""
        difference = x - target
        return difference * difference


class L1Loss(ElementwiseLoss):
    """|x - t|."""

    def terms(self, op: Ops, x: ir.Value, target: ir.Value) -> ir.Value:
        """Write the absolute values."""
        return op.Abs(x - target)


class HuberLoss(ElementwiseLoss):
    """With d = |x - t|: d² / 2 up to `delta`, and delta · (d - delta / 2) above."""

    def __init__(self, reduction: str = "mean", delta: float = 1.0) -> None:
        super().__init__(reduction)
        if not delta > 0:
            raise BlockError(f"delta is {delta!r}; it must be above zero")
        self.delta = float(delta)

    def terms(self, op: Ops, x: ir.Value, target: ir.Value) -> ir.Value:
        """With c = min(d, delta), both cases are c · (d - c / 2)."""
        distance = op.Abs(x - target)
        near = op.Min(distance, self.delta)
        return near * (distance - near * 0.5)


class SmoothL1Loss(HuberLoss):
    """The Huber loss of delta = `beta`, divided by beta; the L1 loss for beta = 0."""

    def __init__(self, reduction: str = "mean", beta: float = 1.0) -> None:
        if beta < 0:
            raise BlockError(f"beta is {beta!r}; it must not be below zero")
        super().__init__(reduction, beta or 1.0)
        self.beta = float(beta)

    def terms(self, op: Ops, x: ir.Value, target: ir.Value) -> ir.Value:
        """Write the terms of the Huber loss, scaled."""
        if self.beta == 0:
            return op.Abs(x - target)
        return super().terms(op, x, target) * (1.0 / self.beta)


class BCEWithLogitsLoss(ElementwiseLoss):
    """Binary cross entropy of logits: -w (p t log s + (1 - t) log(1 - s)) with s = sigmoid(x).

    `weight` (w) scales every term, `pos_weight` (p) those of positive targets; both are broadcast
    to the shape of the logits.
    """

    def __init__(
        self,
        weight: Array | None = None,
        reduction: str = "mean",
        pos_weight: Array | None = None,
    ) -> None:
        super().__init__(reduction)
        self.weight, self.pos_weight = weight, pos_weight

    def terms(self, op: Ops, x: ir.Value, target: ir.Value) -> ir.Value:
        """-log s is softplus(-x), and -log(1 - s) is softplus(x): finite for every logit.

        No large numbers are subtracted, so confident predictions keep all their digits.
        """
        positive = target
        if self.pos_weight is not None:
            positive = weights(op, self.pos_weight, x, "pos_weight") * target
        terms = positive * op.Softplus(-x) + (1.0 - target) * op.Softplus(x)
        return terms if self.weight is None else weights(op, self.weight, x) * terms


class KLDivLoss(ElementwiseLoss):
    """The Kullback-Leibler divergence t (log t - x) of targets t from log-probabilities x.

    With `log_target` the targets are log-probabilities too. "mean" is over all elements, which is
    not the divergence; "batchmean", the sum divided by the size of the first axis, is.
    """

    reductions = (*ElementwiseLoss.reductions, "batchmean")

    def __init__(self, reduction: str = "mean", log_target: bool = False) -> None:
        super().__init__(reduction)
        self.log_target = log_target

    def terms(self, op: Ops, x: ir.Value, target: ir.Value) -> ir.Value:
        """Write t (log t - x), where 0 log 0 is 0."""
        if self.log_target:
            return op.Exp(target) * (target - x)
        return target * (op.Log(op.Where(op.Equal(target, 0.0), 1.0, target)) - x)
