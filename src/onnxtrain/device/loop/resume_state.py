"""The position of a run, saved in its checkpoint, so that it resumes as if it never stopped."""

from __future__ import annotations

import base64
import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxtrain.device.loop.history import History
from onnxtrain.device.random_state import process_seed
from onnxtrain.errors import ArgumentError, CheckpointError

if TYPE_CHECKING:
    from onnxtrain.device.optimizer import Optimizer
    from onnxtrain.device.session import TrainingSession

# The entry of a checkpoint's private record that belongs to `fit`.
KEY = "fit"
_FORMAT = 1
_COUNTS, _SUMS = ("seed", "epoch", "batch", "samples", "first_step"), ("loss_sum", "seconds")


@dataclass
class ResumeState:
    """The position of a run.

    `epoch` epochs are over, and of the next one `batch` batches, with `samples` samples, whose
    losses add up to `loss_sum`, within `seconds`. `first_step` is the optimizer's step at which the
    run began, and `scheduler` the name and the rate that its scheduler was made with.
    """

    seed: int
    epoch: int = 0
    batch: int = 0
    samples: int = 0
    loss_sum: float = 0.0
    seconds: float = 0.0
    first_step: int = 0
    scheduler: dict[str, Any] | None = None
    history: History = field(default_factory=History)

    def next_epoch(self) -> None:
        """Move on to the beginning of the next epoch."""
        self.epoch += 1
        self.batch = self.samples = 0
        self.loss_sum = self.seconds = 0.0

    def to_record(
        self, step: int, order: Mapping[str, Any], best: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Return the position as plain data for a checkpoint; `step` is the optimizer's."""
        history = json.loads(self.history.to_json())
        history |= {"losses": _pack(self.history.losses), "stopped": "", "interrupted": False}
        return {
            "format": _FORMAT,
            "step": step,
            **{f.name: getattr(self, f.name) for f in fields(self) if f.name != "history"},
            "order": dict(order),
            "best": None if best is None else dict(best),
            "history": history,
        }

    @classmethod
    def from_record(cls, saved: Any, step: int) -> ResumeState:
        """Read the record of a checkpoint, which is not trusted."""
        try:
            if saved["format"] != _FORMAT:
                raise ValueError(f"it has the format {saved['format']!r}, not {_FORMAT}")
            history = {**saved["history"], "losses": _unpack(saved["history"]["losses"])}
            counts = {name: int(saved[name]) for name in _COUNTS}
            sums: dict[str, Any] = {name: float(saved[name]) for name in _SUMS}
            state = cls(
                **counts,
                **sums,
                scheduler=None if saved["scheduler"] is None else dict(saved["scheduler"]),
                history=History.from_plain(history),
            )
            saved_step = int(saved["step"])
            if min(counts.values()) < 0 or bool(state.batch) != bool(state.samples):
                raise ValueError("its counts make no sense")
            if not math.isfinite(sum(sums.values())):
                raise ValueError("its sums are not finite")
        except (KeyError, TypeError, ValueError, AttributeError) as wrong:
            raise CheckpointError(
                f"the checkpoint's record of the run's position cannot be read: {wrong!r}"
            ) from None
        if saved_step != step:
            raise CheckpointError(
                f"the checkpoint has a run's position at step {saved_step}, but its parameters are "
                f"of step {step}: they were trained or saved outside of fit. Save with run.save() "
                "in callbacks, or start a new run with resume=False"
            )
        return state

    def check_order(self, saved: Any, order: Mapping[str, Any]) -> None:
        """Refuse other batches than before in the middle of an epoch."""
        if not self.batch:
            return
        before = saved if isinstance(saved, dict) else {}
        changed = [key for key in order if before.get(key) != order[key]]
        if changed:
            details = ", ".join(
                f"{key} {order[key]!r} (before: {before.get(key)!r})" for key in changed
            )
            raise ArgumentError(
                f"the run stopped within epoch {self.epoch + 1}, after {self.batch} batches, and "
                f"cannot continue there with other batches: {details}. Resume with the same "
                "settings, or start a new run with resume=False"
            )
        batches = order.get("batches")
        if batches is not None and self.batch > batches:
            raise CheckpointError(
                f"the checkpoint's record of the run's position has {self.batch} batches of an "
                f"epoch done, which has {batches}"
            )


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
    session: TrainingSession, optimizer: Optimizer, saved: dict[str, Any] | None, seed: int | None
) -> ResumeState:
    """Return the position at which the run begins, or continues."""
    if saved is not None:
        state = ResumeState.from_record(saved, optimizer.step_count)
        state.seed = state.seed if seed is None else seed
        # The scheduler that is made next takes over from one of an earlier run in this process.
        session.module.training_state.saved_scheduler = optimizer.scheduler_state()
        return state
    # A new run has a schedule of its own.
    session.module.training_state.saved_scheduler = None
    seeds = (number for number in (seed, process_seed()) if number is not None)
    return ResumeState(next(seeds, secrets.randbits(63)), first_step=optimizer.step_count)


def _pack(losses: list[float]) -> dict[str, str]:
    """Write many numbers in little room: losses usually are 32-bit floats."""
    array = np.asarray(losses, np.float64)
    narrow = array.astype("<f4")
    kind = "<f4" if np.array_equal(narrow.astype(np.float64), array) else "<f8"
    return {"type": kind, "data": base64.b64encode(array.astype(kind).tobytes()).decode("ascii")}


def _unpack(packed: Mapping[str, Any]) -> list[float]:
    if packed["type"] not in ("<f4", "<f8"):
        raise ValueError(f"losses of type {packed['type']!r}")
    data = base64.b64decode(packed["data"], validate=True)
    values: list[float] = np.frombuffer(data, packed["type"]).astype(np.float64).tolist()
    return values
