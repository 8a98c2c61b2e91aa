"""Which epoch is the best, and when to stop because none has been better for long."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from onnxtrain.device.checks import at_least, choice, not_negative
from onnxtrain.device.loop.metrics import Metric
from onnxtrain.errors import ArgumentError, CheckpointError


@dataclass(frozen=True)
class EarlyStopping:
    """Stop training when a value has not become better for `patience` epochs in a row.

    `monitor` is "loss" (during training), "eval_loss" or the name of a metric; without it, the loss
    of the evaluation, or where there is none, that of training. A value is better if it is below
    the best by more than `min_delta`, or above with `mode="max"`; "auto" knows which for the
    metrics of this package. With `restore_best` the parameters are those of the best epoch when
    training ends.
    """

    monitor: str | None = None
    patience: int = 3
    min_delta: float = 0.0
    mode: Literal["auto", "min", "max"] = "auto"
    restore_best: bool = False

    def __post_init__(self) -> None:
        at_least(1, "patience", self.patience)
        not_negative("min_delta", self.min_delta)
        choice("mode", self.mode, ("auto", "min", "max"))


def make_early_stopping(
    given: EarlyStopping | int | Mapping[str, Any] | None,
) -> EarlyStopping | None:
    """Return what is meant by an object, a number of epochs, or settings."""
    if given is None or isinstance(given, EarlyStopping):
        return given
    if isinstance(given, Mapping):
        try:
            return EarlyStopping(**given)
        except TypeError as wrong:
            raise ArgumentError(f"early_stopping: {wrong}") from None
    if isinstance(given, int) and not isinstance(given, bool):
        return EarlyStopping(patience=given)
    raise ArgumentError(
        f"early_stopping must be EarlyStopping(...), its settings, or a number of epochs, "
        f"not {given!r}"
    )


def find_monitor(
    monitor: str | None, mode: str, metrics: Mapping[str, Metric], evaluates: bool, what: str
) -> tuple[str, str]:
    """Return the name of the value to look at, and whether "min" or "max" of it is better."""
    names = ["loss"]
    if evaluates:
        names += ["eval_loss", *(name for name, metric in metrics.items() if metric.scalar)]
    if monitor is None:
        monitor = "eval_loss" if evaluates else "loss"
    if monitor not in names:
        without = "" if evaluates else "; the others need evaluate="
        raise ArgumentError(
            f"{what} cannot watch {monitor!r}: there is {', '.join(names)}{without}"
        )
    if mode != "auto":
        return monitor, mode
    better = "min" if monitor in ("loss", "eval_loss") else metrics[monitor].better
    if better is None:
        raise ArgumentError(
            f"{what} cannot know whether a high {monitor!r} is good: pass mode='max' or mode='min'"
        )
    return monitor, better


class Best:
    """Keeps track of the best value, its epoch, and for how many epochs there was no better one."""

    def __init__(self, monitor: str, mode: str, min_delta: float = 0.0) -> None:
        self.monitor = monitor
        self._sign = 1.0 if mode == "min" else -1.0
        self._min_delta = min_delta
        self.value: float | None = None
        self.epoch: int | None = None
        self.waited = 0

    def update(self, value: float, epoch: int) -> bool:
        """Take note of the value of an epoch, and say whether it is the best."""
        # NaN is never better: there was nothing to measure, for instance.
        better = not math.isnan(value) and (
            self.value is None or self._sign * value < self._sign * self.value - self._min_delta
        )
        if better:
            self.value, self.epoch, self.waited = value, epoch, 0
        else:
            self.waited += 1
        return better

    def saved(self) -> dict[str, Any]:
        """Return what `restore` goes on from."""
        return {
            "monitor": self.monitor,
            "value": self.value,
            "epoch": self.epoch,
            "waited": self.waited,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from what was saved, unless it was about another value."""
        try:
            if saved["monitor"] != self.monitor:
                return
            self.value = None if saved["value"] is None else float(saved["value"])
            self.epoch = None if saved["epoch"] is None else int(saved["epoch"])
            self.waited = int(saved["waited"])
        except (KeyError, TypeError, ValueError) as wrong:
            raise CheckpointError(f"the checkpoint's record of the best epoch: {wrong!r}") from None
