"""The difference between two values, added up over batches."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from onnxtrain.offline.compare.report import Errors

Array = np.ndarray[Any, Any]


class Difference:
    """Sums over the elements of a value in two models."""

    def __init__(self) -> None:
        self._count = self._nonfinite = 0
        self._largest = self._sum = self._squares = self._reference = 0.0

    def add(self, first: Array, second: Array) -> None:
        """Take account of a batch, whose shapes are the same."""
        a, b = (np.asarray(x, np.float64).reshape(-1) for x in (first, second))
        with np.errstate(invalid="ignore", over="ignore"):
            # Masks have infinities, which are no difference if both models have the same.
            d = np.where(a == b, 0.0, np.abs(b - a))
        finite = np.isfinite(d)
        self._nonfinite += d.size - int(np.count_nonzero(finite))
        d, a = d[finite], a[finite & np.isfinite(a)]
        self._count += d.size
        self._largest = max(self._largest, float(d.max(initial=0.0)))
        self._sum += float(d.sum())
        self._squares += float(np.dot(d, d))
        self._reference += float(np.dot(a, a))

    def errors(self) -> Errors:
        """Return the errors over all batches."""
        if self._squares == 0:
            relative, snr = 0.0, math.inf
        elif self._reference == 0:
            relative, snr = math.inf, -math.inf
        else:
            relative = math.sqrt(self._squares / self._reference)
            snr = -20 * math.log10(relative)
        mean = self._sum / self._count if self._count else 0.0
        return Errors(self._largest, mean, relative, snr, self._nonfinite)
