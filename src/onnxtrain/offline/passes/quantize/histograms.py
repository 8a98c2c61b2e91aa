"""Ranges from histograms of activations: without the outermost elements, or of least loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from onnxtrain.offline.quantize import Quantize

Array = np.ndarray[Any, Any]
Range = tuple[float, float]
BINS = 2048
_LEVELS = 256
_PARTS = 64  # of a bound that are tried
_ROUNDS = 2  # in which each bound is tried alone
_AT_ONCE = 1 << 20  # elements, which a histogram takes some room for


def count(array: Array, low: float, high: float) -> Array:
    """Return how many elements are in each of the bins between two bounds."""
    flat, factor = array.reshape(-1), BINS / (high - low)
    counts = np.zeros(BINS)
    for start in range(0, flat.size, _AT_ONCE):
        places = ((flat[start : start + _AT_ONCE] - low) * factor).astype(np.int32)
        counts += np.bincount(np.clip(places, 0, BINS - 1), minlength=BINS)
    return counts


def percentile(counts: Array, low: float, high: float, settings: Quantize) -> Range:
    """Leave out as many elements below as above, so that the given part of all is kept."""
    if not counts.sum():
        return low, high
    share = np.cumsum(counts) / counts.sum()
    tail = 1.0 - settings.percentile / 100.0
    if low < 0 < high:
        tail /= 2
    edges = np.linspace(low, high, BINS + 1)
    first = int(np.searchsorted(share, tail, side="right")) if low < 0 else 0
    last = int(np.searchsorted(share, 1.0 - tail)) if high > 0 else BINS - 1
    return float(edges[min(first, BINS - 1)]), float(edges[min(last, BINS - 1) + 1])


def least_squares(counts: Array, low: float, high: float, settings: Quantize) -> Range:
    """Return the range that loses least by rounding and clipping, in the mean of squares."""
    middles = _middles(low, high)

    def loss(bounds: Range) -> float:
        return float((counts * np.square(_quantized(middles, *bounds) - middles)).sum())

    return _best(low, high, loss)


def least_entropy(counts: Array, low: float, high: float, settings: Quantize) -> Range:
    """Return the range whose 256 levels tell most of the distribution (Kullback-Leibler).

    Zeros are left out: a level of their own has them without loss, and behind a Relu they are half
    of all.
    """
    middles = _middles(low, high)
    counts = _without_zeros(counts, low, high)
    total = counts.sum()
    if not total:
        return low, high

    def loss(bounds: Range) -> float:
        kept = np.flatnonzero((middles >= bounds[0]) & (middles <= bounds[1]))
        if not kept.size:
            return np.inf
        clipped = counts[kept].copy()
        clipped[0] += counts[: kept[0]].sum()
        clipped[-1] += counts[kept[-1] + 1 :].sum()
        step = (bounds[1] - bounds[0]) / (_LEVELS - 1)
        level = np.clip(np.rint((middles[kept] - bounds[0]) / step), 0, _LEVELS - 1).astype(int)
        # Each level spreads what it holds over the bins of it that hold anything.
        is_used = counts[kept] > 0
        mass = np.bincount(level, counts[kept], _LEVELS)
        bins = np.bincount(level, is_used, _LEVELS)
        spread = np.where(is_used, mass[level] / np.maximum(bins[level], 1), 0.0)
        p, q = clipped / total, spread / max(spread.sum(), 1e-30)
        both = (p > 0) & (q > 0)
        lost = p[(p > 0) & (q == 0)].sum()  # there is no level for it
        return float((p[both] * np.log(p[both] / q[both])).sum() + 20.0 * lost)

    return _best(low, high, loss)


METHODS: dict[str, Callable[[Array, float, float, Quantize], Range]] = {
    "percentile": percentile, "mse": least_squares, "entropy": least_entropy,
}  # fmt: skip


def _middles(low: float, high: float) -> Array:
    edges = np.linspace(low, high, BINS + 1)
    return (edges[1:] + edges[:-1]) / 2


def _without_zeros(counts: Array, low: float, high: float) -> Array:
    """Return counts with no more elements in the bin of zero than in those beside it."""
    zero = min(int(-low * BINS / (high - low)), BINS - 1)
    beside = [counts[i] for i in (zero - 1, zero + 1) if 0 <= i < BINS]
    counts = counts.copy()
    counts[zero] = min(counts[zero], max(beside))
    return counts


def _best(low: float, high: float, loss: Callable[[Range], float]) -> Range:
    """Return the range of least loss: both bounds narrower by the same part, then each alone."""
    best = min(((low * part, high * part) for part in _parts()), key=loss)
    for _ in range(_ROUNDS if low < 0 < high else 0):
        best = min(((low * part, best[1]) for part in (best[0] / low, *_parts())), key=loss)
        best = min(((best[0], high * part) for part in (best[1] / high, *_parts())), key=loss)
    return best


def _parts() -> Iterator[float]:
    """Yield the parts of a bound that are tried, the largest first."""
    yield from np.linspace(1.0, 1.0 / _PARTS, _PARTS).tolist()


def _quantized(x: Array, low: float, high: float) -> Array:
    step = (high - low) / (_LEVELS - 1)
    zero = np.rint(-low / step)
    levels = np.clip(np.rint(x / step) + zero, 0, _LEVELS - 1)
    return np.asarray((levels - zero) * step)
