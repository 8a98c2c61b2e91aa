"""The position of a run, saved in its checkpoint, so that it resumes as if it never stopped."""

from __future__ import annotations

import base64
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxtrain.device.loop.history import History
from onnxtrain.device.random_state import RandomState, process_seed
from onnxtrain.errors import ArgumentError, CheckpointError
from onnxtrain.format.strict_json import entry, mapping, number, shortened, whole

if TYPE_CHECKING:
    from onnxtrain.device.optimizer import Optimizer
    from onnxtrain.device.session import TrainingSession
    from onnxtrain.device.state import TrainingState

# The entry of a checkpoint's private record that belongs to `fit`.
KEY = "fit"
_FORMAT = 1
_ANEW = "start a new run (resume=False; on the command line --restart)"
_MOST = 2**53  # of what is counted; more than anybody trains
_COUNTS, _SUMS = ("seed", "epoch", "batch", "samples", "first_step"), ("loss_sum", "seconds")


@dataclass
class ResumeState:
    """The position of a run.

    `epoch` epochs are over, and of the next one `batch` batches, with `samples` samples, whose
    losses add up to `loss_sum`, within `seconds`. `first_step` is the optimizer's step at which the
    run began. `scheduler` has the name of its scheduler, the rate that it was made with and its
    state; `rates` are some that a schedule function has returned, by step. `random` is where the
    random numbers of a run that was saved stood.
    """

    seed: int
    epoch: int = 0
    batch: int = 0
    samples: int = 0
    loss_sum: float = 0.0
    seconds: float = 0.0
    first_step: int = 0
    scheduler: dict[str, Any] | None = None
    rates: dict[str, float] = field(default_factory=dict)
    random: dict[str, int] | None = None
    history: History = field(default_factory=History)
    is_resumed: bool = field(default=False, init=False)

    def state_of(self, kind: str) -> dict[str, Any] | None:
        """Return the state of a scheduler of some kind, where the run was saved with one."""
        saved = self.scheduler if self.scheduler and self.scheduler.get("name") == kind else {}
        return saved.get("state")

    def next_epoch(self) -> None:
        """Move on to the beginning of the next epoch."""
        self.epoch += 1
        self.batch = self.samples = 0
        self.loss_sum = self.seconds = 0.0

    def to_record(self, **others: Any) -> dict[str, Any]:
        """Return the position, and others of the record's entries, as plain data."""
        kept = self.history.thinned()
        history = kept.plain() | {"stopped": "", "interrupted": False}
        history["losses"] = _pack(kept.losses)
        own = {name: getattr(self, name) for name in (*_COUNTS, *_SUMS, "scheduler", "rates")}
        return {"format": _FORMAT, **own, **others, "history": history}

    @classmethod
    def from_record(cls, saved: Any, step: int) -> ResumeState:
        """Read the record of a checkpoint, which is not trusted."""
        try:
            state, saved_step = _read(mapping(saved, "it"))
        except ValueError as wrong:
            raise CheckpointError(
                f"the checkpoint's record of the run's position cannot be read: {wrong}. Load "
                f"another checkpoint, or {_ANEW}"
            ) from None
        if saved.get("restored"):
            raise ArgumentError(
                "the run cannot be resumed: it ended with restore_best, and the session holds the "
                f"parameters of epoch {shortened(saved['restored'])}. Load the checkpoint of the "
                f"run, or {_ANEW}"
            )
        if saved_step != step:
            raise CheckpointError(
                f"the checkpoint has a run's position at step {saved_step}, but its parameters are "
                f"of step {step}: they were trained or saved outside of fit. Save with run.save() "
                "in callbacks, or start a new run with resume=False"
            )
        state.is_resumed = True
        return state


def _read(saved: Mapping[str, Any]) -> tuple[ResumeState, int]:
    """Return the position of a record, and its step; a ValueError says what is wrong with it."""
    if entry(saved, "format") != _FORMAT:
        raise ValueError(f"it has the format {shortened(saved['format'])}, not {_FORMAT}")
    history = mapping(entry(saved, "history"), "'history'")
    losses = _unpack(mapping(entry(history, "losses"), "'losses'"))
    counts = {name: whole(saved, name) for name in _COUNTS}
    sums: dict[str, Any] = {name: number(saved, name) for name in _SUMS}
    if counts["samples"] and not counts["batch"]:
        raise ValueError(f"{counts['batch']} batches cannot have {counts['samples']} samples")
    if max(counts["epoch"], counts["batch"], counts["samples"]) >= _MOST:
        raise ValueError("its counts are too large")
    if saved.get("rate") is not None and number(saved, "rate") < 0:
        raise ValueError(f"'rate' is {shortened(saved['rate'])}, not a learning rate")
    state = ResumeState(
        **counts,
        **sums,
        scheduler=_scheduler(entry(saved, "scheduler")),
        rates=_rates(mapping(saved.get("rates", {}), "'rates'")),
        random=_random(saved.get("random")),
        history=History.from_plain({**history, "losses": losses}),
    )
    return state, whole(saved, "step")


