"""What a server keeps of a federation, so that a restarted one goes on with the next round."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result, Strategy

from onnxtrain.api.checkpoint_content import Array
from onnxtrain.errors import StateError
from onnxtrain.flower.arrays import read_record, to_record
from onnxtrain.flower.files import pack_arrays, replace_file, unpack_arrays

_FILE, _HISTORY = "federation.npz", "history.json"
_FORMAT = 1
TRAIN, EVALUATE, CENTRAL = _KINDS = (
    "train_metrics_clientapp",
    "evaluate_metrics_clientapp",
    "evaluate_metrics_serverapp",
)


@dataclass
class Progress:
    """How far a federation has come."""

    version: str
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    round: int = 0
    arrays: dict[str, Array] = field(default_factory=dict)
    history: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    known: list[int] = field(default_factory=list)
    strategy: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write it, as a whole or not at all."""
        kept: dict[str, Array] = {f"w:{name}": array for name, array in self.arrays.items()}
        about = {
            "format": _FORMAT,
            "version": self.version,
            "name": self.name,
            "round": self.round,
            "known": self.known,
            "strategy": _split(self.strategy, kept),
        }
        kept["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
        replace_file(folder / _FILE, pack_arrays(kept))

    @classmethod
    def read(cls, folder: Path) -> Progress | None:
        """Return what an earlier server has written; None if there is none."""
        file = folder / _FILE
        if not file.exists():
            return None
        kept = unpack_arrays(file.read_bytes(), f"the federation's file {file}")
        try:
            about = json.loads(kept["about"].tobytes())
            if about["format"] != _FORMAT:
                raise ValueError(f"format {about['format']}")
            return cls(
                version=about["version"],
                name=about["name"],
                round=int(about["round"]),
                arrays={k[2:]: array for k, array in kept.items() if k.startswith("w:")},
                history=_read_history(folder / _HISTORY, int(about["round"])),
                known=about["known"],
                strategy=_join(about["strategy"], kept),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(
                f"the federation's file {file} is damaged ({error}): delete it to start anew"
            ) from None

    def note(self, kind: str, number: int, metrics: MetricRecord, folder: Path | None) -> None:
        """Take over the metrics of a round, and write all that there are."""
        self.history.setdefault(kind, {})[str(number)] = dict(metrics)
        if folder is not None:
            replace_file(folder / _HISTORY, json.dumps(self.history, indent=1).encode())

    def result(self) -> Result:
        """Return all rounds as Flower's result."""
        made = Result(arrays=self.record())
        for kind in _KINDS:
            of_kind = self.history.get(kind, {})
            setattr(made, kind, {int(k): MetricRecord(v) for k, v in of_kind.items()})
        return made

    def record(self) -> ArrayRecord:
        """Return the weights as they are sent."""
        return to_record(self.arrays)


def _read_history(file: Path, last: int) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the metrics of the rounds that are over; what came after them is repeated."""
    if not file.exists():
        return {}
    history = json.loads(file.read_bytes())
    return {
        kind: {n: metrics for n, metrics in history.get(kind, {}).items() if int(n) <= last}
        for kind in _KINDS
    }


def _split(value: Any, kept: dict[str, Array]) -> Any:
    """Return a structure with each array replaced by its number, and keep the arrays."""
    if isinstance(value, np.ndarray):
        key = f"s:{len(kept)}"
        kept[key] = value
        return {"array": key}
    if isinstance(value, Mapping):
        return {"dict": [[key, _split(item, kept)] for key, item in value.items()]}
    if isinstance(value, list):
        return {"list": [_split(item, kept) for item in value]}
    return {"value": value}


def _join(value: Mapping[str, Any], kept: Mapping[str, Array]) -> Any:
    kind, content = next(iter(value.items()))
    if kind == "array":
        return kept[content]
    if kind == "dict":
        return {key: _join(item, kept) for key, item in content}
    if kind == "list":
        return [_join(item, kept) for item in content]
    return content


# ---- the state of a strategy ---------------------------------------------------------------------


def settings_of(strategy: Strategy) -> dict[str, Any]:
    """Return the numbers that a strategy was made with, which are not part of its state."""
    made = {k: v for k, v in vars(strategy).items() if isinstance(v, bool | int | float | str)}
    inner = getattr(strategy, "strategy", None)
    return made | ({"strategy": settings_of(inner)} if isinstance(inner, Strategy) else {})


def capture(strategy: Strategy, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run has made of a strategy: moments, a clipping norm, a privacy budget."""
    if callable(getattr(strategy, "state_dict", None)):
        return {"state_dict": strategy.state_dict()}
    made: dict[str, Any] = {}
    for name, value in vars(strategy).items():
        if isinstance(value, Strategy):
            made[name] = capture(value, settings.get(name, {}))
        elif callable(getattr(value, "state_dict", None)):
            made[name] = {"state_dict": value.state_dict()}
        elif isinstance(value, ArrayRecord):
            made[name] = {"record": read_record(value)}
        elif isinstance(value, bool | int | float | str):
            if settings.get(name) != value:
                made[name] = {"plain": value}
        elif _is_arrays(value):
            made[name] = {"plain": value}
    return made


def restore(strategy: Strategy, state: Mapping[str, Any]) -> None:
    """Give a strategy back what `capture` took."""
    if "state_dict" in state:
        strategy.load_state_dict(state["state_dict"])
        return
    for name, saved in state.items():
        value = getattr(strategy, name, None)
        if isinstance(value, Strategy):
            restore(value, saved)
        elif "state_dict" in saved and value is not None:
            value.load_state_dict(saved["state_dict"])
        elif "record" in saved:
            setattr(strategy, name, to_record(saved["record"]))
        elif "plain" in saved:
            setattr(strategy, name, saved["plain"])


def _is_arrays(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return True
    if isinstance(value, list):
        return bool(value) and all(isinstance(item, np.ndarray) for item in value)
    if isinstance(value, dict):
        return bool(value) and all(isinstance(item, np.ndarray) for item in value.values())
    return False
