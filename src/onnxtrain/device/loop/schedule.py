"""The learning rate of a run: what `fit(schedule=...)` takes, and when the rate changes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from onnxtrain.device.checks import fraction
from onnxtrain.device.loop.metrics import Metric
from onnxtrain.device.loop.monitor import find_monitor
from onnxtrain.device.loop.resume_state import ResumeState
from onnxtrain.device.schedulers import SCHEDULERS, LRScheduler, PlateauLRScheduler
from onnxtrain.device.schedules import Plateau
from onnxtrain.errors import ArgumentError

if TYPE_CHECKING:
    from onnxtrain.device.optimizer import Optimizer

_TAKES = "schedule must be a function from step to rate, a name, a scheduler or Plateau(...)"


class RunSchedule(NamedTuple):
    """What sets the rate after each step; with `monitor`, after each epoch from that value.

    `settings` are what a resumed run has to have in common with the one that was saved.
    """

    settings: dict[str, Any]
    step: Callable[..., None] = lambda: None
    monitor: str | None = None
    scheduler: LRScheduler | None = None


def make_schedule(
    given: Any,
    optimizer: Optimizer,
    state: ResumeState,
    steps: int | None,
    total: int | None,
    metrics: Mapping[str, Metric],
    evaluates: bool,
) -> RunSchedule:
    """Return the schedule of a run; `steps` are those of an epoch and `total` all, if known."""
    if given is None:
        return RunSchedule({"schedule": None})
    monitor = None
    if isinstance(given, str | tuple | Mapping):
        name, settings = _named(given)
        if name == PlateauLRScheduler.kind:
            given = Plateau(**settings)
        else:
            given = _make(name, optimizer, _filled(name, settings, optimizer, state, steps, total))
    if isinstance(given, Plateau | PlateauLRScheduler):
        watched = given.monitor if isinstance(given, Plateau) else None
        monitor, mode = find_monitor(watched, given.mode, metrics, evaluates, "Plateau")
        if isinstance(given, Plateau):
            given = _make(PlateauLRScheduler.kind, optimizer, {**given.settings, "mode": mode})
    own: Any = given
    if isinstance(given, LRScheduler):
        given.restore(state.state_of(given.kind))
        described = {f"{given.kind}.{key}": value for key, value in given.settings().items()}
        if monitor is not None:
            described[f"{given.kind}.monitor"] = monitor
        return RunSchedule({"schedule": given.kind, **described}, own.step, monitor, given)
    if isinstance(given, type) or not (callable(given) or callable(getattr(given, "step", None))):
        raise ArgumentError(f"{_TAKES}, not {given!r}")
    if not callable(given):
        if state.is_resumed:
            raise ArgumentError(
                f"a run with a scheduler of one's own ({type(given).__name__}) cannot be resumed: "
                "its state is not saved. Write it as a function from step to rate"
            )
        return RunSchedule({"schedule": type(given).__name__}, given.step)
    return _of_function(given, optimizer, state)


def _of_function(
    given: Callable[[int], float], optimizer: Optimizer, state: ResumeState
) -> RunSchedule:
    """Let a function set the rate; some of its rates are saved, by which it is known again."""

    def set_rate(step: int) -> float:
        optimizer.set_learning_rate(given(step))
        return optimizer.get_learning_rate()

    def set_next() -> None:
        step = optimizer.step_count - state.first_step
        rate = set_rate(step)
        if step & (step - 1) == 0:  # 0 and the powers of two
            state.rates[str(step)] = rate

    for step, before in state.rates.items():
        rate = set_rate(int(step))
        if rate != before:
            raise ArgumentError(
                f"the run cannot be resumed with another schedule: its rate at step {step} is "
                f"{rate:.6g}, and was {before:.6g}. Resume with the same one, or start a new run "
                "with resume=False"
            )
    optimizer.attach(None)
    set_next()
    return RunSchedule({"schedule": "function"}, set_next)


def _named(given: str | tuple[Any, ...] | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    if isinstance(given, str):
        name, settings = given, {}
    elif isinstance(given, Mapping):
        settings = dict(given)
        name = settings.pop("name", None)
    elif len(given) == 2 and isinstance(given[1], Mapping):
        name, settings = given[0], dict(given[1])
    else:
        raise ArgumentError(f"{_TAKES}, not {given!r}")
    if name not in SCHEDULERS:
        raise ArgumentError(f"there is no schedule {name!r}: there are {', '.join(SCHEDULERS)}")
    return name, settings


def _make(name: str, optimizer: Optimizer, settings: dict[str, Any]) -> Any:
    make: Any = SCHEDULERS[name]
    signature = inspect.signature(make)
    try:
        signature.bind(optimizer, **settings)
    except TypeError as wrong:
        takes = ", ".join(key for key in signature.parameters if key != "optimizer")
        raise ArgumentError(f"the schedule {name!r}: {wrong}; it takes {takes}") from None
    return make(optimizer, **settings)


def _filled(
    name: str,
    settings: dict[str, Any],
    optimizer: Optimizer,
    state: ResumeState,
    steps: int | None,
    total: int | None,
) -> dict[str, Any]:
    """Add what follows from the data, the session and, in a resumed run, from what was saved."""
    takes = inspect.signature(SCHEDULERS[name]).parameters

    def known(number: int | None, missing: str) -> int:
        if number is None:
            raise ArgumentError(
                f"the schedule {name!r} needs the number of steps, and the data have no length: "
                f"pass schedule={{'name': {name!r}, {missing!r}: ...}}"
            )
        return number

    ratio = settings.pop("warmup_ratio", None)
    unit = settings.pop("unit", "step")
    if "total_step_count" in takes and "total_step_count" not in settings:
        settings["total_step_count"] = known(total, "total_step_count")
    if ratio is not None:
        if "warmup_step_count" not in takes or "warmup_step_count" in settings:
            raise ArgumentError(
                f"the schedule {name!r} takes no warmup_ratio, or has its steps too"
            )
        given = settings.get("total_step_count")
        whole = known(total, "warmup_step_count") if given is None else given
        settings["warmup_step_count"] = math.ceil(fraction("warmup_ratio", ratio) * whole)
    elif "warmup_step_count" in takes:
        settings.setdefault("warmup_step_count", 0)
    if unit not in ("step", "epoch") or (unit == "epoch" and "every" not in takes):
        raise ArgumentError(f"the schedule {name!r} does not take unit={unit!r}")
    if unit == "epoch":
        settings["every"] = known(steps, "every")
    settings.setdefault("first_step", state.first_step)
    rate = "max_lr" if "max_lr" in takes else "initial_lr"
    if settings.get(rate) is None:
        saved = state.scheduler if state.scheduler and state.scheduler.get("name") == name else {}
        settings[rate] = saved.get(rate, optimizer.get_learning_rate())
    state.scheduler = {"name": name, rate: float(settings[rate])}
    return settings
