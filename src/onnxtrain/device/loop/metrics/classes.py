"""Metrics of predicted classes: accuracy and top-k."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from onnxtrain.device.checks import at_least, finite
from onnxtrain.device.loop.metrics.metric import MeanMetric, Metric
from onnxtrain.device.loop.metrics.reading import Predictions, predict, rows_of_scores
from onnxtrain.errors import ArgumentError


class ClassMetric(Metric):
    """A metric of predicted classes.

    Outputs are scores of classes of shape (N, C), (N, C, ...), or with `class_axis=-1` (..., C);
    labels have that shape without the axis of the classes. Outputs of shape (N,) or (N, 1) are
    scores of the one class 1 against 0, predicted where they are above `threshold`: 0 for logits,
    0.5 for probabilities. With `binary=True` each element of outputs of any shape is such a score.
    Labels that equal `ignore_index` do not count.
    """

    def __init__(
        self,
        class_axis: int = 1,
        ignore_index: int | None = None,
        threshold: float = 0.0,
        binary: bool = False,
        output: str | None = None,
        labels: str | None = None,
    ) -> None:
        self.class_axis = class_axis
        self.ignore_index = ignore_index
        self.threshold = finite("threshold", threshold)
        self.binary = binary
        super().__init__(output, labels)

    def read(self, outputs: npt.ArrayLike, labels: npt.ArrayLike) -> Predictions:
        """Return the predicted and the true classes of a batch."""
        return predict(
            outputs, labels, self.class_axis, self.ignore_index, self.threshold, self.binary
        )


class Accuracy(ClassMetric, MeanMetric):
    """The fraction of elements whose class is predicted rightly; arguments as of `ClassMetric`."""

    name = "accuracy"
    better = "max"

    def update(self, outputs: npt.ArrayLike, labels: npt.ArrayLike) -> None:
        """Count the right predictions of a batch."""
        predicted, true, _ = self.read(outputs, labels)
        self._sum += int(np.count_nonzero(predicted == true))
        self._count += true.size


class TopK(MeanMetric):
    """The fraction of elements whose class is among the `k` with the highest scores.

    Shapes are those of `ClassMetric`. Of equal scores the first counts as the higher, so that
    `TopK(1)` is `Accuracy()`.
    """

    better = "max"

    def __init__(
        self,
        k: int = 5,
        class_axis: int = 1,
        ignore_index: int | None = None,
        output: str | None = None,
        labels: str | None = None,
    ) -> None:
        self.k = at_least(1, "k", k)
        self.name = f"top{self.k}"
        self.class_axis = class_axis
        self.ignore_index = ignore_index
        super().__init__(output, labels)

    def update(self, outputs: npt.ArrayLike, labels: npt.ArrayLike) -> None:
        """Count the elements of a batch whose class is among the first."""
        scores, true = rows_of_scores(outputs, labels, self.class_axis, self.ignore_index)
        classes = scores.shape[1]
        if classes < self.k:
            raise ArgumentError(
                f"{self.name} needs at least {self.k} classes; the outputs have {classes}"
            )
        own = np.take_along_axis(scores, true[:, None], axis=1)
        earlier = np.arange(classes) < true[:, None]
        ahead = np.count_nonzero((scores > own) | ((scores == own) & earlier), axis=1)
        self._sum += int(np.count_nonzero(ahead < self.k))
        self._count += true.size
