"""Losses of scores for classes, with the number of the right class as the label.

Labels that are no class are safe. The kernels behind the ONNX operators take such a label for
another class, stop with an error, or read past the scores, depending on the runtime; so they never
get to see one. The loss of such a label is nan, which shows in the mean or sum, and it has no
gradient: parameters are not destroyed by a bad label.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from onnxtrain.errors import BlockError
from onnxtrain.offline.blocks.block import Block
from onnxtrain.offline.blocks.values import is_defined, type_of
from onnxtrain.offline.blocks.writer import Writer, accumulation_type, check_reduction, is_float

_SINCE = 12  # the opset that brought both operators
_INTEGERS = (TensorProto.INT64, TensorProto.INT32)
Array = np.ndarray[Any, Any]


class _ClassLoss(Block):
    """What the losses of labels have in common.

    The labels have the shape of the scores without the axis of the classes, and are int64.
    "mean" divides by the sum of the weights of the labels that count; where none counts it is 0.
    """

    op_type: str
    tokens: tuple[str, ...]

    def __init__(
        self,
        weight: Array | Sequence[float] | None = None,
        reduction: str = "mean",
        ignore_index: int | None = None,
        *,
        class_axis: int = 1,
    ) -> None:
        super().__init__()
        self.reduction = check_reduction(reduction)
        self.weight = None if weight is None else np.asarray(weight)
        if self.weight is not None and self.weight.ndim != 1:
            raise BlockError(
                f"weight has one number for each class, not the shape {self.weight.shape}"
            )
        self.ignore_index, self.class_axis = ignore_index, class_axis
        self.smoothing = 0.0

    def build(self, scores_input_name: str, labels_name: str = "labels") -> str:
        """Add the loss, and the labels as an input if the model has no value of that name."""
        model: onnx.ModelProto = self.base
        type_ = type_of(model, scores_input_name)
        elem_type = type_.tensor_type.elem_type
        op = Writer(accumulation_type(elem_type))
        if op.opset < _SINCE:
            raise BlockError(
                f"{type(self).__name__} needs opset {_SINCE}; the model has {op.opset}"
            )
        if not is_float(elem_type):
            raise BlockError(f"the scores {scores_input_name!r} are not floats")
        dims, axis = self._dims_and_axis(type_, scores_input_name)
        labels = self._labels(op, labels_name, type_, axis)
        scores = op.cast(scores_input_name, elem_type)
        scores, labels = _classes_second(op, scores, labels, axis, len(dims))
        loss = self._reduced(op, *self._terms(op, scores, labels, dims, axis))
        if self.reduction == "none" and _is_flattened(axis, len(dims)):
            loss = op.call("Reshape", [loss, op.Shape(labels_name)], ["loss"])[0]
        return op.cast(loss, op.elem_type, to=elem_type)

    def _dims_and_axis(self, type_: onnx.TypeProto, name: str) -> tuple[list[int | None], int]:
        if not type_.tensor_type.HasField("shape"):
            raise BlockError(f"the rank of the scores {name!r} is not known: declare their shape")
        dims = [
            dim.dim_value if dim.HasField("dim_value") else None
            for dim in type_.tensor_type.shape.dim
        ]
        rank = len(dims)
        if rank < 2 or not -rank <= self.class_axis < rank:
            raise BlockError(
                f"the scores {name!r} have {rank} axes; there is no axis {self.class_axis} of "
                "classes beside one of samples"
            )
        axis = self.class_axis % rank
        if self.weight is not None:
            if dims[axis] not in (None, self.weight.size):
                raise BlockError(
                    f"weight has {self.weight.size} numbers, but the scores {name!r} are of "
                    f"{dims[axis]} classes"
                )
            dims[axis] = self.weight.size
        return dims, axis

    def _labels(self, op: Writer, name: str, scores: onnx.TypeProto, axis: int) -> str:
        if not is_defined(op.model, name):
            type_ = onnx.TypeProto()
            type_.CopyFrom(scores)
            type_.tensor_type.elem_type = TensorProto.INT64
            del type_.tensor_type.shape.dim[axis]
            return op.input(name, type_)
        elem_type = type_of(op.model, name).tensor_type.elem_type
        if elem_type not in _INTEGERS:
            kind = TensorProto.DataType.Name(elem_type)
            raise BlockError(f"the labels {name!r} are of type {kind}; they have to be INT64")
        return name if elem_type == TensorProto.INT64 else op.Cast(name, to=TensorProto.INT64)

    def _terms(
        self, op: Writer, scores: str, labels: str, dims: Sequence[int | None], axis: int
    ) -> tuple[str, str | None]:
        """Write the loss of each label, and how much each counts (None: each counts 1)."""
        last = _last_class(op, scores, dims[axis])
        index = op.Clip(labels, op.constant(0, TensorProto.INT64), last)
        is_class = op.Equal(labels, index)
        weight = None if self.weight is None else op.constant(self.weight, token="weight")
        inputs = [scores, index] if weight is None else [scores, index, weight]
        terms, *log_prob = op.call(self.op_type, inputs, self.tokens, reduction="none")
        if self.smoothing:
            terms = self._smoothed(op, terms, log_prob[0], dims, axis, last)
        counts = None if weight is None else op.Gather(weight, index, axis=0)
        wrong = op.Not(is_class)
        if self.ignore_index is not None:
            ignored = op.Equal(labels, op.constant(self.ignore_index, TensorProto.INT64))
            wrong = op.And(wrong, op.Not(ignored))
            terms = op.Where(ignored, 0.0, terms)
            counts = op.Where(ignored, 0.0, 1.0 if counts is None else counts)
        return op.call("Where", [wrong, float("nan"), terms], ["loss"])[0], counts

    def _smoothed(
        self,
        op: Writer,
        terms: str,
        log_prob: str,
        dims: Sequence[int | None],
        axis: int,
        last: str,
    ) -> str:
        """Mix the terms with the mean over all classes."""
        if self.weight is not None:
            others = 0 if _is_flattened(axis, len(dims)) else len(dims) - 2
            log_prob = op.Mul(log_prob, op.constant(self.weight.reshape(-1, *[1] * others)))
        total = op.sum_over(log_prob, 1)
        classes = dims[axis]
        if classes is not None:
            mean = op.Mul(total, -self.smoothing / classes)
        else:
            count = op.Cast(op.Add(last, op.constant(1, TensorProto.INT64)), to=op.elem_type)
            mean = op.Div(op.Mul(total, -self.smoothing), count)
        return op.Add(op.Mul(terms, 1.0 - self.smoothing), mean)

    def _reduced(self, op: Writer, terms: str, counts: str | None) -> str:
        if self.reduction == "none":
            return terms
        if self.reduction == "sum" or counts is None:
            reduction = "ReduceSum" if self.reduction == "sum" else "ReduceMean"
            return op.call(reduction, [terms], ["loss"], keepdims=0)[0]
        total = op.ReduceSum(counts, keepdims=0)
        divisor = op.Where(op.Equal(total, 0.0), 1.0, total)
        return op.call("Div", [op.ReduceSum(terms, keepdims=0), divisor], ["loss"])[0]


class CrossEntropyLoss(_ClassLoss):
    """Cross entropy of a softmax of the scores.

    Args:
        weight: one number for each class, by which the terms of its labels are scaled.
        reduction: "mean" (over the weights of the labels), "sum" or "none".
        ignore_index: a label that does not count.
        label_smoothing: how much of the target is spread over all classes, from 0 to 1.
        class_axis: the axis of the scores that has the classes. It is 1, as in ONNX and torch: for
            scores of shape (batch, classes, height, width). For (batch, sequence, classes) give -1.

    """

    op_type = "SoftmaxCrossEntropyLoss"
    tokens = ("negative_log_likelihood", "log_prob")

    def __init__(
        self,
        weight: Array | Sequence[float] | None = None,
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


class NLLLoss(_ClassLoss):
    """The negative log-likelihood of labels, of log-probabilities.

    Its arguments are those of `CrossEntropyLoss`.
    """

    op_type = "NegativeLogLikelihoodLoss"
    tokens = ("negative_log_likelihood",)


def _is_flattened(axis: int, rank: int) -> bool:
    return axis == rank - 1 and axis > 1


def _classes_second(op: Writer, scores: str, labels: str, axis: int, rank: int) -> tuple[str, str]:
    """Bring the classes to axis 1, where the operators want them."""
    if axis == 1:
        return scores, labels
    if _is_flattened(axis, rank):  # this moves no data
        return op.Flatten(scores, axis=axis), op.Reshape(labels, [-1])
    order = [i for i in range(rank) if i != axis]
    return op.Transpose(scores, perm=[order[0], axis, *order[1:]]), labels


def _last_class(op: Writer, scores: str, classes: int | None) -> str:
    if classes is not None:
        return op.constant(classes - 1, TensorProto.INT64)
    one = op.constant(1, TensorProto.INT64)
    return op.Sub(op.Gather(op.Shape(scores), one, axis=0), one)
