"""What callbacks see of a run, and how they are called."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from onnxtrain.device.loop.history import EpochRecord, History
from onnxtrain.errors import ArgumentError

if TYPE_CHECKING:
    from onnxtrain.device.session import TrainingSession

T = TypeVar("T")
_EVENTS = ("on_train_begin", "on_step_end", "on_epoch_end", "on_evaluate", "on_train_end")


@dataclass(eq=False, repr=False)
class Run:
    """A run of `fit`, as callbacks see it.

    `epoch` is the number of the epoch, from 1, of `epochs`; `step` the number of steps of the run
    so far and `loss` the loss of the last one. `record` is that of the last finished epoch, and
    `values` are the results of the last evaluation. `save(path)` saves a checkpoint from which the
    run can be resumed.
    """

    session: TrainingSession
    epochs: int
    history: History
    save: Callable[[str | os.PathLike[str]], None]
    epoch: int = 0
    loss: float | None = None
    values: dict[str, Any] = field(default_factory=dict)
    stopped: str | None = None

    @property
    def step(self) -> int:
        """The number of optimizer steps that the run has taken."""
        return self.history.steps

    @property
    def record(self) -> EpochRecord | None:
        """The record of the last finished epoch."""
        return self.history.epochs[-1] if self.history.epochs else None

    def stop(self, reason: str = "a callback stopped training") -> None:
        """End training after this step, or if called at the end of an epoch, after that."""
        self.stopped = reason

    def __repr__(self) -> str:
        return f"Run(epoch {self.epoch}/{self.epochs}, step {self.step}, loss {self.loss})"


def as_callbacks(given: Any) -> list[Any]:
    """Return callbacks as a list; one alone need not be in one."""
    return list(given) if isinstance(given, Iterable) else [given]


def take(callbacks: list[Any], kind: type[T]) -> T | None:
    """Remove the callback of a kind that the loop carries out itself, and return it."""
    found = [callback for callback in callbacks if isinstance(callback, kind)]
    if len(found) > 1:
        raise ArgumentError(f"callbacks has {len(found)} {kind.__name__}; a run takes one")
    callbacks[:] = [callback for callback in callbacks if not isinstance(callback, kind)]
    return found[0] if found else None


class Callbacks:
    """Calls the methods that callbacks have."""

    def __init__(self, callbacks: Iterable[Any]) -> None:
        self._methods: dict[str, list[Callable[[Run], Any]]] = {event: [] for event in _EVENTS}
        for callback in callbacks:
            found = {e: getattr(callback, e) for e in _EVENTS if hasattr(callback, e)}
            if isinstance(callback, type) or not (found or callable(callback)):
                raise ArgumentError(
                    f"a callback is a function, or an object with one of {', '.join(_EVENTS)}, "
                    f"not {callback!r}"
                )
            for event, method in (found or {"on_epoch_end": callback}).items():
                self._methods[event].append(method)

    def call(self, event: str, run: Run) -> None:
        """Call all callbacks that have a method for an event, in their order."""
        for method in self._methods[event]:
            method(run)
