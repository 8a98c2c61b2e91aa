"""What a training run has come to: the loss of each step, the values of each epoch."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from itertools import pairwise
from typing import Any

from onnxtrain.errors import ArgumentError, UnknownNameError
from onnxtrain.format import strict_json
from onnxtrain.format.strict_json import entry, mapping, number, shortened, whole

_FORMAT = 1
_COUNTS, _FLOATS = ("epoch", "steps", "samples"), ("loss", "learning_rate", "seconds")
NUMBERS: dict[str, Any] = {**dict.fromkeys(_COUNTS, int), **dict.fromkeys(_FLOATS, float)}


@dataclass
class EpochRecord:
    """One epoch.

    `epoch` counts from 1. `steps` is the number of optimizer steps of the run up to its end,
    `samples` the number of samples of the epoch, `loss` their mean loss during training, and
    `learning_rate` that at its end. `values` has what evaluation found: `eval_loss` and the
    metrics by name; what is not one number is a list.
    """

    epoch: int
    steps: int
    samples: int
    loss: float
    learning_rate: float
    seconds: float
    values: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        if name in NUMBERS:
            return getattr(self, name)
        if name not in self.values:
            known = ", ".join([*NUMBERS, *self.values])
            raise UnknownNameError(f"an epoch has no {name!r}; it has {known}")
        return self.values[name]


@dataclass(repr=False)
class History:
    """The course of a run.

    `losses` has the loss of each step of the optimizer, `epochs` a record of each epoch that was
    finished. `stopped` says why the run ended early, if it did; `interrupted` is true after Ctrl-C.
    `best_epoch` is the number of the best epoch, if early stopping or checkpoints looked for one.
    `skipped` counts the batches that were left out, as their loss or gradients were not finite.
    `history["accuracy"]` is the list of that value over the epochs.

    A checkpoint keeps at most a thousand losses and epochs, evenly spread, and the best and the
    last one. After a longer run was resumed, `loss_steps` says which steps the losses are of.
    """

    losses: list[float] = field(default_factory=list)
    epochs: list[EpochRecord] = field(default_factory=list)
    stopped: str = ""
    interrupted: bool = False
    best_epoch: int | None = None
    skipped: int = 0
    # The steps of the first losses, of a run that was resumed from a checkpoint without all.
    kept_steps: list[int] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """The number of optimizer steps that the run has taken."""
        first = self.kept_steps[-1] if self.kept_steps else 0
        return first + len(self.losses) - len(self.kept_steps)

    @property
    def loss_steps(self) -> list[int]:
        """The step of each loss, from 1: each step, unless a long run was resumed."""
        later = len(self.losses) - len(self.kept_steps)
        return [*self.kept_steps, *range(self.steps - later + 1, self.steps + 1)]

    def thinned(self) -> History:
        """Return what a checkpoint keeps: the record of a run does not grow with its length.

        What is kept of a resumed run is the same as if it had not been interrupted.
        """
        steps, numbers = self.loss_steps, [record.epoch for record in self.epochs]
        best = min(range(len(steps)), key=lambda i: _or_last(self.losses[i]), default=None)
        losses = _spread(steps, None if best is None else steps[best])
        epochs = _spread(numbers, self.best_epoch)
        return replace(
            self,
            losses=[self.losses[i] for i in losses],
            epochs=[self.epochs[i] for i in epochs],
            kept_steps=[steps[i] for i in losses] if len(losses) < self.steps else [],
        )

    def __getitem__(self, name: str) -> list[Any]:
        return [record[name] for record in self.epochs]

    def __repr__(self) -> str:
        epochs = self.epochs[-1].epoch if self.epochs else 0
        parts = [_count(epochs, "epoch"), _count(self.steps, "step")]
        if self.epochs:
            last = self.epochs[-1]
            shown = {"loss": last.loss, **last.values}
            parts += [f"{k} {v:.4g}" for k, v in shown.items() if isinstance(v, int | float)]
        if self.skipped:
            parts.append(f"{self.skipped} skipped")
        if self.stopped:
            parts.append(self.stopped)
        return f"History({', '.join(parts)})"

    def to_json(self) -> str:
        """Return all of it as JSON. Numbers survive exactly."""
        return strict_json.dumps(self.plain())

    def plain(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        content = {"format": _FORMAT, **asdict(self)}
        if not self.kept_steps:
            del content["kept_steps"]
        return content

    @classmethod
    def from_json(cls, text: str | bytes) -> History:
        """Return the history that `to_json` wrote."""
        try:
            return cls.from_plain(strict_json.mapping(strict_json.loads(text), "it"))
        except (ValueError, TypeError) as wrong:  # TypeError: of an argument that is no text
            raise ArgumentError(f"this is not the JSON of a history: {wrong}") from wrong

    @classmethod
    def from_plain(cls, content: Mapping[str, Any]) -> History:
        """Return the history from the content of its JSON; a ValueError says what is wrong."""
        if entry(content, "format") != _FORMAT:
            raise ValueError(f"its format is {shortened(content['format'])}, not {_FORMAT}")
        losses, epochs = entry(content, "losses"), entry(content, "epochs")
        if not isinstance(losses, list) or not all(type(n) in (int, float) for n in losses):
            raise ValueError("'losses' is not a list of numbers")
        if not isinstance(epochs, list):
            raise ValueError("'epochs' is not a list")
        steps = content.get("kept_steps", [])
        if not isinstance(steps, list) or not _is_rising(steps) or len(steps) > len(losses):
            raise ValueError("'kept_steps' is not a list of the steps of the losses")
        return cls(
            losses=[float(loss) for loss in losses],
            epochs=[_to_record(mapping(record, "an epoch")) for record in epochs],
            stopped=str(entry(content, "stopped")),
            interrupted=bool(entry(content, "interrupted")),
            best_epoch=None
            if entry(content, "best_epoch") is None
            else whole(content, "best_epoch"),
            kept_steps=steps,
            skipped=whole(content, "skipped") if "skipped" in content else 0,
        )

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draw losses and metrics over the steps; write the picture if a path is given.

        The ending of the path says in which format: `.png`, `.svg`, `.pdf`. Returns the figure of
        matplotlib, which comes with `pip install 'onnxtrain[cli]'`.
        """
        # Drawing is no part of the device half, which must run without that file.
        return import_module("onnxtrain.cli.plot").plot(self, path)


