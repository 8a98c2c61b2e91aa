"""Schedulers as objects, for scripts written for onnxruntime's training API.

A scheduler sets the learning rate of its optimizer when it is made and at each `step()`. The rates
are those of `onnxtrain.schedules`. The step is counted by the optimizer, so a resumed run continues
where it stopped; the settings are saved in the checkpoint.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from onnxtrain.device import schedules
from onnxtrain.device.checks import choice, not_negative, positive, whole
from onnxtrain.device.schedules import Schedule
from onnxtrain.errors import ArgumentError, CheckpointError

if TYPE_CHECKING:
    from onnxtrain.device.optimizer import Optimizer

State = dict[str, Any]


class LRScheduler:
    """A learning-rate scheduler; `kind` is its name in checkpoints and in `onnxtrain.fit`."""

    kind: str = ""

    def __init__(self, optimizer: Optimizer, settings: State) -> None:
        self._optimizer = optimizer
        rate = settings["initial_lr"]
        saved = optimizer.saved_scheduler(self.kind)
        if rate is not None:
            rate = not_negative("initial_lr", rate)
        elif saved is not None:
            rate = saved_number(saved, "initial_lr")
        else:
            rate = optimizer.get_learning_rate()
        self.initial_lr = float(rate)
        self._settings = {**settings, "initial_lr": self.initial_lr}
        self._begin(saved)
        optimizer.attach(self)

    def _begin(self, saved: Mapping[str, Any] | None) -> None:
        """Set the first rate, or continue from the saved state."""
        raise NotImplementedError

    def _changes(self, saved: Mapping[str, Any]) -> set[str]:
        """Warn of settings that differ from the saved ones, and return their names."""
        missing = object()
        changed = {k: v for k, v in self._settings.items() if saved.get(k, missing) != v}
        if changed:
            details = ", ".join(f"{k}={v!r} (saved: {saved.get(k)!r})" for k, v in changed.items())
            warnings.warn(
                f"{type(self).__name__} continues with settings that differ from the checkpoint's: "
                f"{details}",
                UserWarning,
                stacklevel=6,
            )
        return set(changed)

    def state(self) -> State:
        """Return what a checkpoint keeps of the scheduler."""
        return dict(self._settings)

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self._settings.items())
        return f"{type(self).__name__}({settings})"


class _FunctionLRScheduler(LRScheduler):
    """A scheduler whose rate is a function of the number of steps.

    `first_step` is the optimizer's step at which the schedule begins: 0, unless the optimizer has
    trained before and the schedule is a new one.
    """

    def __init__(
        self, optimizer: Optimizer, function: Callable[..., Schedule], settings: State
    ) -> None:
        self.first_step = whole("first_step", settings["first_step"])
        self._function = function
        super().__init__(optimizer, settings)

    def _begin(self, saved: Mapping[str, Any] | None) -> None:
        rate = "max_lr" if "max_lr" in self._settings else "initial_lr"
        given = {k: v for k, v in self._settings.items() if k not in ("initial_lr", "first_step")}
        given |= {rate: self._settings[rate]}
        self._rate = self._function(**{_ARGUMENTS.get(k, k): v for k, v in given.items()})
        # As a checkpoint has them, now that they have been checked.
        self._settings |= {k: float(v) for k, v in given.items() if k in _FLOATS}
        if "milestones" in given:
            self._settings["milestones"] = ",".join(map(str, given["milestones"]))
        if saved is None or self._changes(saved):
            self._optimizer.initial_lr = self.initial_lr
            self.step()

    def learning_rate(self, step: int) -> float:
        """Return the learning rate after `step` steps of the optimizer, in double precision."""
        return self._rate(max(0, step - self.first_step))

    def step(self) -> None:
        """Set the learning rate for the optimizer's present number of steps."""
        self._optimizer.set_learning_rate(self.learning_rate(self._optimizer.step_count))


