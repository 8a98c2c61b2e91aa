"""The batches of training and evaluation; a model may have been exported for one size alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from onnxtrain.cli.console import Console
from onnxtrain.cli.reading import Array
from onnxtrain.errors import ArgumentError, InputError

if TYPE_CHECKING:
    from onnxtrain.device.session import TrainingSession

_DEFAULT = 32  # samples of an update


@dataclass(frozen=True)
class Batches:
    """How many samples run at once, how many batches make an update, and whether the model says."""

    size: int
    accumulate: int
    is_fixed: bool

    @classmethod
    def of(cls, session: TrainingSession, size: int | None, accumulate: int | None) -> Batches:
        """Return the batches that were asked for; a fixed batch of the model is accumulated."""
        dims = session.module.training_executor.signature.inputs[0].dims
        fixed = dims[0] if dims else None
        if not isinstance(fixed, int):
            return cls(size or _DEFAULT, accumulate or 1, False)
        if size not in (None, fixed):
            raise ArgumentError(
                f"the model was exported for batches of {fixed}: leave out --batch-size, or pass "
                f"--batch-size {fixed} --accumulate {max(1, (size or 1) // fixed)}, or "
                "prepare it with --dynamic-batch"
            )
        return cls(fixed, accumulate or max(1, _DEFAULT // fixed), True)

    def note(self, console: Console) -> None:
        """Say what a fixed batch means for training."""
        if self.is_fixed:
            console.note(
                f"note: the model was exported for batches of {self.size}: trains with "
                f"--batch-size {self.size} --accumulate {self.accumulate}"
            )

    def whole(self, arrays: dict[str, Array], console: Console) -> dict[str, Array]:
        """Leave out the samples that do not fill a fixed batch."""
        count = len(next(iter(arrays.values())))
        rest = count % self.size if self.is_fixed else 0
        if rest == count:
            raise InputError(f"there are {count} samples, and the model takes {self.size} at once")
        if rest:
            console.note(f"note: the last {rest} samples do not fill a batch and are left out")
        return {name: array[: count - rest] for name, array in arrays.items()}