# Of losses, and of epochs, in a checkpoint.
_MOST = 1000


def _spread(numbers: list[int], best: int | None) -> list[int]:
    """Return where the numbers to keep are: multiples of a power of two, the best and the last.

    What is left out once is never needed later, as the power of two only grows.
    """
    stride = 1
    while numbers and numbers[-1] // stride > _MOST:
        stride *= 2
    special = (best, numbers[-1] if numbers else None)
    return [i for i, n in enumerate(numbers) if n % stride == 0 or n in special]


def _or_last(loss: float) -> float:
    return loss if loss == loss else math.inf


def _is_rising(steps: list[Any]) -> bool:
    return all(type(step) is int for step in steps) and all(
        before < after < 2**53 for before, after in pairwise([0, *steps])
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _readable(value: Any) -> Any:
    """Return the value of a metric; earlier versions wrote "nan" and "inf" as texts."""
    if isinstance(value, list):
        return [_readable(item) for item in value]
    if isinstance(value, dict):
        raise ValueError(f"the value of a metric is {shortened(value)}")
    return float(value) if isinstance(value, str) else value


def _to_record(content: Mapping[str, Any]) -> EpochRecord:
    counts: dict[str, Any] = {name: whole(content, name) for name in _COUNTS}
    floats: dict[str, Any] = {name: number(content, name, finite=False) for name in _FLOATS}
    values = mapping(entry(content, "values"), "'values'")
    return EpochRecord(**counts, **floats, values={n: _readable(v) for n, v in values.items()})
