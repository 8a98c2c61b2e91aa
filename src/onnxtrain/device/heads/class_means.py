"""Nearest class mean: a class is known by the mean of its features, which new samples refine."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxtrain.device.heads.ridge import LinearHead
from onnxtrain.errors import CheckpointError
from onnxtrain.format.checkpoint.content import Array
from onnxtrain.format.strict_json import entry, mapping, shortened

METRICS = ("cosine", "euclidean")
_NEVER = 10.0  # how far the score of a class without samples is below the best one


@dataclass
class ClassMeans:
    """Sums of the features of each class, and how many samples they are of."""

    metric: str
    sums: Array  # a row for each class
    counts: Array

    @classmethod
    def empty(cls, metric: str, classes: int, features: int) -> ClassMeans:
        """Return the sums of no samples."""
        return cls(metric, np.zeros((classes, features)), np.zeros(classes))

    def add(self, features: Array, belongs: Array) -> None:
        """Take in samples; `belongs` has a column for each class, 1 for that of a sample."""
        self.sums += belongs.T.astype(np.float64) @ self._seen(features)
        self.counts += belongs.sum(0, dtype=np.float64)

    def head(self, features: Array, belongs: Array) -> LinearHead:
        """Return the head that finds the nearest mean, and its scores for samples among them."""
        x, labels = features.astype(np.float64), belongs.argmax(1)
        weight, bias = self._linear(self.sums, self.counts)
        scores = x @ weight + bias
        unseen = self.counts < 0.5
        if unseen.any():
            best = scores[:, ~unseen].max(1)
            bias[unseen] = best.min() - _NEVER * (np.ptp(best) + np.abs(best).max())
            scores[:, unseen] = bias[unseen]
        # Without a sample, the mean of its own class is another one.
        others = self.counts[labels] - 1
        known = np.flatnonzero(others > 0.5)
        sums = self.sums[labels[known]] - self._seen(x[known])
        own, shift = self._linear(sums, others[known])
        scores[known, labels[known]] = np.einsum("nf,fn->n", x[known], own) + shift
        return LinearHead(weight, bias, scores)

    def _seen(self, features: Array) -> Array:
        """Return features as distances are measured between them."""
        x = features.astype(np.float64)
        return x if self.metric == "euclidean" else _normalised(x)

    def _linear(self, sums: Array, counts: Array) -> tuple[Array, Array]:
        """Return the weight and bias whose largest score is that of the nearest mean.

        |x - m|² is least where x·m - |m|²/2 is largest; the cosine where x·m/|m| is.
        """
        means = sums / np.maximum(counts, 1)[:, None]
        if self.metric == "cosine":
            return _normalised(means).T, np.zeros(len(means))
        return means.T, -0.5 * (means**2).sum(1)

    # ---- in a checkpoint -----------------------------------------------------------------------

    def to_record(self) -> dict[str, Any]:
        """Return the sums as plain data."""
        return {
            "metric": self.metric,
            "shape": list(self.sums.shape),
            "sums": _packed(self.sums),
            "counts": _packed(self.counts),
        }

    @classmethod
    def from_record(cls, record: Any) -> ClassMeans:
        """Read the record of a checkpoint, which is not trusted."""
        try:
            saved = mapping(record, "it")
            shape = entry(saved, "shape")
            right = isinstance(shape, list) and [type(size) for size in shape] == [int, int]
            if not right or entry(saved, "metric") not in METRICS or min(shape) < 1:
                raise ValueError(f"it has the shape {shortened(shape)}")
            sums, counts = _unpacked(saved, "sums"), _unpacked(saved, "counts")
            if sums.size != shape[0] * shape[1] or counts.size != shape[0]:
                raise ValueError("its sums are not as many as it says")
            if not np.isfinite(sums).all() or not (counts >= 0).all():
                raise ValueError("its sums or counts are no finite numbers")
        except ValueError as wrong:
            raise CheckpointError(
                f"the checkpoint's record of class means cannot be read: {wrong}. Start with "
                "add=False"
            ) from None
        return cls(saved["metric"], sums.reshape(shape), counts)


def _normalised(x: Array) -> Array:
    norms = np.linalg.norm(x, axis=-1, keepdims=True)
    found: Array = x / np.where(norms > 0, norms, 1)
    return found


def _packed(array: Array) -> str:
    return base64.b64encode(array.astype("<f8").tobytes()).decode("ascii")


def _unpacked(record: Mapping[str, Any], name: str) -> Array:
    text = entry(record, name)
    if not isinstance(text, str):
        raise ValueError(f"{name!r} is {shortened(text)}")
    return np.frombuffer(base64.b64decode(text, validate=True), "<f8").astype(np.float64)
