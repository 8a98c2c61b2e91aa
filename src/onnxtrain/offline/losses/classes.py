"""Losses of class scores, with the index of the right class as the label.

Labels out of range are safe. Depending on the runtime, the kernels of the ONNX operators take such
a label for another class, stop with an error, or read past the scores; so they never see one. The
loss of such a label is nan, which shows in the mean or sum, and its gradient is zero: a bad label
does not destroy the parameters.
"""

from __future__ import annotations

import warnings

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import BlockError, TrainingWarning
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import UNKNOWN, Dims, dims_of
from onnxtrain.offline.losses.loss import Array, Loss, weights


class _ClassLoss(Loss):
    """What losses of class scores have in common.

    The labels are int64 and have the shape of the scores without the class axis. "mean" divides by
    the sum of the weights of the labels that count; if none counts, the loss is 0.
    """

    least_opset = 12  # which brought both operators
    op_type: str
    outputs = 1
    smoothing = 0.0

    def __init__(
        self,
        weight: Array | None = None,
        reduction: str = "mean",
        ignore_index: int | None = None,
        *,
        class_axis: int = 1,
    ) -> None:
        super().__init__(reduction)
        self.weight = None if weight is None else np.asarray(weight)
        if self.weight is not None and self.weight.ndim != 1:
            raise BlockError(
                f"weight has one number for each class, not the shape {self.weight.shape}"
            )
        self.ignore_index, self.class_axis = ignore_index, class_axis

    def build(self, scores_input_name: str, labels_name: str = "labels") -> str:
        """Add the loss, and the labels as an input if the model has no value of that name."""
        return self._append(scores_input_name, labels_name)

    def label_type(self, scores: ir.Value) -> tuple[ir.DataType, Dims | None]:
        """Labels are indices, without the class axis."""
        dims, axis = self._dims_and_axis(scores)
        return ir.DataType.INT64, (*dims[:axis], *dims[axis + 1 :])

    def formula(self, op: Ops, scores: ir.Value, labels: ir.Value) -> ir.Value:
        """Move the classes to axis 1, where the operators expect them, and reduce the terms."""
        if labels.dtype not in (ir.DataType.INT64, ir.DataType.INT32):
            raise BlockError(
                f"the labels {labels.name!r} are of type {labels.dtype}; they have to be INT64"
            )
        dims, axis = self._dims_and_axis(scores)
        rank = len(dims)
        index, is_last = op.cast(labels, ir.DataType.INT64), axis == rank - 1 and axis > 1
        if is_last:  # this moves no data
            rows = op.with_dims(op.Flatten(scores, axis=axis), (UNKNOWN, dims[axis]))
            scores, index = rows, op.Reshape(index, [-1])
        else:
            order = [i for i in range(rank) if i != axis]
            scores = op.transpose(scores, [order[0], axis, *order[1:]])
        terms, counts = self._terms(op, scores, index)
        if self.takes_weights:
            terms = op.reshape_like(terms, labels) if is_last else terms
            return self._reduced(op, self.weigh(op, terms, dims[0]), counts)
        loss = self._reduced(op, terms, counts)
        return op.reshape_like(loss, labels) if is_last and self.reduction == "none" else loss

    def _dims_and_axis(self, scores: ir.Value) -> tuple[Dims, int]:
        dims, name = dims_of(scores), scores.name
        if dims is None:
            raise BlockError(f"the rank of the scores {name!r} is not known: declare their shape")
        rank = len(dims)
        if rank < 2 or not -rank <= self.class_axis < rank:
            raise BlockError(
                f"the scores {name!r} have {rank} axes; there is no axis {self.class_axis} of "
                "classes beside one of samples"
            )
        axis = self.class_axis % rank
        classes = dims[axis]
        if self.weight is not None and isinstance(classes, int) and classes != self.weight.size:
            raise BlockError(
                f"weight has {self.weight.size} numbers, but the scores {name!r} have {classes} "
                "classes"
            )
        return dims, axis

    def _terms(
        self, op: Ops, scores: ir.Value, labels: ir.Value
    ) -> tuple[ir.Value, ir.Value | None]:
        """Write the loss of each label, and how much each counts (None: each counts 1)."""
        size = op.dims(scores)[1] if self.weight is None else self.weight.size
        classes = size if isinstance(size, int) else op.Gather(op.Shape(scores), 1, axis=0)
        last = op.int64(classes - 1) if isinstance(classes, int) else classes - 1
        index = op.Clip(labels, 0, last)
        weight = [] if self.weight is None else [weights(op, self.weight, scores)]
        terms, *log_prob = op.call(
            self.op_type, scores, index, *weight, outputs=self.outputs, reduction="none"
        )
        op.shape_as(terms, index)
        for value in log_prob:
            op.type_as(value, scores)
        if self.smoothing:
            terms = self._smoothed(op, terms, log_prob[0], classes)
        counts = op.Gather(*weight, index, axis=0) if weight else None
        wrong = op.Not(op.Equal(labels, index))
        if self.ignore_index is not None:
            ignored = op.Equal(labels, self.ignore_index)
            wrong = op.And(wrong, op.Not(ignored))
            terms = op.Where(ignored, 0.0, terms)
            counts = op.Where(
                ignored, 0.0, op.const(1.0, terms.dtype) if counts is None else counts
            )
        return op.Where(wrong, float("nan"), terms), counts

    def _smoothed(
        self, op: Ops, terms: ir.Value, log_prob: ir.Value, classes: int | ir.Value
    ) -> ir.Value:
        """Mix the terms with the mean over all classes."""
        if self.weight is not None:
            each = self.weight.reshape(-1, *[1] * (op.rank(log_prob) - 2))
            log_prob = log_prob * weights(op, each, log_prob)
        total = op.sum(log_prob, [1])
        if isinstance(classes, int):
            mean = total * (-self.smoothing / classes)
        else:
            mean = total * -self.smoothing / op.cast(classes, total.dtype)
        return terms * (1.0 - self.smoothing) + mean

    def _reduced(self, op: Ops, terms: ir.Value, counts: ir.Value | None) -> ir.Value:
        if self.reduction == "none":
            return terms
        if self.reduction == "mean" and counts is None:
            return op.ReduceMean(terms, keepdims=0)
        total = op.ReduceSum(terms, keepdims=0)
        if self.reduction == "sum" or counts is None:
            return total
        count = op.ReduceSum(counts, keepdims=0)
        return total / op.Where(op.Equal(count, 0.0), 1.0, count)


