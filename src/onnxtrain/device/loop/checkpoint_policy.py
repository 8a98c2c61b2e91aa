"""Checkpoints of a run: when, where, and never of numbers that are not finite."""

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


class Rule:
    """When to save: each so many steps, each epoch, and whether to keep the best apart."""

    def __init__(self, checkpoint: str | os.PathLike[str] | None, every: Any) -> None:
        self.path = None if checkpoint is None else Path(checkpoint)
        if self.path is None and every is not None:
            raise ArgumentError("checkpoint_every needs checkpoint=, the file to write")
        wanted = every if isinstance(every, tuple | list) else [every]
        self.steps = 0
        self.best = False
        # Unless it is the steps that decide, each epoch is saved.
        self.epochs = all(item in (None, "best") for item in wanted)
        for item in wanted:
            if item == "epoch":
                self.epochs = True
            elif item == "best":
                self.best = True
            elif item is not None:
                self.steps = _steps(item)
        if self.path is not None and not self.path.parent.is_dir():
            raise ArgumentError(f"checkpoint: there is no folder {str(self.path.parent)!r}")

    @property
    def best_path(self) -> Path | None:
        """The file of the best epoch."""
        return None if self.path is None else self.path.with_name(f"{self.path.name}.best")


def _steps(every: Any) -> int:
    if isinstance(every, str):
        raise ArgumentError(
            f"checkpoint_every must be a number of steps, 'epoch' or 'best', not {every!r}"
        )
    return at_least(1, "checkpoint_every", every)


class Snapshot:
    """A copy of what training changes in the parameters."""

    def __init__(self) -> None:
        self._values: dict[str, npt.NDArray[Any]] = {}

    def take(self, session: TrainingSession) -> None:
        """Copy parameters and running statistics as they are now."""
        for name, parameter in session.state.parameters:
            data = parameter.data
            if parameter.requires_grad or data.flags.writeable:
                if name in self._values:
                    np.copyto(self._values[name], data)
                else:
                    self._values[name] = np.array(data)

    def read(self, path: Path, session: TrainingSession) -> None:
        """Take them from the file of an earlier run."""
        content = read_checkpoint(path)
        self.take(session)
        saved = {**content.trainable, **content.frozen}
        for name, held in self._values.items():
            value = saved.get(name)
            if not isinstance(value, np.ndarray) or value.shape != held.shape:
                raise CheckpointError(f"{path} is not a checkpoint of this model: {name!r}")
            np.copyto(held, value)

    def restore(self, session: TrainingSession) -> bool:
        """Set the parameters to the copy; say whether there is one."""
        for name, value in self._values.items():
            session.state.parameters[name].data = value
        return bool(self._values)
