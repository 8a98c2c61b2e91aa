"""What a client accepts from a server."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from flwr.app import ArrayRecord

from onnxtrain.device.loop import Run
from onnxtrain.errors import ArgumentError
from onnxtrain.federated.rounds import BATCH, EPOCHS, RATE, Round

_SPARE_BYTES = 1 << 20


@dataclass(frozen=True)
class RoundLimits:
    """The most that a server may ask of a client in a round; nothing that it sends raises them.

    A request beyond a limit is refused, and the server is told which. The owner of a device may
    lower each in the node's configuration, with the name after "max-", such as
    `max-local-epochs`.

    Args:
        local_epochs: passes over the data.
        batch_size: samples in a batch.
        steps: steps of the optimizer. A round that takes more ends with an error.
        seconds: the time of training, after which the round ends with an error.
        learning_rate: the learning rate.
        message_bytes: the arrays of a message, and the initial values in it; by default four times
            the parameters of the model, which is enough for float64.

    """

    local_epochs: int = 1000
    batch_size: int = 65_536
    steps: int = 10_000_000
    seconds: float = 6 * 3600
    learning_rate: float = 1e6
    message_bytes: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or math.isnan(value) or value <= 0:
                raise ArgumentError(f"the limit {field.name} is a number above 0, not {value!r}")

    def on_node(self, config: Mapping[str, Any]) -> RoundLimits:
        """Return the limits with what the node's configuration lowers."""
        lowered = {}
        for field in fields(self):
            given = config.get(f"max-{field.name.replace('_', '-')}")
            if given is not None:
                own = RoundLimits(**{field.name: given})  # which checks it
                most = getattr(self, field.name)
                lowered[field.name] = getattr(own, field.name) if most is None else min(given, most)
        return replace(self, **lowered)

    def check(self, settings: Round, at: Callable[[str], None]) -> None:
        """Raise an error for settings beyond the limits."""
        asked: tuple[tuple[str, float, float], ...] = (
            (EPOCHS, settings.epochs, self.local_epochs),
            (BATCH, settings.batch_size, self.batch_size),
            (RATE, settings.learning_rate or 0.0, self.learning_rate),
        )
        for key, value, most in asked:
            if value > most:
                at(f"setting {key}")
                raise ArgumentError(
                    f"the server asks for {key} = {value}; this client takes {most}"
                )

    def check_size(self, arrays: ArrayRecord | bytes, model: int) -> None:
        """Raise an error for a message that is too large for a model of so many bytes."""
        most = 4 * model + _SPARE_BYTES if self.message_bytes is None else self.message_bytes
        parts = [arrays] if isinstance(arrays, bytes) else [a.data for a in arrays.values()]
        size = sum(map(len, parts))
        if size > most:
            raise ArgumentError(f"the message has {size:,} bytes; this client takes {most:,}")


class Deadline:
    """A callback of `fit` that ends a round which takes too long."""

    def __init__(self, limits: RoundLimits) -> None:
        self._limits, self._end = limits, time.monotonic() + limits.seconds

    def on_step_end(self, run: Run) -> None:
        """Raise an error once a limit is exceeded."""
        if run.step > self._limits.steps:
            raise ArgumentError(f"the round takes more than {self._limits.steps} steps")
        if time.monotonic() > self._end:
            raise ArgumentError(f"the round takes more than {self._limits.seconds} seconds")
