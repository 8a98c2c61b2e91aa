"""Metrics: known values, streaming over batches, and what is refused."""

import math

import numpy as np
import pytest

from onnxtrain.device.loop.metrics import (
    F1,
    Accuracy,
    ConfusionMatrix,
    FunctionMetric,
    MeanAbsoluteError,
    MeanSquaredError,
    Precision,
    Recall,
    RootMeanSquaredError,
    TopK,
    make_metric,
    make_metrics,
)
from onnxtrain.errors import ArgumentError, NonFiniteError

SCORES = np.float32([[0.1, 0.9, 0.0], [0.8, 0.1, 0.1], [0.3, 0.4, 0.3], [0.0, 0.2, 0.8]])
LABELS = np.int64([1, 0, 2, 2])


def over(metric, outputs, labels, batch=None):
    """The value of a metric over arrays, in batches."""
    batch = batch or len(outputs)
    for start in range(0, len(outputs), batch):
        metric.update(outputs[start : start + batch], labels[start : start + batch])
    return metric.value()


@pytest.mark.parametrize("batch", [1, 3, 4])
@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        (Accuracy(), 0.75),
        (TopK(1), 0.75),
        (TopK(2), 0.75),
        (TopK(3), 1.0),
        # Class 2 is never mistaken for another, but is found once of twice; and so on.
        (Precision(), np.mean([1, 1 / 2, 1])),
        (Recall(), np.mean([1, 1, 1 / 2])),
        (F1(), np.mean([1, 2 / 3, 2 / 3])),
        (F1("weighted"), (1 + 2 / 3 + 2 * 2 / 3) / 4),
        (F1("micro"), 0.75),
    ],
    ids=str,
)
def test_classes(metric, expected, batch) -> None:
    metric.reset()
    assert over(metric, SCORES, LABELS, batch) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("batch", [1, 3, 4])
def test_confusion(batch) -> None:
    matrix = over(ConfusionMatrix(), SCORES, LABELS, batch)
    assert matrix.dtype == np.int64
    np.testing.assert_array_equal(matrix, [[1, 0, 0], [0, 1, 0], [0, 1, 1]])


def test_measures_of_each_class() -> None:
    np.testing.assert_allclose(over(Recall("none"), SCORES, LABELS), [1, 1, 0.5])


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_regression_counts_elements(batch) -> None:
    rng = np.random.default_rng(3)
    outputs, targets = rng.normal(size=(2, 5, 4)).astype(np.float32)
    difference = outputs.astype(np.float64) - targets
    assert over(MeanAbsoluteError(), outputs, targets, batch) == pytest.approx(
        np.abs(difference).mean(), rel=1e-14
    )
    squares = np.square(difference).mean()
    assert over(MeanSquaredError(), outputs, targets, batch) == pytest.approx(squares, rel=1e-14)
    assert over(RootMeanSquaredError(), outputs, targets, batch) == pytest.approx(
        math.sqrt(squares), rel=1e-14
    )


def test_a_last_axis_of_one_is_no_broadcast() -> None:
    column = np.float32([[1], [2], [3]])
    row = np.float32([1, 2, 5])
    assert over(MeanAbsoluteError(), column, row) == pytest.approx(2 / 3)
    assert over(MeanAbsoluteError(), row, column) == pytest.approx(2 / 3)


@pytest.mark.parametrize("shape", [(5,), (5, 1)])
@pytest.mark.parametrize("labels_shape", [(5,), (5, 1)])
@pytest.mark.parametrize("dtype", [np.int64, np.float32, np.bool_])
def test_binary_logits(shape, labels_shape, dtype) -> None:
    logits = np.float32([2, -1, 0.5, -3, 1]).reshape(shape)
    labels = np.array([1, 0, 0, 1, 1]).astype(dtype).reshape(labels_shape)
    assert over(Accuracy(), logits, labels) == pytest.approx(3 / 5)
    np.testing.assert_array_equal(over(ConfusionMatrix(), logits, labels), [[1, 1], [1, 2]])
    # Class 1 alone, not the mean over both.
    assert over(Precision(), logits, labels) == pytest.approx(2 / 3)
    assert over(Recall(), logits, labels) == pytest.approx(2 / 3)


def test_probabilities_have_another_threshold() -> None:
    outputs, labels = np.float32([0.4, 0.6, 0.9]), np.int64([0, 0, 1])
    assert over(Accuracy(), outputs, labels) == pytest.approx(1 / 3)
    assert over(Accuracy(threshold=0.5), outputs, labels) == pytest.approx(2 / 3)


