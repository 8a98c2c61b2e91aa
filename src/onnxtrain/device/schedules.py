"""Learning-rate schedules: plain functions from a step, counted from 0, to the learning rate.

    fit(session, data, epochs=5, schedule=schedules.cosine(0.01, steps=500, warmup=50))

Any other function from a step to a rate is a schedule, too. `Plateau` depends on a metric and is
therefore no function but a callback.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal

from onnxtrain.device.checks import at_least, choice, fraction, not_negative, positive
from onnxtrain.errors import ArgumentError

__all__ = [
    "Plateau",
    "Schedule",
    "constant",
    "cosine",
    "exponential",
    "linear",
    "multistep",
    "onecycle",
    "step",
]

Schedule = Callable[[int], float]


def constant(rate: float, *, warmup: int = 0) -> Schedule:
    """Rise from 0 to `rate` in `warmup` steps, then stay there."""
    rate = not_negative("rate", rate)
    return _warmed_up(rate, warmup, lambda step: rate)


def linear(rate: float, steps: int, *, warmup: int = 0, end: float = 0.0) -> Schedule:
    """Rise from 0 to `rate` in `warmup` steps, then fall to `end` in equal steps.

    `steps` is the length of the schedule, warm-up included; after it the rate stays at `end`.
    """
    rate, end, falling = _check_decay(rate, steps, warmup, end)

    def decay(step: int) -> float:
        return end + (rate - end) * max(0.0, (steps - warmup - step) / falling)

    return _warmed_up(rate, warmup, decay)


def cosine(
    rate: float, steps: int, *, warmup: int = 0, end: float = 0.0, cycles: float = 0.5
) -> Schedule:
    """Rise from 0 to `rate` in `warmup` steps, then fall to `end` along a cosine.

    `cycles` is the number of waves; the default is half a wave, from the top to the bottom. After
    `steps` steps the rate stays as it was at the last.
    """
    rate, end, falling = _check_decay(rate, steps, warmup, end)
    positive("cycles", cycles)

    def decay(step: int) -> float:
        wave = 0.5 * (1.0 + math.cos(math.pi * cycles * 2.0 * min(1.0, step / falling)))
        return end + (rate - end) * max(0.0, wave)

    return _warmed_up(rate, warmup, decay)


def step(rate: float, step_size: int, gamma: float = 0.1, *, every: int = 1) -> Schedule:
    """Multiply the rate by `gamma` after each `step_size` steps.

    `every` is the number of optimizer steps that count as one: that of an epoch, for instance.
    """
    at_least(1, "step_size", step_size)
    return _powers(rate, gamma, every, lambda count: count // step_size)


def multistep(
    rate: float, milestones: Sequence[int], gamma: float = 0.1, *, every: int = 1
) -> Schedule:
    """Multiply the rate by `gamma` at each of the `milestones`; `every` is as for `step`."""
    passed = [at_least(0, "a milestone", milestone) for milestone in milestones]
    if not passed or sorted(passed) != passed:
        raise ArgumentError(f"milestones must be step numbers in rising order, not {milestones!r}")
    return _powers(rate, gamma, every, lambda count: bisect_right(passed, count))


def exponential(rate: float, gamma: float, *, every: int = 1) -> Schedule:
    """Multiply the rate by `gamma` after each step, or after each `every` steps."""
    return _powers(rate, gamma, every, lambda count: count)


def onecycle(
    rate: float,
    steps: int,
    *,
    pct_start: float = 0.3,
    anneal_strategy: Literal["cos", "linear"] = "cos",
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
    three_phase: bool = False,
) -> Schedule:
    """Rise from `rate / div_factor` to `rate`, then fall far below the start.

    The rise takes the fraction `pct_start` of the steps. With `three_phase` the rate first falls
    back to the start in as many steps as it rose. The lowest rate is that of the start divided by
    `final_div_factor`. Unlike torch's, this schedule leaves the momentum alone: it is a constant of
    the optimizer's graph.
    """
    rate = not_negative("rate", rate)
    at_least(1, "steps", steps)
    fraction("pct_start", pct_start)
    choice("anneal_strategy", anneal_strategy, ("cos", "linear"))
    if three_phase and pct_start > 0.5:
        raise ArgumentError(f"three_phase needs pct_start of at most 0.5, not {pct_start}")
    start = rate / positive("div_factor", div_factor)
    end = start / positive("final_div_factor", final_div_factor)
    # The corners of the curve: a step, and the rate there.
    corners = [(0.0, start), (float(pct_start * steps) - 1, rate)]
    if three_phase:
        corners.append((float(2 * pct_start * steps) - 2, start))
    corners.append((float(steps - 1), end))

    def schedule(step: int) -> float:
        (begin, low), (finish, high) = next(
            (pair for pair in pairwise(corners) if step <= pair[1][0]), (corners[-2], corners[-1])
        )
        progress = (min(step, finish) - begin) / (finish - begin) if finish > begin else 1.0
        if anneal_strategy == "linear":
            return low + (high - low) * progress
        return high + (low - high) / 2.0 * (1.0 + math.cos(math.pi * progress))

    return schedule


class Plateau:
    """Lower the rate when a metric has not improved for some epochs; for `fit(schedule=...)`.

    `monitor` and `mode` are as for `EarlyStopping`. The settings are `factor`, `patience`,
    `threshold`, `threshold_mode`, `cooldown`, `min_lr`, `eps` and `initial_lr`, as for
    `onnxtrain.api.PlateauLRScheduler`.
    """

    def __init__(
        self,
        monitor: str | None = None,
        mode: Literal["auto", "min", "max"] = "auto",
        **settings: Any,
    ) -> None:
        self.monitor = monitor
        self.mode = choice("mode", mode, ("auto", "min", "max"))
        self.settings = settings


def _check_decay(rate: float, steps: int, warmup: int, end: float) -> tuple[float, float, int]:
    """Check what `linear` and `cosine` share; return the two rates and the length of the fall."""
    if at_least(0, "warmup", warmup) > at_least(0, "steps", steps):
        raise ArgumentError(f"warmup ({warmup}) is more than all steps ({steps})")
    rate, end = not_negative("rate", rate), not_negative("end", end)
    if end > rate:
        raise ArgumentError(f"the rate at the end ({end}) is more than the highest rate ({rate})")
    return rate, end, max(1, steps - warmup)


def _warmed_up(rate: float, warmup: int, after: Schedule) -> Schedule:
    at_least(0, "warmup", warmup)
    return lambda step: rate * (step / warmup) if step < warmup else after(step - warmup)


def _powers(rate: float, gamma: float, every: int, power: Callable[[int], int]) -> Schedule:
    rate, gamma = not_negative("rate", rate), positive("gamma", gamma)
    at_least(1, "every", every)
    return lambda step: rate * float(gamma ** power(step // every))
