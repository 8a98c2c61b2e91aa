"""The scheduler of a run, from a name and settings."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from onnxtrain.device.checks import fraction
from onnxtrain.device.loop.metrics import Metric
from onnxtrain.device.loop.monitor import find_monitor
from onnxtrain.device.schedulers.rates import SCHEDULERS, PlateauLRScheduler
from onnxtrain.errors import ArgumentError

if TYPE_CHECKING:
    from onnxtrain.device.loop.resume_state import Place
    from onnxtrain.device.session import TrainingSession


class Schedule:
    """A scheduler, and when to call it: after each step, or with a value after each epoch."""

    def __init__(self, scheduler: Any, monitor: str | None) -> None:
        self._scheduler = scheduler
        self.monitor = monitor

    def after_step(self) -> None:
        """Let the scheduler follow the optimizer."""
        if self._scheduler is not None and self.monitor is None:
            self._scheduler.step()

    def after_epoch(self, value: float) -> None:
        """Tell the scheduler the value that it watches."""
        self._scheduler.step(value)


def make_schedule(
    given: Any,
    session: TrainingSession,
    place: Place,
    steps: int | None,
    epochs: int,
    metrics: Mapping[str, Metric],
    evaluates: bool,
) -> Schedule:
    """Return the schedule that is meant by an object, a name, or a name with settings.

    `steps` is the number of steps in an epoch, if it is known.
    """
    if given is None:
        return Schedule(None, None)
    if not isinstance(given, str | tuple | Mapping):
        return _own(given, metrics, evaluates)
    name, settings = _named(given)
    if name == PlateauLRScheduler.kind:
        monitor, mode = find_monitor(
            settings.pop("monitor", None),
            settings.get("mode", "auto"),
            metrics,
            evaluates,
            "the scheduler 'plateau'",
        )
        settings["mode"] = mode
    else:
        monitor = None
        settings = _filled(name, settings, session, place, steps, epochs)
    assert session.optimizer is not None
    make: Any = SCHEDULERS[name]
    return Schedule(make(session.optimizer, **_checked(name, settings)), monitor)


def _own(scheduler: Any, metrics: Mapping[str, Metric], evaluates: bool) -> Schedule:
    if not callable(getattr(scheduler, "step", None)) or isinstance(scheduler, type):
        raise ArgumentError(
            "scheduler must be a scheduler, a name, or a dictionary with 'name' and settings, "
            f"not {scheduler!r}"
        )
    if not isinstance(scheduler, PlateauLRScheduler):
        return Schedule(scheduler, None)
    monitor, _ = find_monitor(None, scheduler.mode, metrics, evaluates, "the scheduler")
    return Schedule(scheduler, monitor)


def _named(given: str | tuple[Any, ...] | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    if isinstance(given, str):
        name, settings = given, {}
    elif isinstance(given, Mapping):
        settings = dict(given)
        name = settings.pop("name", None)
    elif len(given) == 2 and isinstance(given[1], Mapping):
        name, settings = given[0], dict(given[1])
    else:
        raise ArgumentError(f"scheduler must be (name, settings), not {given!r}")
    if name not in SCHEDULERS:
        raise ArgumentError(f"there is no scheduler {name!r}: there are {', '.join(SCHEDULERS)}")
    return name, settings


def _filled(
    name: str,
    settings: dict[str, Any],
    session: TrainingSession,
    place: Place,
    steps: int | None,
    epochs: int,
) -> dict[str, Any]:
    """Add what follows from the data, the session and, after a resume, from what was saved."""
    takes = inspect.signature(SCHEDULERS[name]).parameters
    saved = place.scheduler if place.scheduler and place.scheduler.get("name") == name else {}
    ratio = settings.pop("warmup_ratio", None)
    unit = settings.pop("unit", "step")
    if "total_step_count" in takes and "total_step_count" not in settings:
        settings["total_step_count"] = epochs * _known(steps, name, "total_step_count")
    if "warmup_step_count" in takes and "warmup_step_count" not in settings:
        settings["warmup_step_count"] = _warmup(ratio, settings, steps, epochs, name)
    elif ratio is not None:
        raise ArgumentError(f"the scheduler {name!r} takes no warmup_ratio, or its step count too")
    if unit not in ("step", "epoch") or (unit == "epoch" and "every" not in takes):
        raise ArgumentError(f"the scheduler {name!r} does not take unit={unit!r}")
    if unit == "epoch":
        settings["every"] = _known(steps, name, "every")
    settings.setdefault("first_step", place.first_step)
    rate = "max_lr" if "max_lr" in takes else "initial_lr"
    if settings.get(rate) is None:
        settings[rate] = saved.get(rate, session.get_learning_rate())
    place.scheduler = {"name": name, rate: float(settings[rate])}
    return settings


def _warmup(
    ratio: Any, settings: Mapping[str, Any], steps: int | None, epochs: int, name: str
) -> int:
    if ratio is None:
        return 0
    total = settings.get("total_step_count")
    if total is None:
        total = epochs * _known(steps, name, "warmup_step_count")
    return math.ceil(fraction("warmup_ratio", ratio) * total)


def _known(steps: int | None, name: str, missing: str) -> int:
    if steps is None:
        raise ArgumentError(
            f"the scheduler {name!r} needs the number of steps, and the data do not have a length: "
            f"pass scheduler={{'name': {name!r}, {missing!r}: ...}}"
        )
    return steps


def _checked(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    takes = [key for key in inspect.signature(SCHEDULERS[name]).parameters if key != "optimizer"]
    unknown = [key for key in settings if key not in takes]
    required = [
        key
        for key, parameter in inspect.signature(SCHEDULERS[name]).parameters.items()
        if parameter.default is parameter.empty and key != "optimizer" and key not in settings
    ]
    if unknown or required:
        wrong = f"has no setting {unknown[0]!r}" if unknown else f"needs {required[0]!r}"
        raise ArgumentError(f"the scheduler {name!r} {wrong}; it takes {', '.join(takes)}")
    return settings
