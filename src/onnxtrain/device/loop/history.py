"""What a training run has come to: the loss of each step, the values of each epoch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
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
    `history["accuracy"]` is the list of that value over the epochs.
    """

    losses: list[float] = field(default_factory=list)
    epochs: list[EpochRecord] = field(default_factory=list)
    stopped: str = ""
    interrupted: bool = False
    best_epoch: int | None = None

    def __getitem__(self, name: str) -> list[Any]:
        return [record[name] for record in self.epochs]

    def __repr__(self) -> str:
        parts = [_count(len(self.epochs), "epoch"), _count(len(self.losses), "step")]
        if self.epochs:
            last = self.epochs[-1]
            shown = {"loss": last.loss, **last.values}
            parts += [f"{k} {v:.4g}" for k, v in shown.items() if isinstance(v, int | float)]
        if self.stopped:
            parts.append(self.stopped)
        return f"History({', '.join(parts)})"

    def to_json(self) -> str:
        """Return all of it as JSON. Numbers survive exactly."""
        return strict_json.dumps({"format": _FORMAT, **asdict(self)})

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
        return cls(
            losses=[float(loss) for loss in losses],
            epochs=[_to_record(mapping(record, "an epoch")) for record in epochs],
            stopped=str(entry(content, "stopped")),
            interrupted=bool(entry(content, "interrupted")),
            best_epoch=None
            if entry(content, "best_epoch") is None
            else whole(content, "best_epoch"),
        )

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draw losses and metrics over the steps; write the picture if a path is given.

        The ending of the path says in which format: `.png`, `.svg`, `.pdf`. Returns the figure of
        matplotlib, which comes with `pip install 'onnxtrain[cli]'`.
        """
        # Drawing is no part of the device half, which must run without that file.
        return import_module("onnxtrain.cli.plot").plot(self, path)


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
