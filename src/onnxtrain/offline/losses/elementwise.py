"""Losses.

Each is called with the name of what the model computes and, if that is not to be the default, the
name of what it should have computed. A value of that name is taken if the model has one; otherwise
a new input of that name is added behind the inputs of the model.

All have a `reduction`: "mean" and "sum" make one number, "none" leaves one for each element or
label.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from onnxtrain.errors import BlockError
from onnxtrain.offline.blocks.block import Block
from onnxtrain.offline.blocks.values import is_defined, type_of
from onnxtrain.offline.blocks.writer import Writer, accumulation_type, check_reduction, is_float

Array = np.ndarray[Any, Any] | Sequence[float]


class _ElementwiseLoss(Block):
    """A loss that compares each element with one of a target of the same shape."""

    def __init__(self, reduction: str = "mean", *more_reductions: str) -> None:
        super().__init__()
        self.reduction = check_reduction(reduction, *more_reductions)

    @abstractmethod
    def terms(self, op: Writer, x: str, target: str) -> str:
        """Write the loss of each element."""

    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        """Add the loss, and the target as an input if the model has no value of that name."""
        model: onnx.ModelProto = self.base
        type_ = type_of(model, loss_input_name)
        elem_type = type_.tensor_type.elem_type
        op = Writer(accumulation_type(elem_type))
        if not is_float(elem_type):
            kind = TensorProto.DataType.Name(elem_type)
            raise BlockError(f"{loss_input_name!r} is of type {kind}; a loss takes floats")
        if not is_defined(model, target_name):
            op.input(target_name, type_)
        target_type = type_of(model, target_name).tensor_type.elem_type
        x, target = op.cast(loss_input_name, elem_type), op.cast(target_name, target_type)
        loss = self.reduce(op, self.terms(op, x, target))
        return op.cast(loss, op.elem_type, to=elem_type)

    def reduce(self, op: Writer, terms: str) -> str:
        """Make of the terms what the reduction asks for."""
        if self.reduction == "none":
            return terms
        if self.reduction == "batchmean":
            batch = op.Gather(op.Shape(terms), op.constant(0, TensorProto.INT64), axis=0)
            return op.Div(op.ReduceSum(terms, keepdims=0), op.Cast(batch, to=op.elem_type))
        return op.call(
            "ReduceMean" if self.reduction == "mean" else "ReduceSum", [terms], keepdims=0
        )[0]


class MSELoss(_ElementwiseLoss):
    """(x - t)²."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__(reduction)

    def terms(self, op: Writer, x: str, target: str) -> str:
        """Write the squares."""
        difference = op.Sub(x, target)
        return op.Mul(difference, difference)


class L1Loss(_ElementwiseLoss):
    """|x - t|."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__(reduction)

    def terms(self, op: Writer, x: str, target: str) -> str:
        """Write the absolute values."""
        return op.Abs(op.Sub(x, target))


class HuberLoss(_ElementwiseLoss):
    """With d = |x - t|: d² / 2 up to `delta`, and delta · (d - delta / 2) from there on."""

    def __init__(self, reduction: str = "mean", delta: float = 1.0) -> None:
        super().__init__(reduction)
        if not delta > 0:
            raise BlockError(f"delta is a positive number, not {delta!r}")
        self.delta = float(delta)

    def terms(self, op: Writer, x: str, target: str) -> str:
        """With c = min(d, delta), both cases are c · (d - c / 2)."""
        distance = op.Abs(op.Sub(x, target))
        near = op.Min(distance, self.delta)
        return op.Mul(near, op.Sub(distance, op.Mul(near, 0.5)))


class SmoothL1Loss(HuberLoss):
    """The Huber loss divided by its `beta` (there: delta); the L1 loss where that is 0."""

    def __init__(self, reduction: str = "mean", beta: float = 1.0) -> None:
        if beta < 0:
            raise BlockError(f"beta is not negative, as {beta!r} is")
        super().__init__(reduction, beta or 1.0)
        self.beta = float(beta)

    def terms(self, op: Writer, x: str, target: str) -> str:
        """Write the terms of the Huber loss, scaled."""
        if self.beta == 0:
            return op.Abs(op.Sub(x, target))
        return op.Mul(super().terms(op, x, target), 1.0 / self.beta)


class BCEWithLogitsLoss(_ElementwiseLoss):
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

    def terms(self, op: Writer, x: str, target: str) -> str:
        """-log s is softplus(-x), and -log(1 - s) is softplus(x): finite for every logit.

        No difference of large numbers is taken, so confident predictions keep all their digits.
        """
        positive = target
        if self.pos_weight is not None:
            positive = op.Mul(op.constant(self.pos_weight, token="pos_weight"), target)
        terms = op.Add(
            op.Mul(positive, op.Softplus(op.Neg(x))),
            op.Mul(op.Sub(1.0, target), op.Softplus(x)),
        )
        if self.weight is None:
            return terms
        return op.Mul(op.constant(self.weight, token="weight"), terms)


class KLDivLoss(_ElementwiseLoss):
    """The Kullback-Leibler divergence t (log t - x) of targets t from log-probabilities x.

    With `log_target` the targets are log-probabilities too. "mean" is over all elements, which is
    not the divergence; "batchmean", the sum divided by the size of the first axis, is.
    """

    def __init__(self, reduction: str = "mean", log_target: bool = False) -> None:
        super().__init__(reduction, "batchmean")
        self.log_target = log_target

    def terms(self, op: Writer, x: str, target: str) -> str:
        """Write t (log t - x), where 0 log 0 is 0."""
        if self.log_target:
            return op.Mul(op.Exp(target), op.Sub(target, x))
        logarithm = op.Log(op.Where(op.Equal(target, 0.0), 1.0, target))
        return op.Mul(target, op.Sub(logarithm, x))
