"""What a metric is; metrics of functions."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from onnxtrain.errors import ArgumentError, NonFiniteError

Array = npt.NDArray[Any]
Better = Literal["min", "max"]


class Metric(ABC):
    """A measure over batches.

    `output` and `labels` name the output of the evaluation model and the input that are compared,
    where there are several to choose from. `better` says which values are better: "min", "max", or
    None where that is unknown. `scalar` says whether the value is a single number.
    """

    name: str
    better: ClassVar[Better | None] = None
    scalar: bool = True

    def __init__(self, output: str | None = None, labels: str | None = None) -> None:
        self.output = output
        self.labels = labels
        self.reset()

    @abstractmethod
    def reset(self) -> None:
        """Forget all batches."""

    @abstractmethod
    def update(self, outputs: npt.ArrayLike, labels: npt.ArrayLike) -> None:
        """Take account of a batch."""

    @abstractmethod
    def value(self) -> Any:
        """The measure over all batches since the last reset."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r})"


class MeanMetric(Metric):
    """A measure that is a mean: a sum over elements, and their number."""

    def reset(self) -> None:
        """Forget all batches."""
        self._sum = 0.0
        self._count = 0

    def value(self) -> float:
        """The mean over all elements; NaN if there were none."""
        return self._sum / self._count if self._count else math.nan


class FunctionMetric(MeanMetric):
    """The mean of a function of outputs and labels; each batch counts by its samples."""

    def __init__(
        self,
        function: Callable[[Array, Array], Any],
        name: str | None = None,
        output: str | None = None,
        labels: str | None = None,
    ) -> None:
        self.function = function
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        super().__init__(output, labels)

    def update(self, outputs: npt.ArrayLike, labels: npt.ArrayLike) -> None:
        """Call the function for a batch."""
        arrays = np.asarray(outputs), np.asarray(labels)
        result = np.asarray(self.function(*arrays))
        if result.size != 1 or result.dtype.kind not in "bifu":
            raise ArgumentError(
                f"the metric {self.name!r} must return one number for a batch, not {result!r}"
            )
        samples = len(arrays[0]) if arrays[0].ndim else 1
        self._sum += float(result.item()) * samples
        self._count += samples


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
