"""Where a run stands, so that it can go on from a checkpoint as if it had never stopped."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnxtrain.device.loop.history import History
from onnxtrain.errors import ArgumentError, CheckpointError

# The entry of a checkpoint's private record that belongs to `fit`.
KEY = "fit"
_FORMAT = 1


@dataclass
class Place:
    """Where a run stands.

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
        """An epoch is over: stand at the beginning of the next."""
        self.epoch += 1
        self.batch = self.samples = 0
        self.loss_sum = self.seconds = 0.0


def write_place(
    place: Place, step: int, order: Mapping[str, Any], best: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the place as plain data for a checkpoint; `step` is the optimizer's."""
    history = json.loads(place.history.to_json())
    history |= {"losses": _pack(place.history.losses), "stopped": "", "interrupted": False}
    return {
        "format": _FORMAT,
        "step": step,
        "seed": place.seed,
        "epoch": place.epoch,
        "batch": place.batch,
        "samples": place.samples,
        "loss_sum": place.loss_sum,
        "seconds": place.seconds,
        "first_step": place.first_step,
        "scheduler": place.scheduler,
        "order": dict(order),
        "best": None if best is None else dict(best),
        "history": history,
    }


def read_place(saved: Any, step: int) -> Place:
    """Return the place that a checkpoint holds, which may come from anywhere."""
    try:
        if saved["format"] != _FORMAT:
            raise ValueError(f"it has the format {saved['format']!r}, not {_FORMAT}")
        history = {**saved["history"], "losses": _unpack(saved["history"]["losses"])}
        place = Place(
            seed=int(saved["seed"]),
            epoch=int(saved["epoch"]),
            batch=int(saved["batch"]),
            samples=int(saved["samples"]),
            loss_sum=float(saved["loss_sum"]),
            seconds=float(saved["seconds"]),
            first_step=int(saved["first_step"]),
            scheduler=None if saved["scheduler"] is None else dict(saved["scheduler"]),
            history=History.from_plain(history),
        )
        at_step = int(saved["step"])
        counts = (place.seed, place.epoch, place.batch, place.samples, place.first_step)
        if min(counts) < 0 or bool(place.batch) != bool(place.samples):
            raise ValueError("its counts make no sense")
        if not math.isfinite(place.loss_sum + place.seconds):
            raise ValueError("its sums are not finite")
    except (KeyError, TypeError, ValueError, AttributeError) as wrong:
        raise CheckpointError(
            f"the checkpoint's record of where the run stood cannot be read: {wrong!r}"
        ) from None
    if at_step != step:
        raise CheckpointError(
            f"the checkpoint says where a run stood at step {at_step}, but its parameters are of "
            f"step {step}: they were trained or saved outside of fit. Save with run.save() in "
            "callbacks, or start a new run with resume=False"
        )
    return place


def check_order(saved: Any, order: Mapping[str, Any], place: Place) -> None:
    """Refuse other batches than before in the middle of an epoch."""
    if not place.batch:
        return
    before = saved if isinstance(saved, dict) else {}
    changed = [key for key in order if before.get(key) != order[key]]
    if changed:
        details = ", ".join(
            f"{key} {order[key]!r} (before: {before.get(key)!r})" for key in changed
        )
        raise ArgumentError(
            f"the run stopped within epoch {place.epoch + 1}, after {place.batch} batches, and "
            f"cannot go on there with other batches: {details}. Resume with what it was, or start "
            "a new run with resume=False"
        )
    batches = order.get("batches")
    if batches is not None and place.batch > batches:
        raise CheckpointError(
            f"the checkpoint's record of where the run stood has {place.batch} batches of an epoch "
            f"done, which has {batches}"
        )


def _pack(losses: list[float]) -> dict[str, str]:
    """Write many numbers in little room: losses usually are floats of 32 bits."""
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
