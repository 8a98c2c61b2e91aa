"""What all learning-rate schedulers have in common."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

from onnxtrain.device.checks import not_negative, whole
from onnxtrain.errors import CheckpointError

State = dict[str, int | float | str | bool | None]


class ScheduledOptimizer(Protocol):
    """What a scheduler needs of an optimizer."""

    initial_lr: float

    @property
    def step_count(self) -> int:
        """How many steps were taken so far."""

    def get_learning_rate(self) -> float:
        """The learning rate of the next step."""

    def set_learning_rate(self, learning_rate: float, /) -> None:
        """Set the learning rate of the next step."""

    def attach(self, scheduler: Any, /) -> Mapping[str, Any] | None:
        """Remember the scheduler for saving; return what the loaded checkpoint has for it."""


def saved_number(saved: Mapping[str, Any], name: str) -> float:
    """Return a number of a saved state, which may come from anywhere."""
    value = saved.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(
            f"the checkpoint has {value!r} as {name} of a scheduler, where a number should be"
        )
    return value


class LRScheduler:
    """What all schedulers of this module have in common.

    `kind` is the name of a scheduler in checkpoints and in `onnxtrain.fit`.
    """

    kind: str = ""

    def __init__(self, optimizer: ScheduledOptimizer, settings: State) -> None:
        self._optimizer = optimizer
        self._settings = settings

    def _attach(self) -> Mapping[str, Any] | None:
        """Join the optimizer; return the saved state, if there is one of this kind."""
        saved = self._optimizer.attach(self)
        if saved is None:
            return None
        # The rate is part of what was saved: a scheduler that was made without one takes it over.
        if self._settings["initial_lr"] is None:
            self._settings["initial_lr"] = saved_number(saved, "initial_lr")
        return saved

    def _warn_of_changes(self, saved: Mapping[str, Any]) -> bool:
        """Say which settings are not as saved, and return whether there are any."""
        missing = object()
        changed = {k: v for k, v in self._settings.items() if saved.get(k, missing) != v}
        if not changed:
            return False
        details = ", ".join(f"{k}={v!r} (saved: {saved.get(k)!r})" for k, v in changed.items())
        warnings.warn(
            f"{type(self).__name__} goes on with other settings than the checkpoint has: {details}",
            UserWarning,
            stacklevel=4,
        )
        return True

    def state(self) -> State:
        """Return what a checkpoint keeps of the scheduler."""
        return dict(self._settings)

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self._settings.items())
        return f"{type(self).__name__}({settings})"


class FormulaLRScheduler(LRScheduler, ABC):
    """A scheduler whose rate is a formula of the number of steps.

    `first_step` is the step of the optimizer at which the schedule begins: 0, unless the optimizer
    has trained before and the schedule is a new one.
    """

    def __init__(
        self,
        optimizer: ScheduledOptimizer,
        initial_lr: float | None,
        first_step: int,
        settings: State,
    ) -> None:
        if initial_lr is not None:
            initial_lr = not_negative("initial_lr", initial_lr)
        first_step = whole("first_step", first_step)
        settings = {**settings, "initial_lr": initial_lr, "first_step": first_step}
        super().__init__(optimizer, settings)
        saved = self._attach()
        if self._settings["initial_lr"] is None:
            self._settings["initial_lr"] = optimizer.get_learning_rate()
        self.initial_lr = float(self._settings["initial_lr"])  # type: ignore[arg-type]
        self.first_step = first_step
        self._check()
        if saved is None or self._warn_of_changes(saved):
            optimizer.initial_lr = self.initial_lr
            self.step()

    def learning_rate(self, step: int) -> float:
        """The learning rate after `step` steps of the optimizer, in double precision."""
        return self._rate(max(0, step - self.first_step))

    def _check(self) -> None:
        """Check what can be checked only when the initial rate is known."""

    @abstractmethod
    def _rate(self, step: int) -> float:
        """The learning rate after `step` steps of the schedule."""

    def step(self) -> None:
        """Set the learning rate that belongs to the optimizer's number of steps."""
        self._optimizer.set_learning_rate(self.learning_rate(self._optimizer.step_count))
