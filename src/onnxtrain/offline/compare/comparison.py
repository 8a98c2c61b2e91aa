"""`compare`: what a model gained and lost on its way to another form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnxtrain.device.checks import at_least
from onnxtrain.errors import ArgumentError, ModelError, RunError
from onnxtrain.offline.compare.difference import Difference
from onnxtrain.offline.compare.latency import latencies
from onnxtrain.offline.compare.layers import MOST_BYTES, compare_layers
from onnxtrain.offline.compare.models import OpenModel, open_models, paired_outputs
from onnxtrain.offline.compare.operators import operators_of
from onnxtrain.offline.compare.report import (
    ComparedModel,
    Comparison,
    Errors,
    LayerErrors,
    Operators,
)
from onnxtrain.offline.compare.samples import Samples
from onnxtrain.offline.compare.scores import Metrics, Scores
from onnxtrain.offline.frontend.load import ModelLike
from onnxtrain.offline.graph.error_context import model_error_context
from onnxtrain.offline.graph.limits import Limits, limits_in_force


def compare(
    first: ModelLike,
    second: ModelLike,
    data: Any,
    *,
    metrics: Metrics | None = None,
    of: str | None = None,
    batch_size: int = 32,
    layers: bool = True,
    latency: bool = True,
    threads: int = 0,
    limits: Limits | None = None,
) -> Comparison:
    """Tell how good, how large and how fast two models are, and where they differ.

    Any two models with the same inputs can be compared: a model of floats and its form of integers,
    whoever made it, or a model before and after training.

    Args:
        first: the model that errors are measured against, or the path to its file.
        second: the other model.
        data: a tuple or dictionary of arrays, or a list of batches, which are such tuples. Labels
            come behind the inputs; without them there are no metrics.
        metrics: as for `evaluate`. The default is accuracy where labels are classes, and otherwise
            the mean of the absolute errors.
        of: the output that metrics look at; the first by default.
        batch_size: how many samples run at a time. A model of a fixed batch runs its own.
        layers: whether to compare the values inside the models, on up to 128 of the samples.
        latency: whether to measure how long a run takes. The models run in turn.
        threads: how many threads onnxruntime uses for an operator; 0 lets it choose.
        limits: of the files and their nodes, where the defaults of `Limits` are too low. What the
            models compute is not limited: they run.

    Examples:
        >>> print(onnxtrain.compare("mobilenet.onnx", "mobilenet.onnx", images))

    """
    batch_size, threads = at_least(1, "batch_size", batch_size), at_least(0, "threads", threads)
    with limits_in_force(limits), model_error_context("reading"):
        one, other = open_models(first, second, threads)
    pairs = paired_outputs(one, other)
    chosen = _chosen_output(of, list(pairs))
    samples = Samples(data, one.inputs, batch_size, one.batch or other.batch)
    notes = list[str]()
    if samples.left_out:
        notes.append(f"the last {samples.left_out} samples do not fill a batch and are left out")
    layout = one.layout or other.layout
    scores = Scores(metrics, (one.name, other.name), samples.has_labels, layout)
    errors, count = _run_all(one, other, pairs, chosen, samples, scores, notes)
    values = scores.values()
    times = _latencies(one, other, samples) if latency else {}
    worst = _layers(one, other, samples, threads, notes) if layers else []
    figures = [
        ComparedModel(
            model.name, model.bytes, values[i], {n: t[i] for n, t in times.items()},
            _operators(model, notes),
        )
        for i, model in enumerate((one, other))
    ]  # fmt: skip
    return Comparison(
        figures[0], figures[1], count, scores.agreement, errors, tuple(worst), tuple(notes)
    )


def _chosen_output(given: str | None, outputs: Sequence[str]) -> str:
    if given is not None and given not in outputs:
        raise ArgumentError(
            f"of={given!r}: the outputs that both models have are {', '.join(outputs)}"
        )
    return outputs[0] if given is None else given


def _run_all(
    first: OpenModel,
    second: OpenModel,
    pairs: dict[str, str],
    chosen: str,
    samples: Samples,
    scores: Scores,
    notes: list[str],
) -> tuple[dict[str, Errors], int]:
    """Run both models on all samples; return the errors of outputs, and the number of samples."""
    differences = {name: Difference() for name in pairs}
    count = 0
    for part in samples:
        ones = first.run(list(pairs), part.feeds)
        others = second.run(list(pairs.values()), part.feeds)
        count += part.samples
        for name, a, b in zip(pairs, ones, others, strict=True):
            if name not in differences:
                continue
            why = _why_apart(a, b)
            if why:
                notes.append(f"the output {name!r} is not compared: {why}")
                del differences[name]
            else:
                differences[name].add(a, b)
        place = list(pairs).index(chosen)
        scores.add(ones[place], others[place], part.labels)
    return {name: difference.errors() for name, difference in differences.items()}, count


def _why_apart(first: Any, second: Any) -> str:
    """Say why two outputs cannot be compared, or nothing."""
    kinds = [getattr(getattr(x, "dtype", None), "kind", "") for x in (first, second)]
    if not all(kind in "fiub" and kind for kind in kinds):
        return "its elements are no numbers"
    if first.shape != second.shape:
        return f"it has the shape {list(first.shape)} in one model, {list(second.shape)} in another"
    return ""


def _latencies(
    first: OpenModel, second: OpenModel, samples: Samples
) -> dict[int, tuple[float, float]]:
    """Return the seconds of a run of each model, by the number of samples."""
    parts = [samples.first(), samples.one()]
    return {p.samples: latencies(first, second, p.feeds) for p in parts if p is not None}


def _layers(
    first: OpenModel, second: OpenModel, samples: Samples, threads: int, notes: list[str]
) -> list[LayerErrors]:
    if max(first.bytes, second.bytes) > MOST_BYTES:
        notes.append("layers are not compared: a model has more than 2 GB")
        return []
    try:
        return compare_layers(first, second, samples, threads)
    except (ModelError, RunError) as error:
        notes.append(f"layers are not compared: {error}")
        return []


def _operators(model: OpenModel, notes: list[str]) -> Operators | None:
    try:
        return operators_of(model)
    except ModelError as error:  # a model that onnxruntime runs, and cannot write
        notes.append(f"the operators of {model.name} are not counted: {error}")
        return None
