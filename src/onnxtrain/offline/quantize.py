"""`Quantize`: which parts of a model train as the integers that they will be deployed as."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from onnxtrain.errors import ArgumentError, ArgumentTypeError
from onnxtrain.offline.named import make_named

Integers = Literal["int8", "int4"]
Activations = Literal["uint8", "int8", "float"]
Scales = Literal["average", "learned", "fixed"]
Method = Literal["minmax", "percentile", "entropy", "mse"]
_CHOICES = {
    "weights": ("int8", "int4"),
    "activations": ("uint8", "int8", "float"),
    "scales": ("average", "learned", "fixed"),
    "method": ("minmax", "percentile", "entropy", "mse"),
}


@dataclass(frozen=True)
class Quantize:
    """Quantization-aware training: the forward pass rounds as the deployed integer model will.

    Weights stay floats that train, and are rounded to integers in each step; the exported model has
    the integers alone. Weights have a scale for each output channel (`int8`) or for each block of
    inputs of an output (`int4` in matrix products). Activations have one scale and zero point each,
    which calibration data give.

    Attributes:
        weights: the integers that weights become.
        activations: the integers that activations become; "float" for integers in weights alone,
            which make the file small, and not the products fast.
        scales: how scales follow training: "average" (those of activations by a moving average of
            the ranges that training sees, those of weights by their largest element), "learned"
            (trained by gradients, as learned step sizes), or "fixed" by calibration.
        method: how calibration chooses a range: all that was seen ("minmax"), all but the outermost
            ("percentile"), or what loses least ("entropy", "mse").
        percentile: the part that the method of this name keeps, in per cent.
        momentum: how fast moving averages follow.
        exclude: patterns over the names of layers (nodes or weights) that stay floats.
        first: whether layers that read the inputs of the model become integers too.
        last: whether layers that make its outputs do.
        block: how many inputs of an output share a scale in `int4`: 16, 32, 64, 128 or 256.
        reduce_range: use 7 bits for weights: x86 processors without VNNI instructions add pairs of
            products in 16 bits, which may saturate.

    Examples:
        >>> few = [images]
        >>> onnxtrain.prepare("mobilenet.onnx", quantize="int8", calibration=few)

    """

    weights: Integers = "int8"
    activations: Activations = "uint8"
    scales: Scales = "average"
    method: Method = "minmax"
    percentile: float = 99.99
    momentum: float = 0.01
    exclude: str | Sequence[str] = ()
    first: bool = True
    last: bool = True
    block: int = 32
    reduce_range: bool = False

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ArgumentError(
                    f"{name} of Quantize is {', '.join(map(repr, choices[:-1]))} or "
                    f"{choices[-1]!r}, not {getattr(self, name)!r}"
                )
        if self.weights == "int4" and self.activations != "float":
            raise ArgumentError(
                "onnxruntime multiplies int4 weights by floats: give activations='float' too, or "
                "quantize='int4-weights'"
            )
        if not _is_number(self.percentile) or not 50 < self.percentile <= 100:
            raise ArgumentError(f"percentile is above 50 and up to 100, not {self.percentile!r}")
        if not _is_number(self.momentum) or not 0 < self.momentum <= 1:
            raise ArgumentError(f"momentum is above 0 and up to 1, not {self.momentum!r}")
        if self.block not in (16, 32, 64, 128, 256):
            raise ArgumentError(f"block is 16, 32, 64, 128 or 256, not {self.block!r}")
        if not isinstance(self.exclude, str | Sequence) or not all(
            isinstance(p, str) and p for p in self.excluded
        ):
            raise ArgumentError(f"exclude is a pattern or a list, not {self.exclude!r}")
        for name in ("first", "last", "reduce_range"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(f"{name} is True or False, not {getattr(self, name)!r}")

    @property
    def excluded(self) -> tuple[str, ...]:
        """The patterns of `exclude`; in text, `|` is between them."""
        given = self.exclude
        return tuple(p for p in given.split("|") if p) if isinstance(given, str) else tuple(given)

    @property
    def has_integer_activations(self) -> bool:
        """Whether products of integers run as such."""
        return self.activations != "float"

    @property
    def largest(self) -> int:
        """The largest integer of a weight."""
        return 7 if self.weights == "int4" else 63 if self.reduce_range else 127


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


_WORDS: dict[str, Callable[..., Quantize]] = {
    "int8": Quantize,
    "int4_weights": partial(Quantize, weights="int4", activations="float", scales="learned"),
}


def as_quantize(given: str | Quantize | None) -> Quantize | None:
    """Return settings for "int8", "int4-weights" (with options: "int8:method=mse"), or as given."""
    if given is None or isinstance(given, Quantize):
        return given
    if not isinstance(given, str):
        raise ArgumentTypeError(
            f"quantize is 'int8', 'int4-weights' or an onnxtrain.Quantize, not {given!r}"
        )
    made: Quantize = make_named(given, _WORDS, "quantize")
    return made
