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
            "number": _checked(int, ROUND, find(ROUND)),
            "federation": find(FEDERATION),
            "is_last": bool(find(LAST) or False),
            "learning_rate": _checked(float, RATE, find(RATE, SHORT_RATE)),
            "epochs": _checked(int, EPOCHS, find(EPOCHS), above=True),
            "batch_size": _checked(int, BATCH, find(BATCH), above=True),
            "seed": _checked(int, SEED, find(SEED)),
            "mu": _checked(float, MU, find(MU)),
            "clip_norm": _checked(float, CLIP, find(CLIP), above=True),
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


def _checked(kind: type[int | float], key: str, value: Any, above: bool = False) -> Any:
    """Return a number of at least 0, or `above` 0; None for None."""
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_valid = is_number and math.isfinite(value) and kind(value) == value
    if not is_valid or value < 0 or (above and value == 0):
        wanted = (
            f"{'an integer' if kind is int else 'a number'} {'above' if above else 'of at least'}"
        )
        raise ArgumentError(f"the round's {key!r} is {value!r}, not {wanted} 0")
    return kind(value)
