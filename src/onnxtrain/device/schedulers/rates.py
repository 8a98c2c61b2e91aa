"""Learning-rate schedulers: the rate as a function of the optimizer's steps.

A scheduler is made for an optimizer, sets its learning rate at once, and sets it anew at each
`step()`, which is called after each step of the optimizer. It counts nothing by itself: the step
is the optimizer's, so a run that was resumed goes on where it was. What a scheduler has to
remember is saved in the checkpoint of its optimizer.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal

from onnxtrain.device.checks import at_least, choice, fraction, not_negative, positive, whole
from onnxtrain.device.schedulers.base import (
    FormulaLRScheduler,
    LRScheduler,
    ScheduledOptimizer,
    State,
)
from onnxtrain.device.schedulers.plateau import PlateauLRScheduler
from onnxtrain.errors import ArgumentError

__all__ = [
    "SCHEDULERS",
    "ConstantLRScheduler",
    "CosineLRScheduler",
    "ExponentialLRScheduler",
    "LinearLRScheduler",
    "MultiStepLRScheduler",
    "OneCycleLRScheduler",
    "PlateauLRScheduler",
    "StepLRScheduler",
]


def _warmed_up(step: int, warmup_step_count: int) -> float | None:
    """The factor during the warm-up: from 0 to 1 in equal steps; None after it."""
    return step / max(1, warmup_step_count) if step < warmup_step_count else None


def _counts(warmup_step_count: int, total_step_count: int) -> State:
    """Check the two counts that warm-up schedules share."""
    warmup_step_count = whole("warmup_step_count", warmup_step_count)
    total_step_count = whole("total_step_count", total_step_count)
    if warmup_step_count > total_step_count:
        raise ArgumentError(
            f"warmup_step_count ({warmup_step_count}) is more than total_step_count "
            f"({total_step_count}): the warm-up is a part of all steps. (The Python package of "
            "onnxruntime-training took the two in the wrong order; here the warm-up comes first.)"
        )
    return {"warmup_step_count": warmup_step_count, "total_step_count": total_step_count}


class LinearLRScheduler(FormulaLRScheduler):
    """From 0 to `initial_lr` during the warm-up, then down to 0 in equal steps.

    After `total_step_count` steps the rate stays 0.
    """

    kind = "linear"

    def __init__(
        self,
        optimizer: ScheduledOptimizer,
        warmup_step_count: int,
        total_step_count: int,
        initial_lr: float | None = None,
        *,
        first_step: int = 0,
    ) -> None:
        counts = _counts(warmup_step_count, total_step_count)
        self.warmup_step_count = warmup_step_count
        self.total_step_count = total_step_count
        super().__init__(optimizer, initial_lr, first_step, counts)

    def _rate(self, step: int) -> float:
        factor = _warmed_up(step, self.warmup_step_count)
        if factor is None:
            falling = max(1, self.total_step_count - self.warmup_step_count)
            factor = max(0.0, (self.total_step_count - step) / falling)
        return self.initial_lr * factor


class ConstantLRScheduler(FormulaLRScheduler):
    """From 0 to `initial_lr` during the warm-up, and constant after it."""

    kind = "constant"

    def __init__(
        self,
        optimizer: ScheduledOptimizer,
        warmup_step_count: int = 0,
        initial_lr: float | None = None,
        *,
        first_step: int = 0,
    ) -> None:
        self.warmup_step_count = whole("warmup_step_count", warmup_step_count)
        settings: State = {"warmup_step_count": self.warmup_step_count}
        super().__init__(optimizer, initial_lr, first_step, settings)

    def _rate(self, step: int) -> float:
        factor = _warmed_up(step, self.warmup_step_count)
        return self.initial_lr if factor is None else self.initial_lr * factor


class CosineLRScheduler(FormulaLRScheduler):
    """From 0 to `initial_lr` during the warm-up, then down to `min_lr` along a cosine.

    `cycles` says how many waves there are: half a wave, from the top to the bottom, is the
    default. After `total_step_count` steps the rate stays as it was at the last.
    """

    kind = "cosine"

    def __init__(
        self,
        optimizer: ScheduledOptimizer,
        warmup_step_count: int,
        total_step_count: int,
        initial_lr: float | None = None,
        min_lr: float = 0.0,
        cycles: float = 0.5,
        *,
        first_step: int = 0,
    ) -> None:
        settings = _counts(warmup_step_count, total_step_count)
        self.warmup_step_count = warmup_step_count
        self.total_step_count = total_step_count
        self.min_lr = not_negative("min_lr", min_lr)
        self.cycles = positive("cycles", cycles)
        settings |= {"min_lr": self.min_lr, "cycles": self.cycles}
        super().__init__(optimizer, initial_lr, first_step, settings)

    def _check(self) -> None:
        if self.min_lr > self.initial_lr:
            raise ArgumentError(
                f"min_lr ({self.min_lr}) is more than the initial rate ({self.initial_lr})"
            )

    def _rate(self, step: int) -> float:
        factor = _warmed_up(step, self.warmup_step_count)
        if factor is not None:
            return self.initial_lr * factor
        falling = max(1, self.total_step_count - self.warmup_step_count)
        progress = min(1.0, (step - self.warmup_step_count) / falling)
        wave = 0.5 * (1.0 + math.cos(math.pi * self.cycles * 2.0 * progress))
        return self.min_lr + (self.initial_lr - self.min_lr) * max(0.0, wave)


class StepLRScheduler(FormulaLRScheduler):
    """The rate times `gamma` each `step_size`.

    `every` is the number of optimizer steps that count as one: the number of batches, if
    `step_size` is a number of epochs.
    """

    kind = "step"

    def __init__(
        self,
        optimizer: ScheduledOptimizer,
        step_size: int,
        gamma: float = 0.1,
        initial_lr: float | None = None,
        *,
        every: int = 1,
        first_step: int = 0,
    ) -> None:
        self.step_size = at_least(1, "step_size", step_size)
        self.gamma = positive("gamma", gamma)
        self.every = at_least(1, "every", every)
        settings: State = {"step_size": self.step_size, "gamma": self.gamma, "every": self.every}
        super().__init__(optimizer, initial_lr, first_step, settings)

    def _rate(self, step: int) -> float:
        falls = step // self.every // self.step_size
        return self.initial_lr * float(self.gamma**falls)


class MultiStepLRScheduler(FormulaLRScheduler):
    """The rate times `gamma` at each of the `milestones`, which are numbers of steps.

    `every` is the number of optimizer steps that count as one: the number of batches, if the
    milestones are numbers of epochs.
    """

    kind = "multistep"

    def __init__(
        self,
        optimizer: ScheduledOptimizer,
        milestones: Sequence[int],
        gamma: float = 0.1,
        initial_lr: float | None = None,
        *,
        every: int = 1,
        first_step: int = 0,
    ) -> None:
        self.milestones = tuple(whole("a milestone", milestone) for milestone in milestones)
        if not self.milestones or sorted(self.milestones) != list(self.milestones):
            raise ArgumentError(
                f"milestones must be numbers of steps in rising order, not {milestones!r}"
            )
        self.gamma = positive("gamma", gamma)
        self.every = at_least(1, "every", every)
        written = ",".join(map(str, self.milestones))
        settings: State = {"milestones": written, "gamma": self.gamma, "every": self.every}
        super().__init__(optimizer, initial_lr, first_step, settings)

    def _rate(self, step: int) -> float:
        passed = bisect_right(self.milestones, step // self.every)
        return self.initial_lr * float(self.gamma**passed)


class ExponentialLRScheduler(FormulaLRScheduler):
    """The rate times `gamma` at each step, or each `every` steps of the optimizer."""

    kind = "exponential"

    def __init__(
        self,
        optimizer: ScheduledOptimizer,
        gamma: float,
        initial_lr: float | None = None,
        *,
        every: int = 1,
        first_step: int = 0,
    ) -> None:
        self.gamma = positive("gamma", gamma)
        self.every = at_least(1, "every", every)
        settings: State = {"gamma": self.gamma, "every": self.every}
        super().__init__(optimizer, initial_lr, first_step, settings)

    def _rate(self, step: int) -> float:
        return self.initial_lr * float(self.gamma ** (step // self.every))


class OneCycleLRScheduler(FormulaLRScheduler):
    """Up from `max_lr / div_factor` to `max_lr`, then down far below where it began.

    The rise takes the fraction `pct_start` of all steps. With `three_phase` the fall first takes as
    long as the rise and ends where that began, and the rest of the steps goes down to the lowest
    rate, which is that of the start divided by `final_div_factor`. After the last step the rate
    stays there. Unlike torch's, this scheduler leaves the momentum of the optimizer alone: it is a
    constant of the optimizer's graph.
    """

    kind = "onecycle"

    def __init__(
        self,
        optimizer: ScheduledOptimizer,
        max_lr: float,
        total_step_count: int,
        pct_start: float = 0.3,
        anneal_strategy: Literal["cos", "linear"] = "cos",
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
        *,
        first_step: int = 0,
    ) -> None:
        self.max_lr = not_negative("max_lr", max_lr)
        self.total_step_count = at_least(1, "total_step_count", total_step_count)
        pct_start = fraction("pct_start", pct_start)
        self.anneal_strategy = choice("anneal_strategy", anneal_strategy, ("cos", "linear"))
        start = self.max_lr / positive("div_factor", div_factor)
        end = start / positive("final_div_factor", final_div_factor)
        if three_phase and pct_start > 0.5:
            raise ArgumentError(f"three_phase needs pct_start of at most 0.5, not {pct_start}")
        peak = float(pct_start * total_step_count) - 1
        self._phases = [(peak, start, self.max_lr)]
        if three_phase:
            self._phases.append((float(2 * pct_start * total_step_count) - 2, self.max_lr, start))
        last = self._phases[-1][2]
        self._phases.append((total_step_count - 1, last, end))
        settings: State = {
            "max_lr": self.max_lr,
            "total_step_count": self.total_step_count,
            "pct_start": pct_start,
            "anneal_strategy": self.anneal_strategy,
            "div_factor": float(div_factor),
            "final_div_factor": float(final_div_factor),
            "three_phase": bool(three_phase),
        }
        super().__init__(optimizer, start, first_step, settings)

    def _rate(self, step: int) -> float:
        begin = 0.0
        for end, low, high in self._phases[:-1]:
            if step <= end:
                return self._between(low, high, begin, end, step)
            begin = end
        end, low, high = self._phases[-1]
        return self._between(low, high, begin, end, min(step, end))

    def _between(self, start: float, goal: float, begin: float, end: float, step: float) -> float:
        """The rate on the way from `start`, at the step `begin`, to `goal`, at the step `end`."""
        progress = (step - begin) / (end - begin) if end > begin else 1.0
        if self.anneal_strategy == "linear":
            return start + (goal - start) * progress
        return goal + (start - goal) / 2.0 * (1.0 + math.cos(math.pi * progress))


SCHEDULERS: dict[str, type[LRScheduler]] = {
    scheduler.kind: scheduler
    for scheduler in (
        LinearLRScheduler,
        ConstantLRScheduler,
        CosineLRScheduler,
        StepLRScheduler,
        MultiStepLRScheduler,
        ExponentialLRScheduler,
        OneCycleLRScheduler,
        PlateauLRScheduler,
    )
}