def _scheduler(saved: Any) -> dict[str, Any] | None:
    """Read the name, the rate and the state of a scheduler."""
    if saved is None:
        return None
    scheduler = mapping(saved, "'scheduler'")
    if not isinstance(entry(scheduler, "name"), str):
        raise ValueError(f"the name of a scheduler is {shortened(scheduler['name'])}")
    for rate in ("initial_lr", "max_lr"):
        if rate in scheduler and number(scheduler, rate) < 0:
            raise ValueError(f"{rate!r} is {shortened(scheduler[rate])}, not a learning rate")
    if scheduler.get("state") is not None:
        mapping(scheduler["state"], "the state of a scheduler")
    return dict(scheduler)


def _rates(saved: Mapping[str, Any]) -> dict[str, float]:
    wrong = [step for step in saved if not re.fullmatch(r"[0-9]{1,18}", step)]
    if wrong:
        raise ValueError(f"'rates' has {shortened(wrong[0])}, which is no step")
    return {step: number(saved, step) for step in saved}


def check_settings(saved: Mapping[str, Any], now: Mapping[str, Any], batch: int) -> None:
    """Refuse to resume a run with settings that would make it another one."""
    before: dict[str, Any] = {}
    for part in ("order", "settings"):
        if isinstance(saved.get(part), dict):
            before |= saved[part]
    changed = [key for key in now if key in before and before[key] != now[key]]
    # Waiting longer than the run that was saved would have is fine, like more epochs.
    waits: list[Any] = [settings.get("patience") for settings in (before, now)]
    if all(isinstance(n, int) for n in waits) and waits[0] < waits[1]:
        changed.remove("patience")
    if waits[1] is None and isinstance(waits[0], int):  # it waits for ever
        watched = {"patience", "monitor", "mode", "min_delta", "restore_best"}
        watched |= {"validation"} if now.get("validation") is None else set()
        changed = [key for key in changed if key not in watched]
    if changed:
        details = ", ".join(
            f"{key} {_shown(now[key])} (before: {_shown(before[key])})" for key in changed
        )
        raise ArgumentError(
            f"the run cannot be resumed with other settings: {details}. Resume with the same ones, "
            f"or {_ANEW}"
        )
    batches = now.get("batches")
    if batches is not None and batch > batches:
        raise CheckpointError(
            f"the checkpoint's record of the run's position has {batch} batches of an epoch done, "
            f"which has {batches}"
        )


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else shortened(value, 300)


def saved_record(session: TrainingSession, path: Path | None) -> dict[str, Any] | None:
    """Return the record of the run that the session was saved in; None if there is none."""
    saved = session.module.training_state.private.get(KEY)
    if saved is None and path is not None and path.exists():
        raise ArgumentError(
            f"resume=True, but the session was not loaded from {str(path)!r}, which holds a run: "
            f"make it with TrainingSession.from_folder(..., checkpoint={str(path)!r}). To start "
            "anew, delete the file or pass resume=False"
        )
    return saved if saved is None or isinstance(saved, dict) else {}


def begin_or_resume(
    state: TrainingState, optimizer: Optimizer, saved: dict[str, Any] | None, seed: int | None
) -> ResumeState:
    """Return the position at which the run begins, or continues; all that is random follows it."""
    if saved is None:
        if seed is not None:
            state.random = RandomState({"seed": seed, "draws": 0})
        seeds = (number for number in (seed, process_seed()) if number is not None)
        return ResumeState(next(seeds, secrets.randbits(63)), first_step=optimizer.step_count)
    resumed = ResumeState.from_record(saved, optimizer.step_count)
    if seed is not None and seed != resumed.seed:
        raise ArgumentError(
            f"the run cannot be resumed with another seed: {seed} (before: {resumed.seed}). Leave "
            f"it out, or {_ANEW}"
        )
    if resumed.random is not None:
        state.random = RandomState(resumed.random)
    held = optimizer.scheduler_state()
    if held is not None and "state" not in (resumed.scheduler or {}):
        # A run of the JavaScript package has the state of its scheduler beside the record.
        kind = held.get("kind", "")
        resumed.scheduler = {"name": kind, **(resumed.scheduler or {})}
        resumed.scheduler["state"] = optimizer.saved_scheduler(kind)
    return resumed


def _random(saved: Any) -> dict[str, int] | None:
    if saved is None:
        return None
    return {name: whole(mapping(saved, "'random'"), name) for name in ("seed", "draws")}


def _pack(losses: list[float]) -> dict[str, str]:
    """Write many numbers in little room: losses usually are 32-bit floats."""
    array = np.asarray(losses, np.float64)
    narrow = array.astype("<f4")
    kind = "<f4" if np.array_equal(narrow.astype(np.float64), array) else "<f8"
    return {"type": kind, "data": base64.b64encode(array.astype(kind).tobytes()).decode("ascii")}


def _unpack(packed: Mapping[str, Any]) -> list[float]:
    kind, text = entry(packed, "type"), entry(packed, "data")
    if kind not in ("<f4", "<f8") or not isinstance(text, str):
        raise ValueError(f"losses of type {shortened(kind)}")
    data = base64.b64decode(text, validate=True)
    values: list[float] = np.frombuffer(data, kind).astype(np.float64).tolist()
    return values
