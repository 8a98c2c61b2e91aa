"""The batches that every peer trains on: the same numbers in the same order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from plan import Workload

BATCHES = 4


def endless(workload: Workload) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Give a few batches of samples and labels again and again; they are made when first needed."""
    rng = np.random.default_rng(7)
    made: list[tuple[np.ndarray, np.ndarray]] = []
    while len(made) < BATCHES:
        made.append(_batch(workload, rng))
        yield made[-1]
    while True:
        yield from made


def _batch(workload: Workload, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    shape = (workload.batch, *workload.shape)
    labels = rng.integers(0, workload.classes, workload.batch)
    if workload.words:
        return rng.integers(0, workload.words, shape), labels
    return rng.standard_normal(shape, np.float32), labels
