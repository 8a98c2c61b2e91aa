"""Weights of samples: `fit(class_weight=..., sample_weight=...)`, as an input of the graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from onnxtrain.device.loop.batches import Array, as_array, count_samples
from onnxtrain.errors import ArgumentError
from onnxtrain.format.model.file import ValueType
from onnxtrain.format.names import SAMPLE_WEIGHT

ClassWeight = Mapping[int, float] | Sequence[float] | Array | str | None


def takes_weights(inputs: Sequence[ValueType]) -> bool:
    """Whether graphs were prepared with `sample_weight=True`."""
    return bool(inputs) and inputs[-1].name == SAMPLE_WEIGHT


def without_weights(inputs: Sequence[ValueType]) -> Sequence[ValueType]:
    """Return the inputs of samples and labels."""
    return inputs[:-1] if takes_weights(inputs) else inputs


def with_weights(
    data: Any, inputs: Sequence[ValueType], class_weight: ClassWeight, sample_weight: Any
) -> tuple[Any, Callable[[Any], Any]]:
    """Return data with weights, and what adds them to the items of an iterable."""
    is_weighted = class_weight is not None or sample_weight is not None
    if not takes_weights(inputs):
        if is_weighted:
            raise ArgumentError(
                "the artifacts take no weights of samples: write them with "
                "prepare(..., sample_weight=True)"
            )
        return data, lambda item: item
    if isinstance(class_weight, str) and class_weight != "balanced":
        raise ArgumentError(
            "class_weight is a dictionary, an array with one weight for each class, or 'balanced', "
            f"not {class_weight!r}"
        )
    names = [value.name for value in inputs]
    if isinstance(data, tuple | Mapping):
        return _complete(data, names, class_weight, sample_weight), lambda item: item
    if sample_weight is not None or isinstance(class_weight, str):
        raise ArgumentError(
            "sample_weight= and class_weight='balanced' need the data as arrays. Batches may have "
            f"weights of their own, as {SAMPLE_WEIGHT!r} or behind the labels"
        )
    return data, partial(
        _complete, names=names, class_weight=class_weight, sample_weight=None, is_batch=True
    )


def _complete(
    data: Any, names: Sequence[str], class_weight: Any, sample_weight: Any, is_batch: bool = False
) -> Any:
    """Add weights to arrays, or to a batch, unless it has them already."""
    by_name = isinstance(data, Mapping)
    if is_batch and not by_name and not isinstance(data, tuple | list):
        return data
    held = SAMPLE_WEIGHT in data if by_name else len(data) == len(names)
    if held:
        if class_weight is not None or sample_weight is not None:
            raise ArgumentError(
                f"the data has weights already, as its {SAMPLE_WEIGHT!r}: leave class_weight and "
                "sample_weight out"
            )
        return data
    values = list(data.values() if by_name else data)
    if not values:
        return data  # which is refused for what it lacks
    weights = np.ones(count_samples(values), np.float32)
    if class_weight is not None:
        labels = data.get(names[-2]) if by_name else data[-1]
        weights *= of_classes(as_array(labels), class_weight)
    if sample_weight is not None:
        weights *= _checked("sample_weight", sample_weight, weights.shape)
    return {**data, SAMPLE_WEIGHT: weights} if by_name else (*data, weights)


def of_classes(labels: Array, class_weight: Any) -> Array:
    """Return the weight of each sample by its class."""
    flat = labels.reshape(len(labels), -1) if labels.ndim else labels.reshape(0, 0)
    if flat.shape[1:] != (1,) or labels.dtype.kind not in "biuf" or (flat != np.rint(flat)).any():
        raise ArgumentError(
            "class_weight needs one class for each sample, as a whole number, but the labels are "
            f"{labels.dtype.name} {list(labels.shape)}. Pass sample_weight=, or give the loss its "
            "weights: prepare(..., loss=CrossEntropy(weight=...))"
        )
    classes, place, counts = np.unique(
        flat[:, 0].astype(np.int64), return_inverse=True, return_counts=True
    )
    if isinstance(class_weight, str):  # "balanced": all classes weigh the same, 1 on average
        each = len(flat) / (len(classes) * counts)
    elif isinstance(class_weight, Mapping):
        each = _checked("class_weight", [class_weight.get(int(c), 1.0) for c in classes], None)
    else:
        table = _checked("class_weight", class_weight, None)
        outside = [int(c) for c in classes if not 0 <= c < len(table)]
        if outside:
            raise ArgumentError(
                f"class_weight has {len(table)} weights, and there is the class {outside[0]}"
            )
        each = table[classes]
    weights: Array = each[place.reshape(-1)].astype(np.float32)
    return weights


def _checked(name: str, given: Any, shape: tuple[int, ...] | None) -> Array:
    try:
        weights = np.asarray(given, np.float64)
    except (TypeError, ValueError):
        raise ArgumentError(f"{name} is made of numbers, not {given!r}") from None
    if weights.ndim != 1 or (shape is not None and weights.shape != shape):
        needs = "one for each class" if shape is None else f"{shape[0]}, one for each sample"
        raise ArgumentError(f"{name} has the shape {list(weights.shape)}; it takes {needs}")
    if not np.isfinite(weights).all() or (weights < 0).any():
        raise ArgumentError(f"{name} has a weight that is negative, infinite or not a number")
    return weights.astype(np.float32)
