"""The progress of a federation on disk, from which a restarted server continues."""

from __future__ import annotations

import copy
import logging
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result, Strategy

from onnxtrain.errors import StateError
from onnxtrain.federated.arrays import read_record, to_record
from onnxtrain.federated.files import (
    explained_damage,
    pack_arrays,
    replace_file,
    unpack_arrays,
)
from onnxtrain.format import strict_json
from onnxtrain.format.checkpoint.content import Array
from onnxtrain.format.checkpoint.store import translated

_log = logging.getLogger("flwr")
_FILE, _HISTORY = "federation.npz", "history.json"
_FORMAT = 2
# Where Flower's result has the metrics of rounds.
TRAIN, EVALUATE = "train_metrics_clientapp", "evaluate_metrics_clientapp"
CENTRAL = "evaluate_metrics_serverapp"
_KINDS = (TRAIN, EVALUATE, CENTRAL)


@dataclass
class Progress:
    """The progress of a federation."""

    version: str
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    round: int = 0
    arrays: dict[str, Array] = field(default_factory=dict)
    history: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    kind: str = ""  # of the strategy

    def write(self, folder: Path) -> None:
        """Write the progress atomically."""
        kept: dict[str, Array] = {f"w:{name}": array for name, array in self.arrays.items()}
        about = {"format": _FORMAT} | {k: getattr(self, k) for k in ("version", "name", "round")}
        about |= {"strategy": _split(self.strategy, kept), "kind": self.kind}
        kept["about"] = np.frombuffer(strict_json.dumps(about).encode(), np.uint8)
        replace_file(folder / _FILE, pack_arrays(kept))

    @classmethod
    def read(cls, folder: Path) -> Progress | None:
        """Return the progress that an earlier server wrote; None if there is none."""
        file = folder / _FILE
        if not file.exists():
            return None
        where = f"the federation's file {file}"
        with translated("read", file):
            data = file.read_bytes()
        kept = unpack_arrays(data, where)
        with explained_damage(where):
            about = strict_json.loads(kept["about"].tobytes())
            if about["format"] not in (1, _FORMAT):
                raise ValueError(f"format {about['format']}")
            texts = [about["version"], about["name"], about.get("kind", "")]
            number = about["round"]
            if not all(isinstance(text, str) for text in texts) or type(number) is not int:
                raise ValueError("values of other types than were written")
            return cls(
                version=texts[0],
                name=texts[1],
                round=number,
                arrays={k[2:]: array for k, array in kept.items() if k.startswith("w:")},
                history=_read_history(folder / _HISTORY, number),
                strategy=_join(about["strategy"], kept),
                kind=texts[2],
            )

    def note(self, kind: str, number: int, metrics: MetricRecord, folder: Path | None) -> None:
        """Add the metrics of a round, and write the history."""
        self.history.setdefault(kind, {})[str(number)] = dict(metrics)
        if folder is not None:
            replace_file(folder / _HISTORY, strict_json.dumps(self.history, indent=1).encode())

    def has(self, kind: str, number: int) -> bool:
        """Whether there are metrics of a round."""
        return str(number) in self.history.get(kind, {})

    def result(self) -> Result:
        """Return all rounds as Flower's result."""
        made = Result(arrays=self.record())
        for kind, rounds in self.history.items():
            setattr(made, kind, {int(k): MetricRecord(v) for k, v in rounds.items()})
        return made

    def record(self) -> ArrayRecord:
        """Return the weights as a record."""
        return to_record(self.arrays)


