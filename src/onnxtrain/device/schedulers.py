"""Schedulers as objects, for scripts written for onnxruntime's training API.

A scheduler sets the learning rate of its optimizer when it is made and at each `step()`. The rates
are those of `onnxtrain.schedules`. The step is counted by the optimizer, so a resumed run continues
where it stopped; the settings are saved in the checkpoint.
"""

from __future__ import annotations

import math
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from onnxtrain.device import schedules
from onnxtrain.device.checks import at_least, choice, not_negative, positive
from onnxtrain.errors import ArgumentError, CheckpointError, StateError

if TYPE_CHECKING:
    from onnxtrain.device.optimizer import Optimizer

State = dict[str, Any]


class _OptimizerOf:
    """The optimizer of a scheduler, which owns the scheduler and is not owned by it.

    Otherwise the two would keep each other, and the optimizer's session of onnxruntime, in memory.
    """

    def __get__(self, scheduler: LRScheduler, kind: Any = None) -> Optimizer:
        optimizer: Optimizer | None = scheduler.__dict__["_optimizer"]()
        if optimizer is None:
            raise StateError(
                "the optimizer of the scheduler is gone: keep it, or its TrainingSession"
            )
        return optimizer

    def __set__(self, scheduler: LRScheduler, optimizer: Optimizer) -> None:
        scheduler.__dict__["_optimizer"] = weakref.ref(optimizer)


