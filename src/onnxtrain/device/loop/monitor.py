"""The best epoch of a run, and stopping when there has been no better one for long."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from onnxtrain.device.checks import at_least, choice, not_negative
from onnxtrain.device.loop.checkpoint_policy import SaveCheckpoint, Snapshot
from onnxtrain.device.loop.metrics import Metric
from onnxtrain.errors import ArgumentError, CheckpointError
from onnxtrain.format.strict_json import entry, number, whole

if TYPE_CHECKING:
    from onnxtrain.device.session import TrainingSession


@dataclass(frozen=True)
class EarlyStopping:
    """Stop training when a value has not improved for `patience` epochs; a callback of `fit`.

    `monitor` is "loss" (of training), "eval_loss" or the name of a metric; by default the loss of
    the validation data, or of training where there are none. A value improves if it is below the
    best by more than `min_delta`, or above with `mode="max"`; "auto" knows which for built-in
    metrics. With `restore_best` the parameters are those of the best epoch when training ends.
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


def find_monitor(
    monitor: str | None, mode: str, metrics: Mapping[str, Metric], evaluates: bool, what: str
) -> tuple[str, str]:
    """Return the name of the value to watch, and whether "min" or "max" of it is better."""
    names = ["loss"]
    if evaluates:
        names += ["eval_loss", *(name for name, metric in metrics.items() if metric.scalar)]
    if monitor is None:
        monitor = "eval_loss" if evaluates else "loss"
    if monitor not in names:
        without = "" if evaluates else "; the others need validation="
        raise ArgumentError(
            f"{what} cannot watch {monitor!r}: there is {', '.join(names)}{without}"
        )
    if mode != "auto":
        return monitor, mode
    better = "min" if monitor in ("loss", "eval_loss") else metrics[monitor].better
    if better is None:
        raise ArgumentError(f"{what}: is a high {monitor!r} good? Pass mode='max' or mode='min'")
    return monitor, better


class Best:
    """The best value so far, its epoch, and the number of epochs since.

    Training stops after `patience` epochs without a better one; `snapshot` keeps the parameters of
    the best epoch, if they are wanted back.
    """

    def __init__(self, monitor: str, mode: str, early: EarlyStopping | None) -> None:
        self.monitor, self.mode = monitor, mode
        self._sign = 1.0 if mode == "min" else -1.0
        self._min_delta = 0.0 if early is None else early.min_delta
        self.patience = math.inf if early is None else early.patience
        self.snapshot = Snapshot() if early is not None and early.restore_best else None
        self.value: float | None = None
        self.epoch: int | None = None
        self.waited = 0

    def update(self, value: float, epoch: int) -> bool:
        """Take note of the value of an epoch; return whether it is the best."""
        # NaN never is: the metric had nothing to measure, for instance.
        better = not math.isnan(value) and (
            self.value is None or self._sign * value < self._sign * self.value - self._min_delta
        )
        if better:
            self.value, self.epoch, self.waited = value, epoch, 0
        else:
            self.waited += 1
        return better

    def saved(self) -> dict[str, Any]:
        """Return what `restore` takes."""
        return {name: getattr(self, name) for name in ("monitor", "value", "epoch", "waited")}

    def restore(
        self, saved: Mapping[str, Any], session: TrainingSession, checkpoint: SaveCheckpoint | None
    ) -> None:
        """Continue from a record, unless it is about another value."""
        try:
            if entry(saved, "monitor") != self.monitor:
                return
            value, epoch = entry(saved, "value"), entry(saved, "epoch")
            self.value = None if value is None else number(saved, "value", finite=False)
            self.epoch = None if epoch is None else whole(saved, "epoch")
            self.waited = whole(saved, "waited")
        except ValueError as wrong:
            raise CheckpointError(
                f"the checkpoint's record of the best epoch cannot be read: {wrong}. Start a new "
                "run with resume=False"
            ) from None
        if self.snapshot is None or self.epoch is None:
            return
        if checkpoint is None or not checkpoint.best_path.exists():
            missing = "" if checkpoint is None else f", {str(checkpoint.best_path)!r} is missing"
            raise ArgumentError(
                f"the run cannot be resumed with restore_best: its best epoch was {self.epoch}, "
                f"and the parameters of that were not kept{missing}. Keep them with "
                "callbacks=[SaveCheckpoint(path), ...], or start a new run with resume=False"
            )
        self.snapshot.read(checkpoint.best_path, session)