def test_several_labels_at_once() -> None:
    logits = np.float32([[1, -1, 1], [-1, -1, 1]])
    labels = np.float32([[1, 0, 0], [0, 1, 1]])
    assert over(Accuracy(binary=True), logits, labels) == pytest.approx(4 / 6)
    with pytest.raises(ArgumentError, match="binary=True"):
        Accuracy().update(logits, labels)


def test_the_axis_of_the_classes() -> None:
    rng = np.random.default_rng(1)
    scores = rng.normal(size=(2, 4, 3, 5)).astype(np.float32)
    labels = rng.integers(0, 4, size=(2, 3, 5))
    expected = (scores.argmax(axis=1) == labels).mean()
    assert 0 < expected < 1
    last = np.moveaxis(scores, 1, -1)
    assert over(Accuracy(), scores, labels) == expected
    assert over(Accuracy(class_axis=-1), last, labels) == expected
    assert over(Accuracy(), scores, labels[:, None]) == expected
    assert over(TopK(1, class_axis=-1), last, labels) == expected
    with pytest.raises(ArgumentError, match="class_axis=-1"):
        Accuracy().update(last, labels)


@pytest.mark.parametrize("metric", [Accuracy, TopK, ConfusionMatrix, F1])
def test_ignored_labels_do_not_count(metric) -> None:
    settings = {"k": 2} if metric is TopK else {}
    labels = np.array([1, -100, 2, 2])
    ignoring = over(metric(ignore_index=-100, **settings), SCORES, labels)
    np.testing.assert_array_equal(
        ignoring, over(metric(**settings), SCORES[[0, 2, 3]], labels[[0, 2, 3]])
    )
    with pytest.raises(ArgumentError, match="ignore_index=-100"):
        metric(**settings).update(SCORES, labels)


def test_equal_scores_favour_the_first_class() -> None:
    flat = np.zeros((4, 4), np.float32)
    labels = np.arange(4)
    assert over(Accuracy(), flat, labels) == 0.25
    assert over(TopK(1), flat, labels) == 0.25
    assert over(TopK(3), flat, labels) == 0.75


def test_masked_classes_may_be_infinitely_unlikely() -> None:
    scores = np.float32([[-np.inf, 1, 2], [3, -np.inf, -np.inf]])
    assert over(Accuracy(), scores, np.int64([2, 0])) == 1.0
    assert over(TopK(2), scores, np.int64([0, 1])) == 0.5


def test_top_k_equals_sorting() -> None:
    rng = np.random.default_rng(9)
    scores, labels = rng.normal(size=(200, 20)), rng.integers(0, 20, 200)
    for k in (1, 5, 19):
        best = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        assert over(TopK(k), scores, labels, 64) == (best == labels[:, None]).any(axis=1).mean()


def test_classes_that_do_not_occur_do_not_lower_the_mean() -> None:
    scores = np.eye(5, dtype=np.float32)[[0, 1, 1]]
    assert over(F1(), scores, np.int64([0, 1, 1])) == 1.0


@pytest.mark.parametrize("make", [Accuracy, ConfusionMatrix, F1, lambda: TopK(2)])
def test_reset_forgets(make) -> None:
    metric = make()
    over(metric, SCORES, (LABELS + 1) % 3)
    metric.reset()
    np.testing.assert_array_equal(over(metric, SCORES, LABELS), over(make(), SCORES, LABELS))


@pytest.mark.parametrize("name", ["accuracy", "top2", "mae", "mse", "rmse", "f1", "precision"])
def test_without_elements_there_is_no_value(name) -> None:
    assert math.isnan(make_metric(name).value())


def test_functions_count_by_samples() -> None:
    def largest(outputs, labels):
        return outputs.max()

    metric = FunctionMetric(largest)
    assert metric.name == "largest"
    metric.update(np.float32([[1], [2], [3]]), np.zeros(3))
    metric.update(np.float32([[7]]), np.zeros(1))
    assert metric.value() == (3 * 3 + 7) / 4
    with pytest.raises(ArgumentError, match="one number"):
        FunctionMetric(lambda outputs, labels: outputs).update(SCORES, LABELS)


@pytest.mark.parametrize("labels", [[1, 0, 3, 2], [1, 0, -1, 2]])
def test_labels_out_of_range_are_refused(labels) -> None:
    for metric in (Accuracy(), TopK(2), ConfusionMatrix()):
        with pytest.raises(ArgumentError, match="is no class: there are 3 classes"):
            metric.update(SCORES, np.int64(labels))
    with pytest.raises(ArgumentError, match="there are 2 classes"):
        Accuracy().update(np.float32([0.5]), np.int64([2]))


