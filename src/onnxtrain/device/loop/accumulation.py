"""Updates from the gradients of several batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onnxtrain.device.loop.batches import Batch

if TYPE_CHECKING:
    from onnxtrain.device.session import TrainingSession


class Accumulation:
    """Adds up the gradients of `size` batches, and updates the parameters with their mean.

    The mean is over samples: an update is what it would be with one large batch, if the loss is a
    mean over samples. With `average=False` it is the sum of the gradients of the batches, which is
    what calling `train_step` several times before `optimizer_step` does.
    """

    def __init__(self, session: TrainingSession, size: int, average: bool) -> None:
        self._session = session
        self.size = size
        self._average = average
        # The sum of the gradients, each times its samples, is what is accumulated times this.
        self._unit = 0
        self.start()

    def start(self) -> None:
        """Forget what was accumulated."""
        self._session.lazy_reset_grad()
        self.batches = 0
        self._samples = 0
        self._loss_sum = 0.0

    def add(self, batch: Batch) -> Any:
        """Add the gradients of a batch; return what the training step returned."""
        if self._average and self.batches and batch.samples != self._unit:
            self._scale(self._unit / batch.samples)
        self._unit = batch.samples
        return self._session.train_step(*batch.values)

    def count(self, loss: float, samples: int) -> None:
        """Count the batch that was added."""
        self.batches += 1
        self._samples += samples
        self._loss_sum += loss * samples

    def update(self) -> tuple[float, int, int]:
        """Update the parameters; return the mean loss, and how many batches and samples it was."""
        if self._average and self._unit != self._samples:
            self._scale(self._unit / self._samples)
        self._session.optimizer_step()
        result = self._loss_sum / self._samples, self.batches, self._samples
        self.start()
        return result

    def _scale(self, factor: float) -> None:
        for _, parameter in self._session.state.parameters:
            gradient = parameter.grad if parameter.requires_grad else None
            if gradient is not None:
                gradient *= gradient.dtype.type(factor)
                parameter.grad = gradient
