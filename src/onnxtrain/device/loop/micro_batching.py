"""Gradient accumulation: several batches, or parts of one, to an update."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from onnxtrain.device.parameters import Parameter
from onnxtrain.format.checkpoint.content import Array

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
        self.batches = self.samples = 0
        self._loss_sum = 0.0

    def begin(self, samples: int) -> None:
        """Prepare to add the gradients of so many samples."""
        self._before: tuple[int, dict[Parameter, Array]] = self._unit, {}
        if self._average and self.samples and samples != self._unit:
            self._before[1].update((p, gradient.copy()) for p, gradient in self._gradients())
            self._scale(self._unit / samples)
        self._unit = samples

    def count(self, loss: float | None, samples: int) -> None:
        """Count the samples that were added; without a loss, they were skipped."""
        if loss is None:
            self._unit, gradients = self._before
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
            return
        self.samples += samples
        self._loss_sum += loss * samples

    def update(self) -> tuple[float, int, int]:
        """Update the parameters; return the mean loss and the numbers of batches and samples."""
        if self._average and self._unit != self.samples:
            self._scale(self._unit / self.samples)
        self._session.optimizer_step()
        result = self._loss_sum / self.samples, self.batches, self.samples
        self.start()
        return result

    def _scale(self, factor: float) -> None:
        for parameter, gradient in self._gradients():
            gradient *= gradient.dtype.type(factor)
            parameter.grad = gradient

    def _gradients(self) -> Iterator[tuple[Parameter, Array]]:
        for _, parameter in self._session.state.parameters:
            gradient = parameter.grad
            if gradient is not None:
                yield parameter, gradient
