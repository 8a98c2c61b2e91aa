"""Keywords that `fit` used to have: they still work, and say once what to write instead."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from onnxtrain.device.checks import at_least, choice
from onnxtrain.device.loop.callbacks import as_callbacks
from onnxtrain.device.loop.checkpoint_policy import SaveCheckpoint
from onnxtrain.device.loop.monitor import EarlyStopping
from onnxtrain.device.loop.nan_guard import CheckFinite
from onnxtrain.errors import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")
Keywords = dict[str, Any]
_told: set[str] = set()


def _renamed(new: str) -> Callable[[Any, Keywords], None]:
    def rename(value: Any, keywords: Keywords) -> None:
        if keywords.get(new) is not None:
            raise ArgumentError(f"{new}= was given twice: once under its old name")
        keywords[new] = value

    return rename


def _callback(make: Callable[[Any, Keywords], Any]) -> Callable[[Any, Keywords], None]:
    def add(value: Any, keywords: Keywords) -> None:
        made = None if value is None else make(value, keywords)
        if made is not None:
            keywords["callbacks"] = [made, *as_callbacks(keywords.get("callbacks", ()))]

    return add


def _early_stopping(given: Any, _: Keywords) -> EarlyStopping:
    if isinstance(given, EarlyStopping):
        return given
    try:
        return (
            EarlyStopping(**given) if isinstance(given, Mapping) else EarlyStopping(patience=given)
        )
    except TypeError as wrong:
        raise ArgumentError(f"early_stopping: {wrong}") from None


def _save_checkpoint(path: Any, keywords: Keywords) -> SaveCheckpoint:
    every = keywords.pop("checkpoint_every", None)
    return SaveCheckpoint(path, "epoch" if every is None else every)


def _every_without_a_path(every: Any, _: Keywords) -> None:
    raise ArgumentError("checkpoint_every needs a file: pass callbacks=[SaveCheckpoint(path)]")


def _accumulation(how: Any, keywords: Keywords) -> None:
    if choice("accumulation", how, ("mean", "sum")) == "sum":
        keywords["accumulate"] = (keywords.get("accumulate", 1), "sum")


def _micro_batch(passes: Any, keywords: Keywords) -> None:
    size = at_least(1, "batch_size", keywords.get("batch_size", 32))
    if size % at_least(1, "micro_batch", passes):
        raise ArgumentError(f"a batch of {size} cannot be divided into {passes} equal passes")
    if passes > 1:
        _renamed("micro_batch_size")(size // passes, keywords)


# The keyword, what to write instead, and what it does to the other keywords.
_OLD: dict[str, tuple[str, Callable[[Any, Keywords], None]]] = {
    "evaluate": ("validation=", _renamed("validation")),
    "scheduler": ("schedule=", _renamed("schedule")),
    "accumulation": ("accumulate=(n, 'sum')", _accumulation),
    "micro_batch": ("micro_batch_size=, the samples of a pass", _micro_batch),
    "early_stopping": ("callbacks=[EarlyStopping(patience=...)]", _callback(_early_stopping)),
    "checkpoint": ("callbacks=[SaveCheckpoint(path)]", _callback(_save_checkpoint)),
    "checkpoint_every": (
        "callbacks=[SaveCheckpoint(path, every=...)]", _callback(_every_without_a_path)
    ),
    "check_every": (
        "callbacks=[CheckFinite(every=...)]", _callback(lambda every, _: CheckFinite(every))
    ),
}  # fmt: skip


def accepts_old_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function take the old keywords as well."""

    @wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        for name in keywords.keys() & _OLD.keys() - _told:
            _told.add(name)
            warnings.warn(
                f"fit({name}=...) is deprecated: write {_OLD[name][0]}",
                DeprecationWarning,
                stacklevel=2,
            )
        for name, (_, translate) in _OLD.items():
            if name in keywords:
                translate(keywords.pop(name), keywords)
        return function(*args, **keywords)

    return call