def _read_history(file: Path, last: int) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the metrics of completed rounds; later ones are repeated."""
    if not file.exists():
        return {}
    with translated("read", file):  # a disk that fails now and then costs no metrics
        data = file.read_bytes()
    try:
        history = strict_json.loads(data)
        return {
            kind: {
                n: dict(MetricRecord(metrics))  # which has numbers, or raises
                for n, metrics in history.get(kind, {}).items()
                if int(n) <= last
            }
            for kind in _KINDS
        }
    except Exception as error:  # damaged in some way
        _log.warning("%s cannot be read (%s): the metrics of earlier rounds are lost", file, error)
        return {}


def _split(value: Any, kept: dict[str, Array]) -> Any:
    """Return a structure with each array replaced by its key in `kept`."""
    if isinstance(value, np.ndarray | np.generic):
        key = f"s:{len(kept)}"
        kept[key] = np.asarray(value)
        return {"array" if isinstance(value, np.ndarray) else "scalar": key}
    if isinstance(value, Mapping):
        return {"dict": [[_split(k, kept), _split(item, kept)] for k, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_split(item, kept) for item in value]}
    return {"value": value}


def _join(value: Mapping[str, Any], kept: Mapping[str, Array]) -> Any:
    kind, content = next(iter(value.items()))
    if kind in ("array", "scalar"):
        return kept[content] if kind == "array" else kept[content][()]
    if kind == "dict":
        # In format 1, keys are strings.
        return {k if isinstance(k, str) else _join(k, kept): _join(v, kept) for k, v in content}
    if kind in ("list", "tuple"):
        made = [_join(item, kept) for item in content]
        return made if kind == "list" else tuple(made)
    return content


@contextmanager
def locked(folder: Path | None) -> Iterator[None]:
    """Lock the folder against a second server."""
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    here = (os.getpid(), folder.resolve())
    with (folder / "lock").open("w") as file:
        if here in _running or not _lock(file):
            raise StateError(f"another server runs a federation in {folder}: use another folder")
        _running.add(here)
        try:
            yield
        finally:
            _running.discard(here)


_running: set[tuple[int, Path]] = set()  # a process can take its own locks again


def _lock(file: IO[str]) -> bool:
    """Lock a file until it is closed or the process ends; children do not inherit the lock."""
    try:
        import fcntl
    except ImportError:  # Windows has no such locks
        return True
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        _log.warning("%s cannot be locked: make sure that no other server uses it", file.name)
    return True


# ---- the state of a strategy ---------------------------------------------------------------------


def kind_of(strategy: Strategy) -> str:
    """Return the class names of nested strategies."""
    inner, name = getattr(strategy, "strategy", None), type(strategy).__name__
    return f"{name}({kind_of(inner)})" if isinstance(inner, Strategy) else name


def settings_of(strategy: Strategy) -> dict[str, Any]:
    """Return the settings of a strategy, which are not part of its state."""
    made = {k: copy.deepcopy(v) for k, v in vars(strategy).items() if _is_plain(v)}
    inner = getattr(strategy, "strategy", None)
    return made | ({"strategy": settings_of(inner)} if isinstance(inner, Strategy) else {})


def capture(strategy: Strategy, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a strategy: moments, a clipping norm, a privacy budget."""
    if callable(getattr(strategy, "state_dict", None)):
        return _state_dict(strategy)
    made: dict[str, Any] = {}
    for name, value in vars(strategy).items():
        if isinstance(value, Strategy):
            made[name] = capture(value, settings.get(name, {}))
        elif callable(getattr(value, "state_dict", None)):
            made[name] = _state_dict(value)
        elif isinstance(value, ArrayRecord):
            made[name] = {"record": read_record(value)}
        elif _is_plain(value) and not _same(value, settings.get(name)):
            made[name] = {"plain": value}
    return made


def _state_dict(owner: Any) -> dict[str, Any]:
    state = owner.state_dict()
    if _is_plain(state):
        return {"state_dict": state}
    _log.warning(
        "state_dict() of %s holds more than numbers, strings and arrays: it is not saved",
        type(owner).__name__,
    )
    return {}


def restore(strategy: Strategy, state: Mapping[str, Any]) -> None:
    """Restore the state that `capture` returned."""
    if "state_dict" in state:
        strategy.load_state_dict(state["state_dict"])
        return
    for name, saved in state.items():
        if hasattr(type(strategy), name):
            raise ValueError(f"a strategy's own {name!r}")
        value = getattr(strategy, name, None)
        if isinstance(value, Strategy):
            restore(value, saved)
        elif "state_dict" in saved and value is not None:
            value.load_state_dict(saved["state_dict"])
        elif "record" in saved:
            setattr(strategy, name, to_record(saved["record"]))
        elif "plain" in saved:
            setattr(strategy, name, saved["plain"])


def _is_plain(value: Any) -> bool:
    """Whether a value consists of numbers, strings and arrays in lists, tuples and dicts."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(k) and _is_plain(v) for k, v in value.items())
    if isinstance(value, np.ndarray):
        return not value.dtype.hasobject
    return value is None or isinstance(value, bool | int | float | str | np.generic)


def _same(one: Any, other: Any) -> bool:
    """Whether plain values are equal, arrays included."""
    some: dict[str, Array] = {}
    others: dict[str, Array] = {}
    return _split(one, some) == _split(other, others) and all(
        array.dtype == others[key].dtype and np.array_equal(array, others[key])
        for key, array in some.items()
    )
