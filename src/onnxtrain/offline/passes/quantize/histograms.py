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
_PARTS = 64  # of a range that are tried as its bounds


def percentile(counts: Array, low: float, high: float, settings: Quantize) -> Range:
    """Leave out as many elements below as above, so that the given part of all is kept."""
    if not counts.sum():
        return low, high
    share = np.cumsum(counts) / counts.sum()
    tail = (
        (1.0 - settings.percentile / 100.0) / 2
        if low < 0 < high
        else (1.0 - settings.percentile / 100.0)
    )
    edges = np.linspace(low, high, BINS + 1)
    first = int(np.searchsorted(share, tail, side="right")) if low < 0 else 0
    last = int(np.searchsorted(share, 1.0 - tail)) if high > 0 else BINS - 1
    return float(edges[first]), float(edges[min(last, BINS - 1) + 1])


def least_squares(counts: Array, low: float, high: float, settings: Quantize) -> Range:
    """Return the range that loses least by rounding and clipping, in the mean of squares."""
    middles = _middles(low, high)

    def loss(bounds: Range) -> float:
        return float((counts * np.square(_quantized(middles, *bounds) - middles)).sum())

    return min(_candidates(low, high), key=loss)


def least_entropy(counts: Array, low: float, high: float, settings: Quantize) -> Range:
    """Return the range whose 256 levels tell most of the distribution (Kullback-Leibler)."""
    middles = _middles(low, high)
    total = counts.sum()
    if not total:
        return low, high

    def loss(bounds: Range) -> float:
        inside = (middles >= bounds[0]) & (middles <= bounds[1])
        clipped = counts * inside
        kept = np.flatnonzero(inside)
        if not kept.size:
            return np.inf
        clipped[kept[0]] += counts[: kept[0]].sum()
        clipped[kept[-1]] += counts[kept[-1] + 1 :].sum()
        step = (bounds[1] - bounds[0]) / (_LEVELS - 1)
        level = np.clip(np.rint((middles[kept] - bounds[0]) / step), 0, _LEVELS - 1).astype(int)
        # Each level spreads what it holds over the bins of it that hold anything.
        is_used = counts[kept] > 0
        mass = np.bincount(level, counts[kept], _LEVELS)
        bins = np.bincount(level, is_used, _LEVELS)
        spread = np.where(is_used, mass[level] / np.maximum(bins[level], 1), 0.0)
        p, q = clipped[kept] / total, spread / max(spread.sum(), 1e-30)
        both = (p > 0) & (q > 0)
        lost = p[(p > 0) & (q == 0)].sum()  # there is no level for it
        return float((p[both] * np.log(p[both] / q[both])).sum() + 20.0 * lost)

    return min(_candidates(low, high), key=loss)


METHODS: dict[str, Callable[[Array, float, float, Quantize], Range]] = {
    "percentile": percentile, "mse": least_squares, "entropy": least_entropy,
}  # fmt: skip


def _middles(low: float, high: float) -> Array:
    edges = np.linspace(low, high, BINS + 1)
    return (edges[1:] + edges[:-1]) / 2


def _candidates(low: float, high: float) -> Iterator[Range]:
    """Yield narrower ranges, widest first: both bounds by the same part."""
    for part in np.linspace(1.0, 1.0 / _PARTS, _PARTS):
        yield low * part, high * part


def _quantized(x: Array, low: float, high: float) -> Array:
    step = (high - low) / (_LEVELS - 1)
    zero = np.rint(-low / step)
    return (np.clip(np.rint(x / step) + zero, 0, _LEVELS - 1) - zero) * step
