"""The ranges of activations in a run: they follow training, and rest in its last quarter.

So the last steps train for the very integers that will be exported. Whether ranges rest follows
from the position of the run, not from what the checkpoint holds: a resumed run goes on in the same
way, and a new one begins with ranges that move.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from onnxtrain.format.names import RANGE_MOMENTUM

if TYPE_CHECKING:
    from onnxtrain.device.parameters import Parameter
    from onnxtrain.device.session import TrainingSession

_MOVING = 0.75  # the part of a run in which ranges move


class RangeFreeze:
    """Lets the ranges of a model that trains for integers rest in the last steps of a run.

    `total` is the number of steps of the run; where nobody knows it, ranges move to the end.
    """

    def __init__(self, session: TrainingSession, total: int | None) -> None:
        held = session.state.parameters
        self._momentum: Parameter | None = None
        if RANGE_MOMENTUM in held:
            self._momentum = held[RANGE_MOMENTUM]
        self._first = None if total is None else _MOVING * total

    @contextmanager
    def at(self, step: int) -> Iterator[None]:
        """Take a step after so many others; afterwards, the momentum is that of before."""
        momentum = self._momentum
        if momentum is None or self._first is None or step < self._first:
            yield
            return
        before = np.array(momentum.data)
        momentum.data = np.zeros_like(before)
        try:
            yield
        finally:
            momentum.data = before
