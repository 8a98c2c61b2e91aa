"""Evaluation: the mean loss and metrics over data, without training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxtrain.device.checks import at_least
from onnxtrain.device.loop.batches import Batch, Source, as_array, loss_of, make_source
from onnxtrain.device.loop.metrics import ClassMetric, Metric, MetricLike, make_metrics
from onnxtrain.device.loop.nan_guard import bad_data
from onnxtrain.device.loop.weights import ClassWeight, with_weights, without_weights
from onnxtrain.errors import ArgumentError, NonFiniteError, OnnxTrainError

if TYPE_CHECKING:
    from onnxtrain.device.session import TrainingSession


def evaluate(
    session: TrainingSession,
    data: Any,
    metrics: MetricLike | Iterable[MetricLike] | Mapping[str, MetricLike] = (),
    *,
    batch_size: int = 32,
    class_weight: ClassWeight = None,
    sample_weight: Any = None,
) -> dict[str, Any]:
    """Return the mean loss (`eval_loss`) and metrics over data, by name.

    The arguments are as for `fit`. The loss is the mean over samples, if that of a batch is.
    Metrics have no weights.
    """
    batch_size = at_least(1, "batch_size", batch_size)
    return Evaluation(
        session, data, make_metrics(metrics), batch_size, "data", class_weight, sample_weight
    ).run(0)


class Evaluation:
    """Evaluation, again and again, over the same data; the arguments are checked once."""

    def __init__(
        self,
        session: TrainingSession,
        data: Any,
        metrics: Mapping[str, Metric],
        batch_size: int,
        what: str,
        class_weight: ClassWeight = None,
        sample_weight: Any = None,
    ) -> None:
        inputs = session.input_types(training=False)
        names = [value.name for value in inputs]
        if not inputs:
            raise ArgumentError(
                "the session has no evaluation model: make it with eval_model, "
                "or with TrainingSession.from_folder if the folder has eval_model.onnx"
            )
        self._session = session
        self._names = names
        data, complete = with_weights(data, inputs, class_weight, sample_weight)
        self.source: Source = make_source(
            data, inputs, batch_size=batch_size, what=what, complete=complete
        )
        self._metrics = metrics
        outputs = session.output_names(training=False)
        labels = [value.name for value in without_weights(inputs)]
        layout = session.metadata.labels
        for metric in metrics.values():
            if layout and isinstance(metric, ClassMetric):
                metric.follow(layout)
        self._places = {name: _places(name, m, outputs, labels) for name, m in metrics.items()}

    def run(self, epoch: int) -> dict[str, Any]:
        """Return the loss and the metrics by name."""
        for metric in self._metrics.values():
            metric.reset()
        total, samples = 0.0, 0
        for number, batch in enumerate(self.source.epoch(epoch)):
            total += self._measure(batch, f"evaluation, batch {number + 1}") * batch.samples
            samples += batch.samples
        measured = {name: to_plain(name, metric.value()) for name, metric in self._metrics.items()}
        return {"eval_loss": total / samples, **measured}

    def _measure(self, batch: Batch, where: str) -> float:
        """Update all metrics with a batch; return its loss."""
        results = self._session.eval_step(*batch.values)
        outputs = results if isinstance(results, tuple) else (results,)
        loss = loss_of(outputs)
        if not math.isfinite(loss):
            cause = bad_data(self._names, batch)
            why = f"because {cause}"
            if not cause:
                why = (
                    "and the data of the batch are finite: look for labels that are no class, or "
                    "for parameters that grew too large"
                )
            raise NonFiniteError(f"{where}: the loss is {loss}, {why}", in_data=bool(cause))
        for name, metric in self._metrics.items():
            output, labels = self._places[name]
            try:
                metric.update(as_array(outputs[output]), as_array(batch.values[labels]))
            except OnnxTrainError as error:
                error.add_note(f"in {where}, metric {name!r}")
                raise
        return loss


def _places(
    name: str, metric: Metric, outputs: Sequence[str], inputs: Sequence[str]
) -> tuple[int, int]:
    """Return the indices of the output that a metric reads and of the input with its labels."""
    beside = outputs[1:]
    if not beside:
        raise ArgumentError(
            f"the metric {name!r} needs an output of the model, and the evaluation model has the "
            "loss alone: generate the artifacts with additional_output_names=['...']"
        )
    if metric.output is None and len(beside) > 1:
        raise ArgumentError(
            f"the metric {name!r} must say which output it reads: the evaluation model has "
            f"{', '.join(beside)}; pass for instance Accuracy(output={beside[0]!r})"
        )
    output = beside[0] if metric.output is None else metric.output
    labels = inputs[-1] if metric.labels is None else metric.labels
    if output not in outputs or labels not in inputs:
        raise ArgumentError(
            f"the metric {name!r} compares the output {output!r} with the input {labels!r}; the "
            f"outputs are {', '.join(beside)} and the inputs {', '.join(inputs)}"
        )
    return outputs.index(output), inputs.index(labels)


def to_plain(name: str, value: Any) -> Any:
    """Return the value of a metric as a number, or a list of lists of numbers."""
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise ArgumentError(f"the value of the metric {name!r} is not made of numbers: {value!r}")
    return float(array) if array.ndim == 0 else array.tolist()
