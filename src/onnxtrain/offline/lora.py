"""`Lora`: which layers get low-rank factors to train, and of which form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from onnxtrain.errors import ArgumentError

ALL_LINEAR = "all-linear"
Scaling = Literal["standard", "rslora"]


@dataclass(frozen=True)
class Lora:
    """Low-rank adaptation: each chosen layer y = layer(x) becomes y + scale · (x·A)·B.

    A and B train, and the layer itself stays as it is, quantized or not. The defaults are those of
    PEFT: A begins with uniform random numbers (Kaiming), and B with zeros.

    Attributes:
        rank: the columns of A, and the rows of B.
        alpha: the strength: scale is alpha / rank, so 1 where it equals the rank.
        dropout: the part of x that is left out before A while training.
        layers: patterns over the paths of layers (`"*.q_proj"`), or "all-linear" for every layer
            but the output head.
        scaling: "standard", or "rslora" for alpha / √rank, which suits high ranks.
        seed: of the random numbers that A begins with.

    Examples:
        >>> onnxtrain.prepare("mobilenet.onnx", train=onnxtrain.Lora(rank=4, layers="fc*"))

    """

    rank: int = 8
    alpha: float = 8.0
    dropout: float = 0.0
    layers: str | Sequence[str] = ALL_LINEAR
    scaling: Scaling = "standard"
    seed: int = 0

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise ArgumentError(f"the rank of lora is a whole number from 1 on, not {self.rank!r}")
        if not _is_number(self.alpha) or not 0 < self.alpha < math.inf:
            raise ArgumentError(f"alpha of lora is a number above 0, not {self.alpha!r}")
        if not _is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise ArgumentError(
                f"dropout of lora is a number from 0 to below 1, not {self.dropout!r}"
            )
        if self.scaling not in ("standard", "rslora"):
            raise ArgumentError(f"scaling of lora is 'standard' or 'rslora', not {self.scaling!r}")
        if type(self.seed) is not int or self.seed < 0:
            raise ArgumentError(f"the seed of lora is a whole number from 0 on, not {self.seed!r}")
        if not self.patterns or not all(isinstance(p, str) and p for p in self.patterns):
            raise ArgumentError(f"layers of lora is a pattern or a list, not {self.layers!r}")

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of `layers`; in text, `|` is between them."""
        given = self.layers
        return tuple(given.split("|")) if isinstance(given, str) else tuple(given)

    @property
    def scale(self) -> float:
        """What the product of the factors is multiplied by."""
        divisor = self.rank if self.scaling == "standard" else math.sqrt(self.rank)
        return self.alpha / divisor


def _is_number(value: object) -> bool:
    return type(value) in (int, float)
