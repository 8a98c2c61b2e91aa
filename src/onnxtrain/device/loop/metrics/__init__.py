"""Measures of a model's outputs, taken batch by batch.

A metric is updated with the outputs and labels of each batch and then asked for its value over all
of them. `fit` and `evaluate` take metrics as objects, by name (`"accuracy"`, `"top5"`, `"mae"`), or
as functions of outputs and labels.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from onnxtrain.device.loop.history import NUMBERS
from onnxtrain.device.loop.metrics.classes import Accuracy, ClassMetric, TopK
from onnxtrain.device.loop.metrics.confusion import F1, ConfusionMatrix, Precision, Recall
from onnxtrain.device.loop.metrics.metric import Better, FunctionMetric, Metric
from onnxtrain.device.loop.metrics.regression import (
    MeanAbsoluteError,
    MeanSquaredError,
    RootMeanSquaredError,
)
from onnxtrain.errors import ArgumentError

__all__ = [
    "F1",
    "Accuracy",
    "Better",
    "ClassMetric",
    "ConfusionMatrix",
    "FunctionMetric",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "Metric",
    "Precision",
    "Recall",
    "RootMeanSquaredError",
    "TopK",
    "make_metric",
    "make_metrics",
]

_NAMED: dict[str, type[Metric]] = {
    "accuracy": Accuracy,
    "confusion": ConfusionMatrix,
    "f1": F1,
    "mae": MeanAbsoluteError,
    "mse": MeanSquaredError,
    "precision": Precision,
    "recall": Recall,
    "rmse": RootMeanSquaredError,
}

MetricLike = str | Metric | Callable[[Any, Any], Any]


def make_metric(metric: MetricLike) -> Metric:
    """Return the metric for an object, a name or a function."""
    if isinstance(metric, Metric):
        return metric
    if isinstance(metric, str):
        if metric in _NAMED:
            return _NAMED[metric]()
        top = re.fullmatch(r"top_?([1-9][0-9]{0,8})", metric)
        if top is not None:
            return TopK(int(top[1]))
        close = difflib.get_close_matches(metric, [*_NAMED, "top5"], 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ArgumentError(
            f"there is no metric {metric!r}: {hint}the names are {', '.join(_NAMED)} and top1, "
            "top5 ..."
        )
    if callable(metric) and not isinstance(metric, type):
        return FunctionMetric(metric)
    raise ArgumentError(
        f"a metric is a name, a function or an object like Accuracy(), not {metric!r}"
    )


def make_metrics(
    metrics: MetricLike | Iterable[MetricLike] | Mapping[str, MetricLike],
) -> dict[str, Metric]:
    """Return metrics by their names. A mapping gives names of its own."""
    if isinstance(metrics, str | Metric) or callable(metrics):
        metrics = [metrics]
    if isinstance(metrics, Mapping):
        named = [(name, make_metric(metric)) for name, metric in metrics.items()]
    else:
        named = [(made.name, made) for made in map(make_metric, metrics)]
    result: dict[str, Metric] = {}
    for name, metric in named:
        if name in result or name in (*NUMBERS, "eval_loss"):
            raise ArgumentError(
                f"the name {name!r} of a metric is taken: pass a dictionary with other names, "
                f"such as {{'my_{name}': ...}}"
            )
        result[name] = metric
    return result