@dataclass(eq=False, repr=False)
class LRScheduler(ABC):
    """A learning-rate scheduler; `kind` is its name in checkpoints and in `onnxtrain.fit`.

    The fields of a scheduler, but for the optimizer, are its settings.
    """

    kind: ClassVar[str] = ""
    optimizer: Optimizer

    def __post_init__(self) -> None:
        self._check()
        names = [f.name for f in fields(self) if f.name not in ("optimizer", "first_step")]
        if hasattr(self, "first_step"):
            names.append("first_step")
        given = {name: getattr(self, name) for name in names}
        self._settings: State = {k: v.item() if hasattr(v, "item") else v for k, v in given.items()}
        rate = self._settings["initial_lr"]
        saved = self.optimizer.saved_scheduler(self.kind)
        if rate is not None:
            rate = not_negative("initial_lr", rate)
        elif saved is not None:
            rate = saved_number(saved, "initial_lr")
        else:
            rate = self.optimizer.get_learning_rate()
        self.initial_lr: float | None = float(rate)
        self._settings["initial_lr"] = self.initial_lr
        self._begin(saved)
        self.optimizer.attach(self)

    def _check(self) -> None:  # noqa: B027 (most have nothing to check)
        """Check what the base class does not."""

    @abstractmethod
    def _begin(self, saved: Mapping[str, Any] | None) -> None:
        """Set the first rate, or continue from the saved state."""

    @abstractmethod
    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Continue from what `state` returned, if that is given, and set the learning rate."""

    @property
    def is_over(self) -> bool:
        """Whether the schedule has come to its end."""
        return False

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
                stacklevel=5,
            )
        return set(changed)

    def settings(self) -> State:
        """Return the settings by name."""
        return dict(self._settings)

    def state(self) -> State:
        """Return what a checkpoint keeps of the scheduler."""
        return self.settings()

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self._settings.items())
        return f"{type(self).__name__}({settings})"


LRScheduler.optimizer = _OptimizerOf()  # type: ignore[assignment]


@dataclass(eq=False, repr=False)
class _FunctionLRScheduler(LRScheduler):
    """A scheduler whose rate is a function of the number of steps.

    `first_step` is the optimizer's step at which the schedule begins: 0, unless the optimizer has
    trained before and the schedule is a new one.
    """

    first_step: int = field(default=0, kw_only=True)

    def _begin(self, saved: Mapping[str, Any] | None) -> None:
        at_least(0, "first_step", self.first_step)
        rate = "max_lr" if "max_lr" in self._settings else "initial_lr"
        given = {k: v for k, v in self._settings.items() if k not in ("initial_lr", "first_step")}
        given[rate] = self._settings[rate]
        function = getattr(schedules, self.kind)
        self._rate = function(**{_ARGUMENTS.get(k, k): v for k, v in given.items()})
        # As a checkpoint has them, now that they have been checked.
        self._settings |= {k: float(v) for k, v in given.items() if k in _FLOATS}
        if "milestones" in given:
            self._settings["milestones"] = ",".join(map(str, given["milestones"]))
        if saved is None or self._changes(saved):
            self.optimizer.initial_lr = self._settings["initial_lr"]
            self.step()

    def learning_rate(self, step: int) -> float:
        """Return the learning rate after `step` steps of the optimizer, in double precision."""
        rate: float = self._rate(max(0, step - self.first_step))
        return rate

    def step(self) -> None:
        """Set the learning rate for the optimizer's present number of steps."""
        self.optimizer.set_learning_rate(self.learning_rate(self.optimizer.step_count))

    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Set the learning rate, which depends on the number of steps alone."""
        self.step()

    @property
    def is_over(self) -> bool:
        """Whether all steps of the schedule were taken."""
        total = getattr(self, "total_step_count", math.inf)
        return bool(self.optimizer.step_count - self.first_step >= total)


# What the functions of `onnxtrain.schedules` call the arguments of schedulers.
_ARGUMENTS = {
    "initial_lr": "rate",
    "max_lr": "rate",
    "min_lr": "end",
    "total_step_count": "steps",
    "warmup_step_count": "warmup",
}
_FLOATS = ("min_lr", "cycles", "gamma", "max_lr", "pct_start", "div_factor", "final_div_factor")


@dataclass(eq=False, repr=False)
class LinearLRScheduler(_FunctionLRScheduler):
    """Rise from 0 to `initial_lr` during the warm-up, then fall to 0; see `schedules.linear`."""

    kind = "linear"
    warmup_step_count: int
    total_step_count: int
    initial_lr: float | None = None

    def _check(self) -> None:
        warmup, total = self.warmup_step_count, self.total_step_count
        if at_least(0, "warmup_step_count", warmup) > at_least(0, "total_step_count", total):
            raise ArgumentError(
                f"warmup_step_count ({warmup}) is more than total_step_count ({total}). (The "
                "Python package of onnxruntime-training took the two in the wrong order; here the "
                "warm-up comes first.)"
            )


@dataclass(eq=False, repr=False)
class ConstantLRScheduler(_FunctionLRScheduler):
    """Rise from 0 to `initial_lr` during the warm-up, then stay; see `schedules.constant`."""

    kind = "constant"
    warmup_step_count: int = 0
    initial_lr: float | None = None


@dataclass(eq=False, repr=False)
class CosineLRScheduler(_FunctionLRScheduler):
    """Rise from 0 during the warm-up, then fall along a cosine; see `schedules.cosine`."""

    kind = "cosine"
    warmup_step_count: int
    total_step_count: int
    initial_lr: float | None = None
    min_lr: float = 0.0
    cycles: float = 0.5


@dataclass(eq=False, repr=False)
class StepLRScheduler(_FunctionLRScheduler):
    """Multiply the rate by `gamma` after each `step_size` steps; see `schedules.step`."""

    kind = "step"
    step_size: int
    gamma: float = 0.1
    initial_lr: float | None = None
    every: int = field(default=1, kw_only=True)


@dataclass(eq=False, repr=False)
class MultiStepLRScheduler(_FunctionLRScheduler):
    """Multiply the rate by `gamma` at each of the `milestones`; see `schedules.multistep`."""

    kind = "multistep"
    milestones: Sequence[int]
    gamma: float = 0.1
    initial_lr: float | None = None
    every: int = field(default=1, kw_only=True)


@dataclass(eq=False, repr=False)
class ExponentialLRScheduler(_FunctionLRScheduler):
    """Multiply the rate by `gamma` after each `every` steps; see `schedules.exponential`."""

    kind = "exponential"
    gamma: float
    initial_lr: float | None = None
    every: int = field(default=1, kw_only=True)


@dataclass(eq=False, repr=False)
class OneCycleLRScheduler(_FunctionLRScheduler):
    """Rise to `max_lr`, then fall far below the start; see `schedules.onecycle`."""

    kind = "onecycle"
    max_lr: float
    total_step_count: int
    pct_start: float = 0.3
    anneal_strategy: Literal["cos", "linear"] = "cos"
    div_factor: float = 25.0
    final_div_factor: float = 1e4
    three_phase: bool = False
    initial_lr: float | None = field(init=False)

    def _check(self) -> None:
        start = not_negative("max_lr", self.max_lr)
        self.initial_lr = start / positive("div_factor", self.div_factor)


@dataclass(eq=False, repr=False)
class PlateauLRScheduler(LRScheduler):
    """Multiply the rate by `factor` when a metric has not improved for `patience` steps.

    `step(metric)` is called after each evaluation. A metric improves if it is below (with
    mode="max", above) the best so far by `threshold`: relative to it ("rel"), or absolute ("abs").
    After a fall the next `cooldown` steps are not counted. The rate never falls below `min_lr`, and
    stays if it would fall by less than `eps`.
    """

    kind = "plateau"
    mode: Literal["min", "max"] = "min"
    factor: float = 0.1
    patience: int = 10
    threshold: float = 1e-4
    threshold_mode: Literal["rel", "abs"] = "rel"
    cooldown: int = 0
    min_lr: float = 0.0
    eps: float = 1e-8
    initial_lr: float | None = None

    def _check(self) -> None:
        choice("mode", self.mode, ("min", "max"))
        choice("threshold_mode", self.threshold_mode, ("rel", "abs"))
        self.factor = positive("factor", self.factor)
        if self.factor >= 1.0:
            raise ArgumentError(f"factor must be less than 1, not {self.factor}")
        for name in ("patience", "cooldown"):
            setattr(self, name, at_least(0, name, getattr(self, name)))
        for name in ("threshold", "min_lr", "eps"):
            setattr(self, name, not_negative(name, getattr(self, name)))
        self.best: float | None = None
        self._bad_steps = self._resting = 0

    def _begin(self, saved: Mapping[str, Any] | None) -> None:
        if saved is None or "initial_lr" in self._changes(saved):
            self._rate = self.optimizer.initial_lr = self._settings["initial_lr"]
            self.optimizer.set_learning_rate(self._rate)
            return
        # The rate is the optimizer's, which was restored with it.
        self._take(saved)

    def _take(self, saved: Mapping[str, Any]) -> None:
        self.best = None if saved.get("best") is None else saved_number(saved, "best")
        self._bad_steps = int(saved_number(saved, "bad_steps"))
        self._resting = int(saved_number(saved, "resting"))
        self._rate = float(saved_number(saved, "rate"))

    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Continue with the counts and the rate of a saved state."""
        if saved is not None:
            self._take(saved)
        self.optimizer.set_learning_rate(self._rate)

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
        if self._bad_steps > self.patience:
            self._lower()
            self._resting = self.cooldown
            self._bad_steps = 0

    def _is_better(self, value: float) -> bool:
        sign = 1.0 if self.mode == "min" else -1.0
        if self.best is None:
            return sign * value < math.inf
        threshold = sign * self.threshold
        if self.threshold_mode == "rel":
            return sign * value < sign * self.best * (1.0 - threshold)
        return sign * value < sign * (self.best - threshold)

    def _lower(self) -> None:
        current = self.optimizer.get_learning_rate()
        # The optimizer's rate is rounded to 32 bits; unless somebody changed it, ours is exact.
        if not math.isclose(current, self._rate, rel_tol=1e-6):
            self._rate = current
        lower = max(self._rate * self.factor, self.min_lr)
        if self._rate - lower > self.eps:
            self._rate = lower
            self.optimizer.set_learning_rate(lower)


def saved_number(saved: Mapping[str, Any], name: str) -> float:
    """Return a number of a saved state, which is not trusted."""
    value = saved.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(
            f"the checkpoint has {value!r} as {name} of a scheduler, not a number"
        )
    return value


_ALL: tuple[type[LRScheduler], ...] = (
    LinearLRScheduler,
    ConstantLRScheduler,
    CosineLRScheduler,
    StepLRScheduler,
    MultiStepLRScheduler,
    ExponentialLRScheduler,
    OneCycleLRScheduler,
    PlateauLRScheduler,
)
SCHEDULERS = {scheduler.kind: scheduler for scheduler in _ALL}
