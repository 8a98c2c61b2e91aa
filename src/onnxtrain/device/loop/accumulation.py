"""Updates from the gradients of several batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onnxtrain.device.loop.batches import Batch

if TYPE_CHECKING:
    from onnxtrain.device.session import TrainingSession


class Accumulation:
    """Adds up gradients, and updates the parameters with their mean after `size` batches.

    The mean is over samples: an update is that of one large batch, if the loss is a mean over
    samples. With `average=False` it is the sum of the gradients of the batches, as repeated calls
    of `train_step` before `optimizer_step` add them up.
    """

    def __init__(self, session: TrainingSession, size: int, average: bool) -> None:
        self._session = session
        self.size = size
        self._average = average
        # The accumulated gradients times this are the sum of gradients, each times its samples.
        self._unit = 0
        self.start()

    def start(self) -> None:
        """Discard the accumulated gradients."""
        self._session.lazy_reset_grad()
        self.batches = 0
        self._samples = 0
        self._loss_sum = 0.0

    def add(self, batch: Batch) -> Any:
        """Add the gradients of a batch, or of a part of one; return the results of the step."""
        if self._average and self._samples and batch.samples != self._unit:
            self._scale(self._unit / batch.samples)
        self._unit = batch.samples
        return self._session.train_step(*batch.values)

    def count(self, loss: float, samples: int) -> None:
        """Count the samples that were added."""
        self._samples += samples
        self._loss_sum += loss * samples

    def update(self) -> tuple[float, int, int]:
        """Update the parameters; return the mean loss and the numbers of batches and samples."""
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
