"""The seed of each step's random numbers.

Training graphs that draw random numbers (Dropout, for one) have the input `random_seed`: two words,
computed here from a seed and the number of draws so far. Both are saved with the state of the
optimizer, so a resumed run draws what it would have drawn.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnxruntime as ort

from onnxtrain.errors import ArgumentError
from onnxtrain.format.checkpoint.content import Array

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15

_process_seed: int | None = None
_times_seeded = 0


def set_seed(seed: int) -> None:
    """Determine everything that is random in training by a number, from here on.

    Concerns Dropout and other random operators of training graphs, the order in which `fit` takes
    samples, and onnxruntime's own generators. A state that is loaded afterwards continues
    the random numbers that it was saved with, if it has any.
    """
    global _process_seed, _times_seeded
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise ArgumentError(f"a seed is an integer, not {seed!r}")
    _process_seed = int(seed) & _MASK
    _times_seeded += 1
    ort.set_seed(_process_seed & (2**63 - 1))


def process_seed() -> int | None:
    """The number that `set_seed` was given last, if any."""
    return _process_seed


class RandomState:
    """A sequence of seeds; where it stands can be saved."""

    def __init__(self, saved: dict[str, Any] | None = None) -> None:
        self._seed = self.draws = 0
        self._times_seeded = -1
        if saved is not None:
            self._seed, self.draws = int(saved["seed"]) & _MASK, int(saved["draws"])
            self._times_seeded = _times_seeded
        self._heed_set_seed()

    def next(self, words: Array) -> None:
        """Write the next seed into an array of two words of 32 bits."""
        self._heed_set_seed()
        self.draws += 1
        mixed = _mix((self._seed + self.draws * _GOLDEN) & _MASK)
        words[0], words[1] = mixed & 0xFFFFFFFF, mixed >> 32

    @contextmanager
    def drawn(self, words: Array | None) -> Iterator[None]:
        """Write the next seed, if there is an array for it; it counts unless the run fails."""
        if words is not None:
            self.next(words)
        try:
            yield
        except BaseException:
            self.draws -= words is not None
            raise

    def saved(self) -> dict[str, Any]:
        """Return what `RandomState` takes."""
        self._heed_set_seed()
        return {"seed": self._seed, "draws": self.draws}

    def _heed_set_seed(self) -> None:
        """Start anew if `set_seed` was called since."""
        if self._times_seeded != _times_seeded:
            self._times_seeded = _times_seeded
            own = int.from_bytes(os.urandom(8), "little")
            self._seed = own if _process_seed is None else _process_seed
            self.draws = 0


def _mix(z: int) -> int:
    """Spread the bits of a counter over a number of 64 bits."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
