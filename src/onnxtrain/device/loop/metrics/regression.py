"""Metrics of predicted numbers: mean absolute and mean squared error."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxtrain.device.loop.metrics.metric import MeanMetric
from onnxtrain.device.loop.metrics.reading import to_numbers
from onnxtrain.errors import ArgumentError

Array = npt.NDArray[Any]


class MeanError(MeanMetric):
    """A mean over the differences between outputs and targets.

    Both have the same shape; a last axis of length 1 that only one of them has is dropped.
    """

    better = "min"

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
        self._sum += self.total(predicted.astype(np.float64) - target.astype(np.float64))
        self._count += predicted.size

    @staticmethod
    @abstractmethod
    def total(difference: Array) -> float:
        """The sum of what the mean is taken of."""


class MeanAbsoluteError(MeanError):
    """The mean of the absolute differences between outputs and targets."""

    name = "mae"

    @staticmethod
    def total(difference: Array) -> float:
        """The sum of the absolute differences."""
        return float(np.abs(difference).sum())


class MeanSquaredError(MeanError):
    """The mean of the squared differences between outputs and targets."""

    name = "mse"

    @staticmethod
    def total(difference: Array) -> float:
        """The sum of the squared differences."""
        return float(np.square(difference).sum())


class RootMeanSquaredError(MeanSquaredError):
    """The square root of the mean of the squared differences."""

    name = "rmse"

    def value(self) -> float:
        """The root of the mean over all elements; NaN if there were none."""
        return math.sqrt(super().value())
