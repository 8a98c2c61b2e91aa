"""The settings of a round, which the server sends with each message."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxtrain.errors import ArgumentError

# Keys of the configuration in each message.
ROUND, LAST = "server-round", "last-round"
RATE, SHORT_RATE = "learning-rate", "lr"
EPOCHS, BATCH, SEED, MU = "local-epochs", "batch-size", "seed", "proximal-mu"
CLIP, COMPRESSION = "clip-norm", "compression"
VERSION, INITIAL = "onnxtrain-artifacts", "onnxtrain-initial"
FEDERATION = "onnxtrain-federation"
FLOWER_CLIP = "clipping_norm"  # set by Flower's strategies for its clipping mods
# Settings that a server passes on from the run's configuration.
PASSED_ON = (RATE, SHORT_RATE, EPOCHS, BATCH, SEED, CLIP, COMPRESSION)


@dataclass(frozen=True)
class Round:
    """The settings of a round on a client.

    `learning_rate` is None for the default of the artifacts. `bounded` says that the update is
    clipped, here or by one of Flower's mods, and must stay within its bound.
    """

    number: int = 0
    federation: str = ""
    is_last: bool = False
    learning_rate: float | None = None
    epochs: int = 1
    batch_size: int = 32
    seed: int | None = None
    mu: float = 0.0
    clip_norm: float | None = None
    bounded: bool = False
    compression: str = ""

    @classmethod
    def read(cls, *sources: Mapping[str, Any]) -> Round:
        """Take each setting from the first source that has it."""

        def find(*keys: str) -> Any:
            return next((s[k] for s in sources for k in keys if s.get(k) is not None), None)

        made = {
            "number": _whole(ROUND, find(ROUND), 0),
            "federation": find(FEDERATION),
            "is_last": bool(find(LAST) or False),
            "learning_rate": _positive(RATE, find(RATE, SHORT_RATE), zero=True),
            "epochs": _whole(EPOCHS, find(EPOCHS), 1),
            "batch_size": _whole(BATCH, find(BATCH), 1),
            "seed": _whole(SEED, find(SEED), 0),
            "mu": _positive(MU, find(MU), zero=True),
            "clip_norm": _positive(CLIP, find(CLIP)),
            "bounded": find(CLIP, FLOWER_CLIP) is not None,
            "compression": find(COMPRESSION),
        }
        return cls(**{key: value for key, value in made.items() if value is not None})

    @property
    def identity(self) -> str:
        """The identity of the round, federation/number; a repeated round has the same."""
        return f"{self.federation}/{self.number}"

    def seed_of(self, client: int) -> int | None:
        """Return the seed of a client in this round; None without a seed."""
        if self.seed is None:
            return None
        mixed = np.random.SeedSequence([self.seed, self.number, client])
        return int(mixed.generate_state(1, np.uint64)[0]) >> 1


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(key: str, value: Any, least: int) -> int | None:
    if value is None:
        return None
    if not _is_number(value) or int(value) != value or value < least:
        raise ArgumentError(f"the round's {key!r} is {value!r}, not an integer of at least {least}")
    return int(value)


def _positive(key: str, value: Any, zero: bool = False) -> float | None:
    if value is None:
        return None
    if not _is_number(value) or value < 0 or (value == 0 and not zero):
        raise ArgumentError(
            f"the round's {key!r} is {value!r}, not a number {'of at least' if zero else 'above'} 0"
        )
    return float(value)
