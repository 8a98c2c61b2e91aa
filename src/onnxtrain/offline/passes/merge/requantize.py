"""Quantizes weights again, in the format that they had.

Each group of weights (a tensor, a channel or a block) gets the scale and zero point, out of several
candidates, that bring its weights back with the smallest squared error. The old ones are among
them: weights that an update did not touch then stay what they were.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Grid:
    """How integers stand for weights: (integer - zero) · scale.

    `scale` and `zero` have as many axes as the weights, of length 1 where all share them. `zero`
    may be moved unless it is `fixed`; one of floats need not be whole.
    """

    scale: Array
    zero: Array
    lowest: int
    highest: int
    is_fixed: bool
    has_float_zero: bool = False

    def values(self, integers: Array) -> Array:
        """Return the weights that integers stand for."""
        return (integers.astype(np.float32) - self.zero) * self.scale.astype(np.float32)


def quantized_again(
    weights: Array, grid: Grid, keep_scale: bool = False
) -> tuple[Array, Array, Array]:
    """Return integers, scales and zero points for weights; `keep_scale` moves nothing."""
    axes = tuple(i for i in range(weights.ndim) if np.shape(grid.scale)[i] == 1)
    best: tuple[Array, Array, Array, Array] | None = None
    for scale, zero in _candidates(weights, grid, axes, keep_scale):
        integers = np.clip(np.rint(weights / scale + zero), grid.lowest, grid.highest)
        error = np.square((integers - zero) * scale - weights).sum(axes, keepdims=True)
        if best is None:
            best = error, integers, scale, zero
            continue
        better = error < best[0]
        old = (error, integers, scale, zero)
        best = tuple(np.where(better, new, kept) for new, kept in zip(old, best, strict=True))  # type: ignore[assignment]
    assert best is not None
    return best[1], best[2].astype(grid.scale.dtype), best[3]


def _candidates(
    weights: Array, grid: Grid, axes: tuple[int, ...], keep_scale: bool
) -> Iterator[tuple[Array, Array]]:
    kind = grid.scale.dtype
    old = grid.scale.astype(np.float32)
    zero = np.broadcast_to(grid.zero, old.shape).astype(np.float32)
    yield np.where(old == 0, 1, old), zero
    if keep_scale:
        return
    least, most = weights.min(axes, keepdims=True), weights.max(axes, keepdims=True)
    if grid.is_fixed:
        # The largest weight may meet either end; a scale may be negative for that.
        room = np.minimum(grid.highest - zero, zero - grid.lowest)
        far = np.where(-least > most, least, most)
        yield _stored(np.maximum(-least, most) / room, kind), zero
        if (zero - grid.lowest != grid.highest - zero).any():
            yield _stored(far / (grid.lowest - zero), kind), zero
        return
    least, most = np.minimum(least, 0), np.maximum(most, 0)
    scale = _stored((most - least) / (grid.highest - grid.lowest), kind)
    moved = grid.lowest - least / scale
    moved = moved if grid.has_float_zero else np.clip(np.rint(moved), grid.lowest, grid.highest)
    yield scale, moved.astype(np.float32)


def _stored(scale: Array, kind: np.dtype[Any]) -> Array:
    """Return scales as the file holds them; a group of zeros has any."""
    rounded = scale.astype(kind).astype(np.float32)
    return np.where(rounded == 0, 1, rounded)