def test_other_bad_input_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"labels of shape \(3,\) do not fit outputs"):
        Accuracy().update(SCORES, LABELS[:3])
    with pytest.raises(ArgumentError, match="whole numbers"):
        Accuracy().update(SCORES, [1, 0, 0.5, 2])
    with pytest.raises(ArgumentError, match="must be numbers"):
        Accuracy().update(SCORES, ["a", "b", "c", "d"])
    with pytest.raises(ArgumentError, match="no axis 1"):
        Accuracy().update(np.float32(1), np.int64(1))
    with pytest.raises(ArgumentError, match="at least 5 classes"):
        TopK(5).update(SCORES, LABELS)
    with pytest.raises(ArgumentError, match="k must be"):
        TopK(0)
    with pytest.raises(ArgumentError, match="same shape"):
        MeanAbsoluteError().update(np.zeros((4, 2)), np.zeros(4))
    with pytest.raises(ArgumentError, match="average must be one of"):
        F1("mean")
    with pytest.raises(ArgumentError, match="2 classes"):
        over(F1("binary"), SCORES, LABELS)
    matrix = ConfusionMatrix()
    matrix.update(SCORES, LABELS)
    with pytest.raises(ArgumentError, match="have 2 classes, those before had 3"):
        matrix.update(SCORES[:, :2], np.zeros(4, np.int64))


def test_what_is_not_a_number_is_refused() -> None:
    broken = SCORES.copy()
    broken[2, 1] = np.nan
    for metric in (Accuracy(), TopK(2), ConfusionMatrix()):
        with pytest.raises(NonFiniteError, match="1 of 12 elements of the outputs"):
            metric.update(broken, LABELS)
    with pytest.raises(NonFiniteError, match="of the labels"):
        MeanAbsoluteError().update(np.zeros(2), np.array([1, np.inf]))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("accuracy", Accuracy),
        ("confusion", ConfusionMatrix),
        ("mae", MeanAbsoluteError),
        ("top5", TopK),
        ("top_10", TopK),
        ("rmse", RootMeanSquaredError),
        ("recall", Recall),
    ],
)
def test_names(name, kind) -> None:
    assert type(make_metric(name)) is kind
    if kind is TopK:
        assert make_metric(name).k == int(name.removeprefix("top").removeprefix("_"))


def test_names_that_are_unknown_or_taken() -> None:
    with pytest.raises(ArgumentError, match="did you mean 'accuracy'"):
        make_metric("acuracy")
    for wrong in (3, Accuracy, "top0"):
        with pytest.raises(ArgumentError, match="metric"):
            make_metric(wrong)
    assert list(make_metrics(["accuracy", "top2", np.dot])) == ["accuracy", "top2", "dot"]
    assert list(make_metrics({"a": "accuracy", "b": "accuracy"})) == ["a", "b"]
    assert list(make_metrics("accuracy")) == ["accuracy"]
    with pytest.raises(ArgumentError, match="is taken"):
        make_metrics(["accuracy", Accuracy(class_axis=-1)])
    with pytest.raises(ArgumentError, match="is taken"):
        make_metrics({"loss": "accuracy"})


def test_settings_in_words() -> None:
    made = make_metric("accuracy:ignore_index=-100,class_axis=-1")
    assert (made.ignore_index, made.class_axis) == (-100, -1)
    assert make_metric("top3:ignore_index=-1").k == 3
    assert make_metric("f1:average=micro").average == "micro"
    assert make_metric("accuracy:binary=true").binary is True
    assert make_metric("accuracy:ignore_index=none,output=Scores").output == "Scores"
    for wrong in ("accuracy:ignore=1", "accuracy:ignore_index=pad", "mae:class_axis=1", "top5:k"):
        with pytest.raises(ArgumentError, match="has settings that it does not take"):
            make_metric(wrong)
    for wrong in ("accuracy:class_axis=1.0", "accuracy:binary=2", "top3:ignore_index=[1]"):
        with pytest.raises(ArgumentError, match="has settings that it does not take"):
            make_metric(wrong)


def test_metrics_follow_the_loss_where_nothing_else_was_said() -> None:
    metric = Accuracy()
    metric.follow({"class_axis": -1, "ignore_index": -100, "shift": 1})
    assert (metric.class_axis, metric.ignore_index, metric.shift) == (-1, -100, 1)
    metric = Accuracy(class_axis=2, ignore_index=3)
    metric.follow({"class_axis": -1, "ignore_index": -100})
    assert (metric.class_axis, metric.ignore_index, metric.shift) == (2, 3, 0)
    metric = Accuracy()
    metric.follow({"ignore_index": 0})  # a class that may well be meant to count
    assert metric.ignore_index is None
