"""Metrics of predicted numbers: mean absolute and mean squared error."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from onnxtrain.device.loop.metrics.metric import MeanMetric, to_numbers
from onnxtrain.errors import ArgumentError


class MeanError(MeanMetric):
    """A mean over the differences between outputs and targets.

    Both have the same shape; a last axis of length 1 that only one of them has is dropped.
    """

    better = "min"
    # What the mean is taken of, from the differences.
    measure: ClassVar[Any]

    def update(self, outputs: npt.ArrayLike, labels: npt.ArrayLike) -> None:
        """Add the differences of a batch."""
        predicted, target = to_numbers("outputs", outputs), to_numbers("labels", labels)
        if predicted.shape == (*target.shape, 1):
            predicted = predicted[..., 0]
        elif target.shape == (*predicted.shape, 1):
            target = target[..., 0]
        if predicted.shape != target.shape:
            raise ArgumentError(
                f"{self.name} compares arrays of the same shape; the outputs have "
                f"{predicted.shape}, the labels {target.shape}"
            )
        difference = predicted.astype(np.float64) - target.astype(np.float64)
        self._sum += float(self.measure(difference).sum())
        self._count += predicted.size


class MeanAbsoluteError(MeanError):
    """The mean of the absolute differences between outputs and targets."""

    name = "mae"
    measure = staticmethod(np.abs)


class MeanSquaredError(MeanError):
    """The mean of the squared differences between outputs and targets."""

    name = "mse"
    measure = staticmethod(np.square)


class RootMeanSquaredError(MeanSquaredError):
    """The square root of the mean of the squared differences."""

    name = "rmse"

    def value(self) -> float:
        """The root of the mean over all elements; NaN if there were none."""
        return math.sqrt(super().value())
