"""Metrics that count which class was taken for which: the matrix itself, precision, recall, F1."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt

from onnxtrain.device.checks import choice
from onnxtrain.device.loop.metrics.classes import ClassMetric
from onnxtrain.errors import ArgumentError

Average = Literal["auto", "macro", "weighted", "micro", "binary", "none"]


class ConfusionMatrix(ClassMetric):
    """How often each class (row) was predicted as each class (column); see `ClassMetric`."""

    name = "confusion"
    scalar = False

    def reset(self) -> None:
        """Forget all batches."""
        self._matrix: npt.NDArray[np.int64] = np.zeros((0, 0), np.int64)

    def update(self, outputs: npt.ArrayLike, labels: npt.ArrayLike) -> None:
        """Count the predictions of a batch."""
        predicted, true, classes = self.read(outputs, labels)
        if self._matrix.size == 0:
            self._matrix = np.zeros((classes, classes), np.int64)
        if len(self._matrix) != classes:
            raise ArgumentError(
                f"{self.name}: the outputs of this batch have {classes} classes, those before had "
                f"{len(self._matrix)}"
            )
        cells = np.bincount(true * classes + predicted, minlength=classes * classes)
        self._matrix += cells.reshape(classes, classes)

    def value(self) -> Any:
        """The matrix, of int64."""
        return self._matrix.copy()


class AveragedMetric(ConfusionMatrix):
    """A measure of each class, and its mean over classes.

    `average` is "macro" (the mean over the classes that occur), "weighted" (each class counts as
    often as it occurs in the labels), "micro" (over all elements), "binary" (class 1 alone) or
    "none" (an array, one element a class). The default is "binary" if the model has one score an
    element, and "macro" otherwise. A class without predictions, or without labels, counts as 0.
    The other arguments are those of `ClassMetric`.
    """

    better = "max"
    # The measure from the numbers of correct predictions, of labels and of predictions.
    ratio: ClassVar[Any]

    def __init__(self, average: Average = "auto", **settings: Any) -> None:
        self.average = choice("average", average, get_args(Average))
        self.scalar = average != "none"
        super().__init__(**settings)

    def value(self) -> Any:
        """The measure over all batches; NaN if there were none."""
        matrix = super().value()
        if matrix.sum() == 0:
            return math.nan
        right = np.diag(matrix).astype(np.float64)
        true, predicted = matrix.sum(axis=1), matrix.sum(axis=0)
        average = self.average
        if average == "auto":
            average = "binary" if self._one_score else "macro"
        if average == "micro":
            return float(self.ratio(right.sum(), true.sum(), predicted.sum()))
        each = self.ratio(right, true, predicted)
        if average == "none":
            return each
        if average == "binary":
            if len(each) != 2:
                raise ArgumentError(
                    f"average='binary' is for 2 classes; the outputs have {len(each)}"
                )
            return float(each[1])
        if average == "weighted":
            return float(np.average(each, weights=true))
        return float(each[(true > 0) | (predicted > 0)].mean())


def _divide(a: Any, b: Any) -> Any:
    """a / b, and 0 where b is 0."""
    return np.divide(a, b, out=np.zeros(np.shape(a)), where=np.asarray(b) != 0)


class Precision(AveragedMetric):
    """Of what was predicted as a class, the fraction that is of it."""

    name = "precision"
    ratio = staticmethod(lambda right, true, predicted: _divide(right, predicted))


class Recall(AveragedMetric):
    """Of what is of a class, the fraction that was predicted as it."""

    name = "recall"
    ratio = staticmethod(lambda right, true, predicted: _divide(right, true))


class F1(AveragedMetric):
    """The harmonic mean of precision and recall."""

    name = "f1"
    ratio = staticmethod(lambda right, true, predicted: _divide(2 * right, true + predicted))
