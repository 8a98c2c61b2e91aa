"""The settings of a round, which the server sends with each message."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
FEDERATION, TOKEN = "onnxtrain-federation", "onnxtrain-reply"
FLOWER_CLIP = "clipping_norm"  # set by Flower's strategies for its clipping mods
# Settings that a server passes on from the run's configuration.
PASSED_ON = (RATE, SHORT_RATE, EPOCHS, BATCH, SEED, CLIP, COMPRESSION)
SETTINGS = (ROUND, FEDERATION, LAST, RATE, EPOCHS, BATCH, SEED, MU, CLIP, COMPRESSION, TOKEN)
_LONGEST_TEXT = 100


@dataclass(frozen=True)
class Round:
    """The settings of a round on a client.

    `learning_rate` is None for the default of the artifacts. `bounded` says that the update is
    clipped, here or by one of Flower's mods, and must stay within its bound. `token` is repeated
    in the reply, which tells the server what it is a reply to.
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
    token: str = ""

    @classmethod
    def read(
        cls, *sources: Mapping[str, Any], at: Callable[[str], None] = lambda place: None
    ) -> Round:
        """Take each setting from the first source that has it; `at` is told what is read."""

        def find(*keys: str) -> Any:
            return next((s[k] for s in sources for k in keys if s.get(k) is not None), None)

        def read(check: Callable[[str, Any], Any], *keys: str) -> Any:
            at(f"setting {keys[0]}")
            value = find(*keys)
            return None if value is None else check(keys[0], value)

        made = {
            "number": read(_count, ROUND),
            "federation": read(_text, FEDERATION),
            "is_last": bool(find(LAST) or False),
            "learning_rate": read(_number, RATE, SHORT_RATE),
            "epochs": read(_above, EPOCHS),
            "batch_size": read(_above, BATCH),
            "seed": read(_count, SEED),
            "mu": read(_number, MU),
            "clip_norm": read(_positive, CLIP),
            "bounded": find(CLIP, FLOWER_CLIP) is not None,
            "compression": read(_text, COMPRESSION),
            "token": read(_text, TOKEN),
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


def _count(key: str, value: Any) -> int:
    return int(_checked(key, value, "an integer of at least 0", is_whole=True))


def _above(key: str, value: Any) -> int:
    return int(_checked(key, value, "an integer above 0", is_whole=True, above=True))


def _number(key: str, value: Any) -> float:
    return float(_checked(key, value, "a number of at least 0"))


def _positive(key: str, value: Any) -> float:
    return float(_checked(key, value, "a number above 0", above=True))


def _checked(
    key: str, value: Any, wanted: str, *, is_whole: bool = False, above: bool = False
) -> int | float:
    """Return a number of at least 0, or `above` 0, of 64 bits."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        is_valid = value < 2**63 if isinstance(value, int) else math.isfinite(value)
        is_valid = is_valid and value >= 0 and not (above and value == 0)
        if is_valid and (not is_whole or value == int(value)):
            return value
    raise ArgumentError(f"the round's {key!r} is {_shown(value)}, not {wanted}")


def _text(key: str, value: Any) -> str:
    if isinstance(value, str) and len(value) <= _LONGEST_TEXT:
        return value
    raise ArgumentError(f"the round's {key!r} is {_shown(value)}, not a text of a few words")


def _shown(value: Any) -> str:
    is_long = isinstance(value, int) and value.bit_length() > 1000  # which Python does not print
    return "a number that is too large" if is_long else repr(value)[:_LONGEST_TEXT]
