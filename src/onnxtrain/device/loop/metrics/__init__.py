"""Measures of a model's outputs, taken batch by batch.

A metric is updated with the outputs and labels of each batch and then asked for its value over all
of them. `fit` and `evaluate` take metrics as objects, by name (`"accuracy"`, `"top5"`, `"mae"`), or
as functions of outputs and labels.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
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

# Settings in words, and how they are read.
_SETTINGS: dict[str, Callable[[str], Any]] = {
    "class_axis": int,
    "ignore_index": lambda value: None if value == "none" else int(value),
    "threshold": float,
    "binary": lambda value: {"true": True, "false": False}[value],
    "average": str,
    "output": str,
    "labels": str,
}

MetricLike = str | Metric | Callable[[Any, Any], Any]


def make_metric(metric: MetricLike) -> Metric:
    """Return the metric for an object, a name or a function."""
    if isinstance(metric, Metric):
        return metric
    if isinstance(metric, str):
        name, _, settings = metric.partition(":")
        top = re.fullmatch(r"top_?([1-9][0-9]{0,8})", name)
        kind = _NAMED.get(name) if top is None else partial(TopK, int(top[1]))
        if kind is not None:
            return _with_settings(kind, settings, metric)
        close = difflib.get_close_matches(name, [*_NAMED, "top5"], 1)
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


def _with_settings(kind: Callable[..., Metric], settings: str, metric: str) -> Metric:
    """Make a metric with settings such as "ignore_index=-100,class_axis=-1"."""
    given: dict[str, Any] = {}
    try:
        for item in filter(None, settings.split(",")):
            key, _, value = (part.strip() for part in item.partition("="))
            given[key] = _SETTINGS[key](value.lower() if key not in ("output", "labels") else value)
        return kind(**given)
    except ArgumentError:
        raise
    except (KeyError, TypeError, ValueError):
        raise ArgumentError(
            f"the metric {metric!r} has settings that it does not take: they are written "
            "name=value, such as accuracy:ignore_index=-100,class_axis=-1"
        ) from None


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
