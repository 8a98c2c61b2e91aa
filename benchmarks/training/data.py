"""The batches that every peer trains on: the same numbers in the same order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from plan import Workload

BATCHES = 8


def batches(workload: Workload) -> list[tuple[np.ndarray, np.ndarray]]:
    """Make a few batches of samples and labels."""
    rng = np.random.default_rng(7)
    return [_batch(workload, rng) for _ in range(BATCHES)]


def _batch(workload: Workload, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    shape = (workload.batch, *workload.shape)
    labels = rng.integers(0, workload.classes, workload.batch)
    if workload.words:
        return rng.integers(0, workload.words, shape), labels
    return rng.standard_normal(shape, np.float32), labels


def endless(workload: Workload) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Give the batches again and again."""
    return itertools.cycle(batches(workload))
