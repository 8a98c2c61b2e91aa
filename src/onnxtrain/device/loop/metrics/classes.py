"""Metrics of predicted classes: accuracy and top-k."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from onnxtrain.device.checks import at_least, finite
from onnxtrain.device.loop.metrics.metric import Array, MeanMetric, Metric, to_numbers
from onnxtrain.errors import ArgumentError


class Predictions(NamedTuple):
    """Predicted and true classes of the elements that count, and how many classes there are."""

    predicted: Array
    true: Array
    classes: int


class ClassMetric(Metric):
    """A metric of predicted classes.

    Outputs are scores of classes of shape (N, C), (N, C, ...), or with `class_axis=-1` (..., C);
    labels have that shape without the axis of the classes. Outputs of shape (N,) or (N, 1) are
    scores of the one class 1 against 0, predicted where they are above `threshold`: 0 for logits,
    0.5 for probabilities. With `binary=True` each element of outputs of any shape is such a score.
    Labels that equal `ignore_index` do not count.
    """

    shift = 0  # how many elements later the label of an element is

    def __init__(
        self,
        class_axis: int = 1,
        ignore_index: int | None = None,
        threshold: float = 0.0,
        binary: bool = False,
        output: str | None = None,
        labels: str | None = None,
    ) -> None:
        self.class_axis = class_axis
        self.ignore_index = ignore_index
        self.threshold = finite("threshold", threshold)
        self.binary = binary
        self._one_score = False
        super().__init__(output, labels)

    def follow(self, layout: Mapping[str, int]) -> None:
        """Read labels as the loss does (`ModelMetadata.labels`), where nothing else was said."""
        self.shift = layout.get("shift", 0)
        if self.class_axis == 1:
            self.class_axis = layout.get("class_axis", 1)
        mark = layout.get("ignore_index", 0)
        if self.ignore_index is None and mark < 0:  # which is no class that could be meant
            self.ignore_index = mark

    def read(self, outputs: npt.ArrayLike, labels: npt.ArrayLike) -> Predictions:
        """Return the predicted and the true classes of a batch."""
        scores, given = np.asarray(outputs), np.asarray(labels)
        shape = scores.shape
        self._one_score = self.binary or len(shape) == 1 or shape[self._axis(shape)] == 1
        if self._one_score:
            return self._read_one_score(scores, given)
        rows, true = self._rows(scores, given)
        return Predictions(rows.argmax(axis=1), true, rows.shape[1])

    def _axis(self, shape: tuple[int, ...]) -> int:
        """The axis of the classes, counted from the front."""
        if not -len(shape) <= self.class_axis < len(shape):
            raise ArgumentError(
                f"outputs of shape {shape} have no axis {self.class_axis} for the classes"
            )
        return self.class_axis % len(shape)

    def _rows(self, scores: Array, labels: Array) -> tuple[Array, Array]:
        """Return the scores as (elements, classes) and the classes of these elements."""
        axis = self._axis(scores.shape)
        if self.shift and scores.shape[:2] == labels.shape[:2]:
            scores, labels = scores[:, : -self.shift], labels[:, self.shift :]
        classes = scores.shape[axis]
        without = scores.shape[:axis] + scores.shape[axis + 1 :]
        if labels.shape not in (without, (*without[:axis], 1, *without[axis:])):
            raise ArgumentError(
                f"labels of shape {labels.shape} do not fit outputs of shape {scores.shape} with "
                f"the classes on axis {self.class_axis}: they should have shape {without}"
                + _hint_on_shapes(scores.shape, labels.shape)
            )
        return self._counted(np.moveaxis(scores, axis, -1).reshape(-1, classes), labels, classes)

    def _read_one_score(self, scores: Array, labels: Array) -> Predictions:
        """Predict class 1 where the score is above the threshold, and 0 elsewhere."""
        shape = scores.shape
        fitting = [shape]
        if len(shape) == 1:
            fitting.append((*shape, 1))
        elif shape[axis := self._axis(shape)] == 1:
            fitting.append(shape[:axis] + shape[axis + 1 :])
        if labels.shape not in fitting:
            raise ArgumentError(
                f"labels of shape {labels.shape} do not fit outputs of shape {shape}, which are "
                f"one score each: they should have shape {' or '.join(map(str, fitting))}"
            )
        scores, true = self._counted(scores.reshape(-1), labels, 2)
        return Predictions((scores > self.threshold).astype(np.int64), true, 2)

    def _counted(self, scores: Array, labels: Array, classes: int) -> tuple[Array, Array]:
        """Return the scores and classes of the elements that count."""
        given = labels.reshape(-1)
        if self.ignore_index is not None:
            counted = given != self.ignore_index
            scores, given = scores[counted], given[counted]
        return to_numbers("outputs", scores, infinities=True), _to_classes(given, classes)


def _hint_on_shapes(scores: tuple[int, ...], labels: tuple[int, ...]) -> str:
    if scores[:-1] == labels:
        return " (or are the classes on the last axis? then pass class_axis=-1)"
    if scores == labels:
        return " (if each element is a yes or no of its own, pass binary=True)"
    return ""


def _to_classes(labels: Array, classes: int) -> Array:
    """Check labels of any number type, and return them as indices."""
    numbers = to_numbers("labels", labels)
    indices = numbers.astype(np.int64)
    if numbers.dtype.kind == "f" and not np.array_equal(indices, numbers):
        example = numbers[indices != numbers][0]
        raise ArgumentError(f"labels must be whole numbers of classes; one is {example}")
    wrong = indices[(indices < 0) | (indices >= classes)]
    if wrong.size:
        raise ArgumentError(
            f"the label {wrong[0]} is no class: there are {classes} classes, from 0 to "
            f"{classes - 1} ({wrong.size} of {indices.size} labels are outside). If it marks "
            f"elements that do not count, pass ignore_index={wrong[0]}"
        )
    return indices


class Accuracy(ClassMetric, MeanMetric):
    """The fraction of elements whose class is predicted correctly; arguments of `ClassMetric`."""

    name = "accuracy"
    better = "max"

    def update(self, outputs: npt.ArrayLike, labels: npt.ArrayLike) -> None:
        """Count the correct predictions of a batch."""
        predicted, true, _ = self.read(outputs, labels)
        self._sum += int(np.count_nonzero(predicted == true))
        self._count += true.size


class TopK(ClassMetric, MeanMetric):
    """The fraction of elements whose class is among the `k` with the highest scores.

    Of equal scores the first counts as the higher, so that `TopK(1)` is `Accuracy()`.
    """

    better = "max"

    def __init__(
        self,
        k: int = 5,
        class_axis: int = 1,
        ignore_index: int | None = None,
        output: str | None = None,
        labels: str | None = None,
    ) -> None:
        self.k = at_least(1, "k", k)
        self.name = f"top{self.k}"
        super().__init__(class_axis, ignore_index, output=output, labels=labels)

    def update(self, outputs: npt.ArrayLike, labels: npt.ArrayLike) -> None:
        """Count the elements of a batch whose class is among the first."""
        scores, true = self._rows(np.asarray(outputs), np.asarray(labels))
        classes = scores.shape[1]
        if classes < self.k:
            raise ArgumentError(
                f"{self.name} needs at least {self.k} classes; the outputs have {classes}"
            )
        own = np.take_along_axis(scores, true[:, None], axis=1)
        earlier = np.arange(classes) < true[:, None]
        ahead = np.count_nonzero((scores > own) | ((scores == own) & earlier), axis=1)
        self._sum += int(np.count_nonzero(ahead < self.k))
        self._count += true.size
