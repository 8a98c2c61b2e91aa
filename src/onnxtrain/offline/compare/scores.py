"""How good each model is, and how often both choose the same class."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from onnxtrain.device.loop.evaluation import to_plain
from onnxtrain.device.loop.metrics import ClassMetric, Metric, MetricLike, make_metrics
from onnxtrain.errors import ArgumentError, OnnxTrainError

Array = np.ndarray[Any, Any]
Metrics = MetricLike | Iterable[MetricLike] | Mapping[str, MetricLike]


class Scores:
    """Metrics of two models over batches, and their agreement."""

    def __init__(
        self,
        metrics: Metrics | None,
        names: Sequence[str],
        has_labels: bool,
        layout: Mapping[str, int] | None = None,
    ) -> None:
        self._given, self._names, self._layout = metrics, names, layout or {}
        self._metrics: list[dict[str, Metric]] = []
        self._same = self._count = 0
        if metrics is not None and not has_labels and make_metrics(metrics):
            raise ArgumentError(
                f"the metric {next(iter(make_metrics(metrics)))!r} compares outputs with labels, "
                "and the data have none: give them behind the inputs"
            )

    def add(self, first: Array, second: Array, labels: Array | None) -> None:
        """Take account of the outputs of a batch."""
        axis = _class_axis(first.shape, labels)
        if labels is not None:
            if not self._metrics:
                self._metrics = self._made(first, labels, axis)
            pairs = zip(self._metrics, (first, second), self._names, strict=True)
            for metrics, output, name in pairs:
                _update(metrics, output, labels, name)
        if axis is not None and first.shape == second.shape and first.dtype.kind == "f":
            same = first.argmax(axis) == second.argmax(axis)
            self._same += int(np.count_nonzero(same))
            self._count += same.size

    def _made(self, output: Array, labels: Array, axis: int | None) -> list[dict[str, Metric]]:
        metrics = make_metrics(self._usual(output, labels) if self._given is None else self._given)
        for metric in metrics.values():
            if not isinstance(metric, ClassMetric):
                continue
            metric.follow(self._layout)
            if metric.class_axis == 1 and axis is not None:
                metric.class_axis = axis
        return [copy.deepcopy(metrics) for _ in range(2)]

    @staticmethod
    def _usual(output: Array, labels: Array) -> list[str]:
        """Return accuracy, or for targets that are no classes the mean of the errors."""
        is_number = labels.dtype.kind == "f" and labels.size == output.size
        return ["mae"] if is_number else ["accuracy"]

    @property
    def agreement(self) -> float | None:
        """The part of the elements for which both models choose the same class."""
        return self._same / self._count if self._count else None

    def values(self) -> list[dict[str, Any]]:
        """The metrics of both models, by name."""
        found = [{n: to_plain(n, m.value()) for n, m in each.items()} for each in self._metrics]
        return found or [{}, {}]


def _update(metrics: Mapping[str, Metric], output: Array, labels: Array, model: str) -> None:
    for name, metric in metrics.items():
        try:
            metric.update(output, labels)
        except OnnxTrainError as error:
            error.add_note(f"metric {name!r} of {model}")
            raise


def _class_axis(shape: Sequence[int], labels: Array | None) -> int | None:
    """Return the axis on which an output has its classes; None where it has none."""
    if len(shape) < 2:
        return None
    axis = -1 if len(shape) == 3 else 1  # sequences; images
    if labels is not None:
        if labels.dtype.kind == "f" and labels.shape == tuple(shape):
            return None
        for candidate in (1, -1):
            without = list(shape)
            del without[candidate]
            if labels.size == np.prod(without, dtype=np.int64):
                axis = candidate
                break
    return axis if shape[axis] > 1 else None
