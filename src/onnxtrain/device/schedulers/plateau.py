"""A learning rate that falls when a measure stops becoming better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from onnxtrain.device.checks import choice, not_negative, positive, whole
from onnxtrain.device.schedulers.base import LRScheduler, ScheduledOptimizer, State, saved_number
from onnxtrain.errors import ArgumentError


class PlateauLRScheduler(LRScheduler):
    """The rate times `factor` when a measure has not become better for `patience` steps.

    `step(metric)` is called after each evaluation. A measure is better if it is below (with
    mode="max", above) the best so far by `threshold`: relative to it ("rel"), or absolute ("abs").
    After a fall the next `cooldown` steps are not counted. The rate never falls below `min_lr`, and
    stays if it would fall by less than `eps`.
    """

    kind = "plateau"

    def __init__(
        self,
        optimizer: ScheduledOptimizer,
        mode: Literal["min", "max"] = "min",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: Literal["rel", "abs"] = "rel",
        cooldown: int = 0,
        min_lr: float = 0.0,
        eps: float = 1e-8,
        initial_lr: float | None = None,
    ) -> None:
        self.mode = choice("mode", mode, ("min", "max"))
        self.factor = positive("factor", factor)
        if self.factor >= 1.0:
            raise ArgumentError(f"factor must be less than 1, not {factor}")
        self.patience = whole("patience", patience)
        self.threshold = not_negative("threshold", threshold)
        self.threshold_mode = choice("threshold_mode", threshold_mode, ("rel", "abs"))
        self.cooldown = whole("cooldown", cooldown)
        self.min_lr = not_negative("min_lr", min_lr)
        self.eps = not_negative("eps", eps)
        if initial_lr is not None:
            initial_lr = not_negative("initial_lr", initial_lr)
        settings: State = {
            "mode": self.mode,
            "factor": self.factor,
            "patience": self.patience,
            "threshold": self.threshold,
            "threshold_mode": self.threshold_mode,
            "cooldown": self.cooldown,
            "min_lr": self.min_lr,
            "eps": self.eps,
            "initial_lr": initial_lr,
        }
        super().__init__(optimizer, settings)
        self.best: float | None = None
        self._bad_steps = 0
        self._resting = 0
        saved = self._attach()
        if saved is None:
            self._begin()
        else:
            self._restore(saved)

    def _begin(self) -> None:
        if self._settings["initial_lr"] is None:
            self._settings["initial_lr"] = self._optimizer.get_learning_rate()
        self._rate = float(self._settings["initial_lr"])  # type: ignore[arg-type]
        self._optimizer.initial_lr = self._rate
        self._optimizer.set_learning_rate(self._rate)

    def _restore(self, saved: Mapping[str, Any]) -> None:
        """Go on with what was counted; the rate is the optimizer's, which was restored."""
        if self._warn_of_changes(saved) and self._settings["initial_lr"] != saved.get("initial_lr"):
            self._begin()
            return
        self.best = None if saved.get("best") is None else saved_number(saved, "best")
        self._bad_steps = int(saved_number(saved, "bad_steps"))
        self._resting = int(saved_number(saved, "resting"))
        self._rate = float(saved_number(saved, "rate"))

    def state(self) -> State:
        """Return the settings and what was counted so far."""
        return super().state() | {
            "best": self.best,
            "bad_steps": self._bad_steps,
            "resting": self._resting,
            "rate": self._rate,
        }

    def step(self, metric: float) -> None:
        """Take note of a measure; lower the rate if it has not become better for too long."""
        value = float(metric)
        if self._better(value):
            self.best = value
            self._bad_steps = 0
        else:
            self._bad_steps += 1
        if self._resting > 0:
            self._resting -= 1
            self._bad_steps = 0
        if self._bad_steps > self.patience:
            self._fall()
            self._resting = self.cooldown
            self._bad_steps = 0

    def _better(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self.best is None:
            return value < math.inf if self.mode == "min" else value > -math.inf
        sign = -1.0 if self.mode == "min" else 1.0
        if self.threshold_mode == "rel":
            bound = self.best * (1.0 + sign * self.threshold)
        else:
            bound = self.best + sign * self.threshold
        return value < bound if self.mode == "min" else value > bound

    def _fall(self) -> None:
        current = self._optimizer.get_learning_rate()
        # The optimizer's rate is rounded to 32 bits; unless somebody changed it, ours is exact.
        if not math.isclose(current, self._rate, rel_tol=1e-6):
            self._rate = current
        lower = max(self._rate * self.factor, self.min_lr)
        if self._rate - lower > self.eps:
            self._rate = lower
            self._optimizer.set_learning_rate(lower)
