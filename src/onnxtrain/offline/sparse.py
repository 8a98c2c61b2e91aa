"""`Sparse`: training of the channels that gain most, within a given memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from onnxtrain.errors import ArgumentError
from onnxtrain.offline.passes.remat.budget import parse_budget


@dataclass(frozen=True)
class Sparse:
    """Sparse updates: chosen channels of chosen layers train, and everything else is frozen.

    A channel is an output of a Conv, Gemm or MatMul, with all weights that lead to it. Channels are
    chosen by their gain for each byte that they need: for gradients, the states of the optimizer,
    and the activations that the backward pass reads. The gain is the sum of the squares of the
    gradients, over a few batches.

    Attributes:
        memory: what training may take for that, as a size ("200MB", or bytes).
        data: a few batches to measure the gain on, each a tuple or a dictionary of the inputs of
            the model and the labels, of the size that training will have. Without data, the size of
            the weights stands for the gain, which is worse.
        batches: how many batches are used at most.

    Examples:
        >>> few = [(images, [0, 1, 1, 0])]
        >>> onnxtrain.prepare("mobilenet.onnx", train=onnxtrain.Sparse("200MB", data=few))

    """

    memory: str | int
    data: Iterable[Any] | None = field(default=None, repr=False)
    batches: int = 8

    def __post_init__(self) -> None:
        if not isinstance(self.size, int):
            raise ArgumentError(
                f"the memory of sparse is a size such as 200MB, not {self.memory!r}"
            )
        if type(self.batches) is not int or self.batches < 1:
            raise ArgumentError(
                f"batches of sparse is a whole number from 1 on, not {self.batches!r}"
            )

    @property
    def size(self) -> int | float:
        """The memory in bytes."""
        return parse_budget(self.memory, "the memory of sparse")