# What the functions of `onnxtrain.schedules` call the arguments of schedulers.
_ARGUMENTS = {
    "initial_lr": "rate", "max_lr": "rate", "min_lr": "end",
    "total_step_count": "steps", "warmup_step_count": "warmup",
}  # fmt: skip
_FLOATS = ("min_lr", "cycles", "gamma", "max_lr", "pct_start", "div_factor", "final_div_factor")


class LinearLRScheduler(_FunctionLRScheduler):
    """Rise from 0 to `initial_lr` during the warm-up, then fall to 0; see `schedules.linear`."""

    kind = "linear"

    def __init__(
        self, optimizer: Optimizer, warmup_step_count: int, total_step_count: int,
        initial_lr: float | None = None, *, first_step: int = 0,
    ) -> None:  # fmt: skip
        warmup = whole("warmup_step_count", warmup_step_count)
        if warmup > whole("total_step_count", total_step_count):
            raise ArgumentError(
                f"warmup_step_count ({warmup}) is more than total_step_count ({total_step_count}). "
                "(The Python package of onnxruntime-training took the two in the wrong order; here "
                "the warm-up comes first.)"
            )
        del warmup
        super().__init__(optimizer, schedules.linear, _settings(locals()))


class ConstantLRScheduler(_FunctionLRScheduler):
    """Rise from 0 to `initial_lr` during the warm-up, then stay; see `schedules.constant`."""

    kind = "constant"

    def __init__(
        self, optimizer: Optimizer, warmup_step_count: int = 0,
        initial_lr: float | None = None, *, first_step: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(optimizer, schedules.constant, _settings(locals()))


class CosineLRScheduler(_FunctionLRScheduler):
    """Rise from 0 during the warm-up, then fall along a cosine; see `schedules.cosine`."""

    kind = "cosine"

    def __init__(
        self, optimizer: Optimizer, warmup_step_count: int, total_step_count: int,
        initial_lr: float | None = None, min_lr: float = 0.0, cycles: float = 0.5,
        *, first_step: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(optimizer, schedules.cosine, _settings(locals()))


class StepLRScheduler(_FunctionLRScheduler):
    """Multiply the rate by `gamma` after each `step_size` steps; see `schedules.step`."""

    kind = "step"

    def __init__(
        self, optimizer: Optimizer, step_size: int, gamma: float = 0.1,
        initial_lr: float | None = None, *, every: int = 1, first_step: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(optimizer, schedules.step, _settings(locals()))


class MultiStepLRScheduler(_FunctionLRScheduler):
    """Multiply the rate by `gamma` at each of the `milestones`; see `schedules.multistep`."""

    kind = "multistep"

    def __init__(
        self, optimizer: Optimizer, milestones: Sequence[int], gamma: float = 0.1,
        initial_lr: float | None = None, *, every: int = 1, first_step: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(optimizer, schedules.multistep, _settings(locals()))


class ExponentialLRScheduler(_FunctionLRScheduler):
    """Multiply the rate by `gamma` after each `every` steps; see `schedules.exponential`."""

    kind = "exponential"

    def __init__(
        self, optimizer: Optimizer, gamma: float,
        initial_lr: float | None = None, *, every: int = 1, first_step: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(optimizer, schedules.exponential, _settings(locals()))


class OneCycleLRScheduler(_FunctionLRScheduler):
    """Rise to `max_lr`, then fall far below the start; see `schedules.onecycle`."""

    kind = "onecycle"

    def __init__(
        self, optimizer: Optimizer, max_lr: float, total_step_count: int,
        pct_start: float = 0.3, anneal_strategy: Literal["cos", "linear"] = "cos",
        div_factor: float = 25.0, final_div_factor: float = 1e4, three_phase: bool = False,
        *, first_step: int = 0,
    ) -> None:  # fmt: skip
        initial_lr = not_negative("max_lr", max_lr) / positive("div_factor", div_factor)
        super().__init__(optimizer, schedules.onecycle, _settings(locals()))


def _settings(arguments: Mapping[str, Any]) -> State:
    """Return the arguments of a constructor that are settings, numbers as Python's own."""
    own = {k: v for k, v in arguments.items() if k not in ("self", "optimizer", "__class__")}
    return {k: v.item() if hasattr(v, "item") else v for k, v in own.items()}


class PlateauLRScheduler(LRScheduler):
    """Multiply the rate by `factor` when a metric has not improved for `patience` steps.

    `step(metric)` is called after each evaluation. A metric improves if it is below (with
    mode="max", above) the best so far by `threshold`: relative to it ("rel"), or absolute ("abs").
    After a fall the next `cooldown` steps are not counted. The rate never falls below `min_lr`, and
    stays if it would fall by less than `eps`.
    """

    kind = "plateau"

    def __init__(
        self, optimizer: Optimizer, mode: Literal["min", "max"] = "min",
        factor: float = 0.1, patience: int = 10, threshold: float = 1e-4,
        threshold_mode: Literal["rel", "abs"] = "rel", cooldown: int = 0, min_lr: float = 0.0,
        eps: float = 1e-8, initial_lr: float | None = None,
    ) -> None:  # fmt: skip
        self.mode = choice("mode", mode, ("min", "max"))
        if positive("factor", factor) >= 1.0:
            raise ArgumentError(f"factor must be less than 1, not {factor}")
        self.best: float | None = None
        self._bad_steps = self._resting = 0
        settings: State = {
            "mode": self.mode,
            "factor": float(factor),
            "patience": whole("patience", patience),
            "threshold": not_negative("threshold", threshold),
            "threshold_mode": choice("threshold_mode", threshold_mode, ("rel", "abs")),
            "cooldown": whole("cooldown", cooldown),
            "min_lr": not_negative("min_lr", min_lr),
            "eps": not_negative("eps", eps),
            "initial_lr": initial_lr,
        }
        super().__init__(optimizer, settings)

    def _begin(self, saved: Mapping[str, Any] | None) -> None:
        if saved is None or "initial_lr" in self._changes(saved):
            self._rate = self._optimizer.initial_lr = self.initial_lr
            self._optimizer.set_learning_rate(self._rate)
            return
        # The rate is the optimizer's, which was restored with it.
        self.best = None if saved.get("best") is None else saved_number(saved, "best")
        self._bad_steps = int(saved_number(saved, "bad_steps"))
        self._resting = int(saved_number(saved, "resting"))
        self._rate = float(saved_number(saved, "rate"))

    def state(self) -> State:
        """Return the settings and the counts so far."""
        return super().state() | {
            "best": self.best,
            "bad_steps": self._bad_steps,
            "resting": self._resting,
            "rate": self._rate,
        }

    def step(self, metric: float) -> None:
        """Take note of a metric; lower the rate if it has not improved for too long."""
        value = float(metric)
        if self._is_better(value):
            self.best = value
            self._bad_steps = 0
        else:
            self._bad_steps += 1
        if self._resting > 0:
            self._resting -= 1
            self._bad_steps = 0
        if self._bad_steps > self._settings["patience"]:
            self._lower()
            self._resting = self._settings["cooldown"]
            self._bad_steps = 0

    def _is_better(self, value: float) -> bool:
        sign = 1.0 if self.mode == "min" else -1.0
        if self.best is None:
            return sign * value < math.inf
        threshold: float = sign * self._settings["threshold"]
        if self._settings["threshold_mode"] == "rel":
            return sign * value < sign * self.best * (1.0 - threshold)
        return sign * value < sign * (self.best - threshold)

    def _lower(self) -> None:
        current = self._optimizer.get_learning_rate()
        # The optimizer's rate is rounded to 32 bits; unless somebody changed it, ours is exact.
        if not math.isclose(current, self._rate, rel_tol=1e-6):
            self._rate = current
        lower = max(self._rate * self._settings["factor"], self._settings["min_lr"])
        if self._rate - lower > self._settings["eps"]:
            self._rate = lower
            self._optimizer.set_learning_rate(lower)


def saved_number(saved: Mapping[str, Any], name: str) -> float:
    """Return a number of a saved state, which is not trusted."""
    value = saved.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(
            f"the checkpoint has {value!r} as {name} of a scheduler, not a number"
        )
    return value


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
