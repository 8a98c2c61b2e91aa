"""`fit_head`: computes the last layer from the features of samples, without steps."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from onnxtrain.device.checks import at_least, choice, count_bad, not_negative
from onnxtrain.device.heads.class_means import METRICS, ClassMeans
from onnxtrain.device.heads.last_layer import LastLayer, find_last_layer
from onnxtrain.device.heads.ridge import LinearHead, solve_ridge
from onnxtrain.device.loop.batches import as_array, make_source
from onnxtrain.device.loop.resume_state import KEY as RUN
from onnxtrain.device.loop.weights import without_weights
from onnxtrain.device.predict import Predictor
from onnxtrain.errors import ArgumentError, InputError, NonFiniteError
from onnxtrain.format.checkpoint.content import Array

if TYPE_CHECKING:
    from onnxtrain.device.session import TrainingSession

KEY = "class_means"  # of the checkpoint's private record
_FACTORS = np.logspace(-4, 4, 81)
_ENOUGH = 4000  # samples that tell the size of the scores


@dataclass(frozen=True)
class HeadFit:
    """What `fit_head` found.

    Attributes:
        method: "ridge" or "class-means".
        samples: how many samples there were.
        accuracy: the part of them whose class a head finds that was computed without them: an
            estimate for new samples. None for a regression.
        regularization: what was added to the variances of the features; None for class means.
        seconds: how long it took.

    """

    method: str
    samples: int
    accuracy: float | None
    regularization: float | None
    seconds: float


def fit_head(
    session: TrainingSession,
    data: Any,
    method: Literal["ridge", "class-means"] = "ridge",
    *,
    regularization: float | None = None,
    metric: Literal["cosine", "euclidean"] = "cosine",
    add: bool = False,
    layer: str | None = None,
    batch_size: int = 32,
) -> HeadFit:
    """Compute weight and bias of the last layer in closed form, from one pass over the data.

    Everything before the last layer stays as it is. The scores are scaled so that their softmax
    gives probabilities that fit, and training can go on from them.

    Args:
        session: a `TrainingSession` with an evaluation graph, whose last layer trains.
        data: as for `fit`.
        method: "ridge" is the linear layer of the least squared error, the better one from some
            ten samples a class on; labels that are no classes are regression targets. With
            "class-means" the class whose mean is the nearest wins, which a few samples suffice for.
        regularization: of ridge regression. None chooses it so that heads computed without a
            sample predict that sample best.
        metric: how class means measure how near they are.
        add: let class means take in these samples beside those of earlier calls, whose sums the
            checkpoint keeps: for more samples, or for further classes of the head.
        layer: the name of the weight of the last layer, where several layers make outputs.
        batch_size: how many samples the layers before run on at a time.

    Examples:
        >>> session = onnxtrain.TrainingSession("artifacts")
        >>> found = onnxtrain.fit_head(session, batches)
        >>> print(f"about {found.accuracy:.0%} of new samples will be right")

    """
    began = time.monotonic()
    choice("method", method, ("ridge", "class-means"))
    choice("metric", metric, METRICS)
    if method != "ridge" and regularization is not None:
        raise ArgumentError("regularization is for method='ridge'")
    if method == "ridge" and add:
        raise ArgumentError(
            "add=True is for method='class-means': ridge regression needs all samples at once"
        )
    a = None if regularization is None else not_negative("regularization", regularization)
    found = find_last_layer(session, layer)
    features, labels = _features(session, found, data, at_least(1, "batch_size", batch_size))
    width, outputs = _sizes(session, found)
    if features.ndim != 2 or features.shape[1] != width:
        raise ArgumentError(
            f"the features before the last layer have the shape {list(features.shape)}, not one "
            f"row of {width} for each sample: fit_head does not know which of them a label is for"
        )
    if count_bad(features):
        raise NonFiniteError("the features of these samples are not finite: nothing was changed")
    targets, kind = _targets(session, found, labels, outputs)
    private = session.module.training_state.private
    if method == "ridge":
        wanted = targets if kind == "values" else 2 * targets - 1
        head = solve_ridge(features, wanted, a, found.bias is not None)
    else:
        means = _means(private.get(KEY) if add else None, metric, outputs, width, found, kind)
        means.add(features, targets)
        if found.bias is None and not means.counts.all():
            raise ArgumentError("classes without samples need a last layer with a bias")
        head = means.head(features, targets)
        private[KEY] = means.to_record()
    head = _calibrated(head, targets, kind)
    found.assign(session, head.weight, head.bias)
    private.pop(RUN, None)  # the position of a run with other parameters
    return HeadFit(
        method,
        len(features),
        _accuracy(head.left_out, targets, kind),
        head.regularization if method == "ridge" else None,
        time.monotonic() - began,
    )


def _features(
    session: TrainingSession, layer: LastLayer, data: Any, batch_size: int
) -> tuple[Array, Array]:
    """Return what the last layer reads, and the labels, of all samples."""
    inputs = without_weights(session.input_types(training=False))
    names = [value.name for value in inputs]
    fixed = session.module.settings.batch if not session.module.settings.automatic else None
    source = make_source(data, inputs, batch_size=fixed or batch_size)
    predictor = None
    if layer.features not in names:
        predictor = Predictor(session.module, [layer.features])
    rows, labels = [], []
    try:
        for batch in source.epoch(0):
            given = dict(zip(names, batch.values, strict=True))
            labels.append(as_array(given[names[-1]]))
            if predictor is None:
                rows.append(as_array(given[layer.features]))
            else:
                taken = {name: given[name] for name in predictor.input_names()}
                rows.append(predictor([], taken, batch_size))
    finally:
        if predictor is not None:
            predictor.close()
    return np.concatenate(rows), np.concatenate(labels)


def _sizes(session: TrainingSession, layer: LastLayer) -> tuple[int, int]:
    """Return how many features the last layer reads, and how many scores it makes."""
    rows, columns = session.state.parameters[layer.weight].data.shape
    return (columns, rows) if layer.is_transposed else (rows, columns)


def _targets(
    session: TrainingSession, layer: LastLayer, labels: Array, outputs: int
) -> tuple[Array, str]:
    """Return what each score should be, and of which kind: "classes", "yes or no", "values".

    For classes and for yes or no, that is from 0 to 1.
    """
    if labels.dtype.kind in "iu" and labels.ndim == 1 and outputs > 1:
        wrong = labels[(labels < 0) | (labels >= outputs)]
        if wrong.size:
            raise InputError(
                f"the label {wrong[0]} is no class: the head has {outputs} classes, from 0 to "
                f"{outputs - 1}. Prepare the model with classes=... for more"
            )
        targets = np.zeros((len(labels), outputs), np.float32)
        targets[np.arange(len(labels)), labels] = 1
        return targets, "classes"
    targets = labels.reshape(len(labels), -1)
    if targets.shape[1] != outputs or labels.dtype.kind not in "iuf":
        raise ArgumentError(
            f"the labels are {labels.dtype.name} of the shape {list(labels.shape)}, and the last "
            f"layer makes {outputs} scores: fit_head takes the number of a class for each sample, "
            "or a number for each score"
        )
    if count_bad(targets):
        raise NonFiniteError("the labels are not finite: nothing was changed")
    activations = session.metadata.activation.values()
    return targets, "yes or no" if "sigmoid" in activations else "values"


def _means(
    record: Any, metric: str, classes: int, width: int, layer: LastLayer, kind: str
) -> ClassMeans:
    """Return the sums of earlier calls, or of no samples."""
    if kind != "classes":
        raise ArgumentError("method='class-means' needs the number of a class for each sample")
    if metric == "euclidean" and layer.bias is None:
        raise ArgumentError("metric='euclidean' needs a last layer with a bias")
    if record is None:
        return ClassMeans.empty(metric, classes, width)
    means = ClassMeans.from_record(record)
    if means.sums.shape != (classes, width) or means.metric != metric:
        raise ArgumentError(
            f"the class means of the checkpoint are {means.metric}, of {means.sums.shape[0]} "
            f"classes and {means.sums.shape[1]} features, and not {metric}, of {classes} and "
            f"{width}: start with add=False"
        )
    return means


def _calibrated(head: LinearHead, targets: Array, kind: str) -> LinearHead:
    """Return the head with scores of the size at which samples left out are the most probable.

    Which class has the largest score stays the same.
    """
    if kind == "values":
        return head
    some = slice(None, None, max(1, len(targets) // _ENOUGH))
    scores, wanted = head.left_out[some], targets[some]
    losses = [_loss(scores * factor, wanted, kind) for factor in _FACTORS]
    return head.scaled(float(_FACTORS[int(np.argmin(losses))]))


def _loss(scores: Array, targets: Array, kind: str) -> float:
    """Return the mean negative logarithm of the probabilities."""
    if kind == "yes or no":
        return float(np.mean(np.logaddexp(0, scores) - targets * scores))
    shifted = scores - scores.max(1, keepdims=True)
    return float(np.mean(np.log(np.exp(shifted).sum(1)) - (shifted * targets).sum(1)))


def _accuracy(scores: Array, targets: Array, kind: str) -> float | None:
    if kind == "values":
        return None
    if kind == "yes or no":
        return float(np.mean((scores > 0) == (targets > 0.5)))
    return float(np.mean(scores.argmax(1) == targets.argmax(1)))