class CrossEntropyLoss(_ClassLoss):
    """Cross entropy of a softmax of the scores.

    Args:
        weight: a factor for each class, which scales the terms of its labels.
        reduction: "mean" (over the weights of the labels), "sum" or "none".
        ignore_index: a label that does not count.
        label_smoothing: how much of the target is spread over all classes, from 0 to 1.
        class_axis: the axis of the classes in the scores. The default is that of ONNX and torch,
            for scores of shape (batch, classes, height, width). For (batch, sequence, classes) it
            is -1.

    """

    op_type = "SoftmaxCrossEntropyLoss"
    outputs = 2  # the second is the logarithm of the softmax

    def __init__(
        self,
        weight: Array | None = None,
        reduction: str = "mean",
        ignore_index: int | None = None,
        *,
        label_smoothing: float = 0.0,
        class_axis: int = 1,
    ) -> None:
        super().__init__(weight, reduction, ignore_index, class_axis=class_axis)
        if not 0.0 <= label_smoothing <= 1.0:
            raise BlockError(f"label_smoothing is from 0 to 1, not {label_smoothing!r}")
        self.smoothing = float(label_smoothing)

    def formula(self, op: Ops, scores: ir.Value, labels: ir.Value) -> ir.Value:
        """Write the loss; that of one class is 0 whatever its score is."""
        dims, axis = self._dims_and_axis(scores)
        if dims[axis] == 1:
            warnings.warn(
                f"the scores {scores.name!r} are of one class, so that the loss is always 0: one "
                "score for yes or no is for 'bce', a number to predict for 'mse'",
                TrainingWarning,
                stacklevel=2,
            )
        return super().formula(op, scores, labels)


class NLLLoss(_ClassLoss):
    """The negative log-likelihood of labels, from log-probabilities.

    The arguments are those of `CrossEntropyLoss`.
    """

    op_type = "NegativeLogLikelihoodLoss"
