"""Outputs and labels as rows of scores and classes; what does not fit together is an error."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from onnxtrain.errors import ArgumentError, NonFiniteError

Array = npt.NDArray[Any]


class Predictions(NamedTuple):
    """Predicted and true classes of the elements that count, and how many classes there are."""

    predicted: Array
    true: Array
    classes: int


def to_numbers(what: str, values: npt.ArrayLike, infinities: bool = False) -> Array:
    """Return an array of numbers; NaN is an error, and so are infinities unless they may be."""
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        # Types that packages add to numpy, such as bfloat16, are numbers too.
        try:
            array = array.astype(np.float32)
        except (TypeError, ValueError):
            raise ArgumentError(f"{what} must be numbers, not {array.dtype}") from None
    if array.dtype.kind == "f":
        bad = np.count_nonzero(np.isnan(array) if infinities else ~np.isfinite(array))
        if bad:
            kind = "not a number" if infinities else "infinite or not a number"
            raise NonFiniteError(f"{bad} of {array.size} elements of the {what} are {kind}")
    return array


def is_one_score(shape: tuple[int, ...], class_axis: int, binary: bool) -> bool:
    """Say whether outputs of this shape are scores of one class against its absence."""
    return binary or len(shape) == 1 or shape[_axis(shape, class_axis)] == 1


def _axis(shape: tuple[int, ...], class_axis: int) -> int:
    """The axis of the classes, counted from the front."""
    if not -len(shape) <= class_axis < len(shape):
        raise ArgumentError(f"outputs of shape {shape} have no axis {class_axis} for the classes")
    return class_axis % len(shape)


def rows_of_scores(
    outputs: npt.ArrayLike, labels: npt.ArrayLike, class_axis: int, ignore_index: int | None
) -> tuple[Array, Array]:
    """Return the scores as (elements, classes) and the classes of these elements.

    Elements whose label is `ignore_index` are left out.
    """
    scores, given = np.asarray(outputs), np.asarray(labels)
    axis = _axis(scores.shape, class_axis)
    without = scores.shape[:axis] + scores.shape[axis + 1 :]
    if given.shape not in (without, (*scores.shape[:axis], 1, *scores.shape[axis + 1 :])):
        raise ArgumentError(
            f"labels of shape {given.shape} do not fit outputs of shape {scores.shape} with the "
            f"classes on axis {class_axis}: they should have shape {without}"
            + _hint_on_shapes(scores.shape, given.shape)
        )
    classes = scores.shape[axis]
    scores = np.moveaxis(scores, axis, -1).reshape(-1, classes)
    given = given.reshape(-1)
    if ignore_index is not None:
        counted = given != ignore_index
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
    wrong = np.flatnonzero((indices < 0) | (indices >= classes))
    if wrong.size:
        raise ArgumentError(
            f"the label {indices[wrong[0]]} is no class: there are {classes} classes, from 0 to "
            f"{classes - 1} ({wrong.size} of {indices.size} labels are outside). If it marks "
            f"elements that do not count, pass ignore_index={indices[wrong[0]]}"
        )
    return indices


def predict(
    outputs: npt.ArrayLike,
    labels: npt.ArrayLike,
    class_axis: int,
    ignore_index: int | None,
    threshold: float,
    binary: bool,
) -> Predictions:
    """Return the predicted and the true class of each element that counts."""
    scores = np.asarray(outputs)
    if is_one_score(scores.shape, class_axis, binary):
        return _predict_one(scores, np.asarray(labels), class_axis, ignore_index, threshold)
    rows, true = rows_of_scores(scores, labels, class_axis, ignore_index)
    return Predictions(rows.argmax(axis=1), true, rows.shape[1])


def _predict_one(
    scores: Array, labels: Array, class_axis: int, ignore_index: int | None, threshold: float
) -> Predictions:
    """Predict class 1 where the score is above the threshold, and 0 elsewhere."""
    fitting = [scores.shape]
    if scores.ndim == 1:
        fitting.append((*scores.shape, 1))
    elif scores.shape[_axis(scores.shape, class_axis)] == 1:
        axis = _axis(scores.shape, class_axis)
        fitting.append(scores.shape[:axis] + scores.shape[axis + 1 :])
    if labels.shape not in fitting:
        raise ArgumentError(
            f"labels of shape {labels.shape} do not fit outputs of shape {scores.shape}, which are "
            f"one score each: they should have shape {' or '.join(map(str, fitting))}"
        )
    scores, labels = scores.reshape(-1), labels.reshape(-1)
    if ignore_index is not None:
        counted = labels != ignore_index
        scores, labels = scores[counted], labels[counted]
    scores = to_numbers("outputs", scores, infinities=True)
    return Predictions((scores > threshold).astype(np.int64), _to_classes(labels, 2), 2)
