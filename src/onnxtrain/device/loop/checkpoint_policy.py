"""When a run is saved, and copies of the best parameters."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from onnxtrain.device.checks import at_least
from onnxtrain.errors import ArgumentError, CheckpointError
from onnxtrain.format.checkpoint.file import read_checkpoint

if TYPE_CHECKING:
    from onnxtrain.device.session import TrainingSession


class SaveCheckpoint:
    """Save the run, so that `fit(resume=True)` can continue it; a callback of `fit`.

    Args:
        path: the file.
        every: "epoch"; a number of steps; "best" to save each epoch, and the best one in a file of
            its own (the name and `.best`); or several of them in a tuple.

    """

    def __init__(
        self, path: str | os.PathLike[str], every: int | str | tuple[int | str, ...] = "epoch"
    ) -> None:
        self.path = Path(path)
        self.best_path = self.path.with_name(f"{self.path.name}.best")
        wanted = every if isinstance(every, tuple | list) else (every,)
        numbers = [item for item in wanted if item not in ("epoch", "best")]
        if any(isinstance(item, str) for item in numbers):
            raise ArgumentError(
                f"SaveCheckpoint: every must be a number of steps, 'epoch' or 'best', not {every!r}"
            )
        self.steps = min((at_least(1, "every", item) for item in numbers), default=0)
        self.best = "best" in wanted
        # Unless a number of steps decides, each epoch is saved.
        self.epochs = "epoch" in wanted or not numbers
        if not self.path.parent.is_dir():
            raise ArgumentError(f"SaveCheckpoint: there is no folder {str(self.path.parent)!r}")

    def is_due(self, step: int) -> bool:
        """Whether to save after a step of the run."""
        return bool(self.steps) and step % self.steps == 0


class Snapshot:
    """A copy of the parameters and running statistics that training changes."""

    def __init__(self) -> None:
        self._values: dict[str, npt.NDArray[Any]] = {}

    def take(self, session: TrainingSession) -> None:
        """Copy the present values."""
        for name, parameter in session.state.parameters:
            data = parameter.data
            if parameter.requires_grad or data.flags.writeable:
                if name in self._values:
                    np.copyto(self._values[name], data)
                else:
                    self._values[name] = np.array(data)

    def read(self, path: Path, session: TrainingSession) -> None:
        """Copy the values of a checkpoint."""
        content = read_checkpoint(path)
        self.take(session)
        saved = {**content.trainable, **content.frozen}
        for name, held in self._values.items():
            value = saved.get(name)
            if not isinstance(value, np.ndarray) or value.shape != held.shape:
                raise CheckpointError(f"{path} is not a checkpoint of this model: {name!r}")
            np.copyto(held, value)

    def restore(self, session: TrainingSession) -> bool:
        """Set the parameters to the copy; return whether there is one."""
        for name, value in self._values.items():
            session.state.parameters[name].data = value
        return bool(self._values)
