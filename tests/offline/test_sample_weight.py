"""Weights of samples: the loss and its gradient are torch's, and `fit` feeds them."""

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import helper, numpy_helper

import onnxtrain
from onnxtrain import losses
from onnxtrain.errors import ArgumentError, ArgumentTypeError

RNG = np.random.default_rng(5)
WEIGHT = RNG.normal(size=(4, 3)).astype(np.float32)
X = RNG.normal(size=(6, 4)).astype(np.float32)
CLASSES = np.array([0, 1, 2, 0, 1, 0])
TARGET = RNG.normal(size=(6, 3)).astype(np.float32)
SAMPLE = RNG.uniform(0.1, 2, size=6).astype(np.float32)
QUIET = {"progress": False}


def linear(dims=("N",), names=("x",)):
    """A model y = x w, of x with some axes before the last."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("MatMul", [names[0], "w"], ["y"])],
        "linear",
        [value(name, onnx.TensorProto.FLOAT, [*dims, 4]) for name in names],
        [value("y", onnx.TensorProto.FLOAT, [*dims, 3])],
        [numpy_helper.from_array(WEIGHT, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def session_of(folder, loss, model=None, **options):
    model = linear() if model is None else model
    onnxtrain.prepare(
        model, folder, loss=loss, optimizer="sgd", **{"sample_weight": True, **options}
    )
    return onnxtrain.TrainingSession(folder)


def mean_over_samples(terms):
    return terms.reshape(len(terms), -1).mean(dim=1)


def huber(y, t):
    return mean_over_samples(F.huber_loss(y, t, reduction="none", delta=0.7))


PROBABLE = torch.softmax(torch.tensor(TARGET), 1).numpy()
CASES = {
    "cross_entropy": (
        losses.CrossEntropy(),
        CLASSES,
        lambda y, t: F.cross_entropy(y, t, reduction="none"),
    ),
    "smoothed": (
        losses.CrossEntropy(label_smoothing=0.2),
        CLASSES,
        lambda y, t: F.cross_entropy(y, t, reduction="none", label_smoothing=0.2),
    ),
    "mse": (
        losses.MSE(),
        TARGET,
        lambda y, t: mean_over_samples(F.mse_loss(y, t, reduction="none")),
    ),
    "l1": (losses.L1(), TARGET, lambda y, t: mean_over_samples((y - t).abs())),
    "huber": (losses.Huber(delta=0.7), TARGET, huber),
    "smooth_l1": (
        losses.SmoothL1(),
        TARGET,
        lambda y, t: mean_over_samples(F.smooth_l1_loss(y, t, reduction="none")),
    ),
    "bce": (
        losses.BCEWithLogits(),
        (TARGET > 0).astype(np.float32),
        lambda y, t: mean_over_samples(F.binary_cross_entropy_with_logits(y, t, reduction="none")),
    ),
    "kl": (
        losses.KLDiv(reduction="batchmean"),
        PROBABLE,
        lambda y, t: F.kl_div(y, t, reduction="none").sum(dim=1),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_equal_torch(name, tmp_path) -> None:
    loss, labels, terms = CASES[name]
    session = session_of(tmp_path, loss)
    weight = torch.tensor(WEIGHT, requires_grad=True)
    expected = (terms(torch.tensor(X) @ weight, torch.tensor(labels)) * torch.tensor(SAMPLE)).mean()
    expected.backward()
    made = session.train_step(X, labels, SAMPLE)[0]
    np.testing.assert_allclose(made, expected.detach(), rtol=1e-5)
    np.testing.assert_allclose(
        session.state.parameters["w"].grad, weight.grad, rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize(
    ("loss", "denominator"),
    [
        (losses.CrossEntropy(ignore_index=2), lambda labels: (labels != 2).sum()),
        (
            losses.CrossEntropy(weight=[1.0, 2.0, 5.0]),
            lambda labels: np.array([1.0, 2.0, 5.0])[labels].sum(),
        ),
        (losses.CrossEntropy(reduction="sum"), lambda labels: 1.0),
    ],
    ids=["ignored", "class weights", "sum"],
)
def test_what_the_sum_is_divided_by_stays(loss, denominator, tmp_path) -> None:
    session = session_of(tmp_path / "with", loss)
    plain = session_of(tmp_path / "without", loss, sample_weight=False)
    ones = np.ones(6, np.float32)
    whole = plain.eval_step(X, CLASSES)[0]
    np.testing.assert_allclose(session.eval_step(X, CLASSES, ones)[0], whole, rtol=1e-6)
    parts = [session.eval_step(X, CLASSES, row)[0] for row in np.eye(6, dtype=np.float32)]
    np.testing.assert_allclose(sum(parts), whole, rtol=1e-5)


@pytest.mark.parametrize("axis", [1, -1])
def test_a_sample_of_many_labels_has_one_weight(axis, tmp_path) -> None:
    x = RNG.normal(size=(3, 3, 4)).astype(np.float32)
    labels = RNG.integers(0, 3, (3, 3))
    session = session_of(tmp_path, losses.CrossEntropy(class_axis=axis), linear(("N", 3)))
    y = torch.tensor(x @ WEIGHT)
    terms = F.cross_entropy(
        y if axis == 1 else y.transpose(1, 2), torch.tensor(labels), reduction="none"
    )
    expected = (terms * torch.tensor(SAMPLE[:3])[:, None]).mean()
    np.testing.assert_allclose(session.eval_step(x, labels, SAMPLE[:3])[0], expected, rtol=1e-5)


def test_losses_that_take_no_weights(tmp_path) -> None:
    from onnxtrain.onnxblock import blocks

    def own(y):
        return blocks.ReduceMean(keepdims=False)(y)

    with pytest.raises(ArgumentTypeError, match="sample_weight=True needs a loss of"):
        session_of(tmp_path, own)
    with pytest.raises(ArgumentTypeError, match="has a value 'sample_weight' already"):
        session_of(tmp_path, "mse", linear(names=("sample_weight",)))


# ---- fit ---------------------------------------------------------------------------------------


def trained(folder, data, loss="cross_entropy", **settings):
    session = session_of(folder, loss)
    session.set_learning_rate(0.5)
    history = onnxtrain.fit(session, data, 2, shuffle=False, **QUIET, **settings)
    return session.get_parameter("w"), history.losses


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({}, np.ones(6)),
        ({"sample_weight": SAMPLE}, SAMPLE),
        ({"sample_weight": SAMPLE.tolist()}, SAMPLE),
        ({"class_weight": {0: 0.5, 2: 3}}, [0.5, 1, 3, 0.5, 1, 0.5]),
        ({"class_weight": [0.5, 1, 3]}, [0.5, 1, 3, 0.5, 1, 0.5]),
        ({"class_weight": "balanced"}, [2 / 3, 1, 2, 2 / 3, 1, 2 / 3]),
        (
            {"class_weight": np.array([2, 1, 1]), "sample_weight": SAMPLE},
            SAMPLE * [2, 1, 1, 2, 1, 2],
        ),
    ],
    ids=str,
)
def test_weights_reach_the_loss(settings, weights, tmp_path) -> None:
    weights = np.asarray(weights, np.float32)
    expected = trained(tmp_path / "by hand", (X, CLASSES, weights))
    for number, data in enumerate([(X, CLASSES), {"x": X, "labels": CLASSES}]):
        made = trained(tmp_path / str(number), data, **settings)
        np.testing.assert_array_equal(made[0], expected[0])
        assert made[1] == expected[1]
    accumulated = trained(tmp_path / "micro", (X, CLASSES), micro_batch_size=2, **settings)
    np.testing.assert_allclose(accumulated[0], expected[0], rtol=1e-5, atol=1e-6)


def test_weights_of_batches(tmp_path) -> None:
    expected = trained(tmp_path / "a", (X, CLASSES), class_weight={0: 0.5}, batch_size=3)
    plain = [(X[:3], CLASSES[:3]), (X[3:], CLASSES[3:])]
    made = trained(tmp_path / "b", plain, class_weight={0: 0.5})
    np.testing.assert_array_equal(made[0], expected[0])
    own = [{"x": X, "labels": CLASSES, "sample_weight": SAMPLE}]
    expected = trained(tmp_path / "c", (X, CLASSES), sample_weight=SAMPLE)
    np.testing.assert_array_equal(trained(tmp_path / "d", own)[0], expected[0])


def test_binary_labels_have_classes(tmp_path) -> None:
    binary = (TARGET[:, :1] > 0).astype(np.float32)
    from onnxtrain.device.loop.weights import of_classes

    np.testing.assert_array_equal(
        of_classes(binary, {1: 4}), np.where(binary[:, 0] == 1, 4, 1).astype(np.float32)
    )


def test_evaluation_has_no_weights_unless_told(tmp_path) -> None:
    session = session_of(tmp_path, "cross_entropy")
    plain = F.cross_entropy(torch.tensor(X @ WEIGHT), torch.tensor(CLASSES))
    found = onnxtrain.evaluate(session, (X, CLASSES), "accuracy")
    np.testing.assert_allclose(found["eval_loss"], plain, rtol=1e-5)
    assert found["accuracy"] == np.mean((X @ WEIGHT).argmax(1) == CLASSES)
    weighted = onnxtrain.evaluate(session, (X, CLASSES), sample_weight=SAMPLE)
    np.testing.assert_allclose(
        weighted["eval_loss"], session.eval_step(X, CLASSES, SAMPLE)[0], rtol=1e-5
    )
    history = onnxtrain.fit(
        session, (X, CLASSES), class_weight={0: 9}, validation_split=0.5, metrics="accuracy",
        **QUIET,
    )  # fmt: skip
    assert history.epochs[0].samples == 3


@pytest.mark.parametrize(
    ("data", "settings", "message"),
    [
        ((X, CLASSES), {"class_weight": "even"}, "'balanced', not 'even'"),
        ((X, CLASSES), {"class_weight": [1, 1]}, "has 2 weights, and there is the class 2"),
        ((X, CLASSES), {"class_weight": {0: -1}}, "negative"),
        ((X, CLASSES), {"class_weight": {0: "x"}}, "made of numbers"),
        ((X, CLASSES), {"sample_weight": SAMPLE[:5]}, "it takes 6, one for each sample"),
        ((X, CLASSES), {"sample_weight": SAMPLE * np.nan}, "not a number"),
        ((X, CLASSES, SAMPLE), {"sample_weight": SAMPLE}, "has weights already"),
        ([(X, CLASSES)], {"sample_weight": SAMPLE}, "need the data as arrays"),
        ([(X, CLASSES)], {"class_weight": "balanced"}, "need the data as arrays"),
    ],
)
def test_bad_weights(data, settings, message, tmp_path) -> None:
    with pytest.raises(ArgumentError, match=message):
        trained(tmp_path, data, **settings)


def test_targets_that_are_no_classes(tmp_path) -> None:
    with pytest.raises(ArgumentError, match="needs one class for each sample"):
        trained(tmp_path, (X, TARGET), "mse", class_weight={0: 2})


def test_artifacts_without_weights(tmp_path) -> None:
    session = session_of(tmp_path, "cross_entropy", sample_weight=False)
    with pytest.raises(ArgumentError, match=r"prepare\(\.\.\., sample_weight=True\)"):
        onnxtrain.fit(session, (X, CLASSES), class_weight="balanced", **QUIET)


def test_other_weights_are_no_resumed_run(tmp_path) -> None:
    session = session_of(tmp_path, "cross_entropy")
    onnxtrain.fit(session, (X, CLASSES), sample_weight=SAMPLE, **QUIET)
    with pytest.raises(ArgumentError, match="data_checksum"):
        onnxtrain.fit(session, (X, CLASSES), 2, sample_weight=SAMPLE * 2, resume=True, **QUIET)


# ---- validation_split --------------------------------------------------------------------------


def test_a_part_of_the_samples_is_validation_data(tmp_path) -> None:
    x = np.arange(40, dtype=np.float32).reshape(10, 4)
    labels = np.zeros(10, np.int64)
    seen, held = [], []

    def note(outputs, _):
        held.append(outputs)
        return 0.0

    def runs(seed):
        seen.clear(), held.clear()
        session = session_of(tmp_path, "cross_entropy", sample_weight=False)
        step = session.step
        session.step = lambda rows, y: (seen.append(rows), step(rows, y))[1]
        history = onnxtrain.fit(
            session, (x, labels), 2, batch_size=2, validation_split=0.3, metrics=note, seed=seed,
            **QUIET,
        )  # fmt: skip
        assert history["samples"] == [7, 7]
        assert sum(len(rows) for rows in held) == 6
        return {float(row[0]) for rows in seen for row in rows}

    first = runs(1)
    assert len(first) == 7
    assert runs(1) == first != runs(2)


@pytest.mark.parametrize(
    ("data", "settings", "message"),
    [
        ([(X, CLASSES)], {"validation_split": 0.5}, "needs the data as arrays"),
        ((X, CLASSES), {"validation_split": 0.01}, "leaves none"),
        ((X, CLASSES), {"validation_split": 1.0}, "leaves none"),
        ((X, CLASSES), {"validation_split": 3}, "from 0 to 1"),
        ((X, CLASSES), {"validation_split": 0.5, "validation": (X, CLASSES)}, "not both"),
    ],
)
def test_bad_splits(data, settings, message, tmp_path) -> None:
    with pytest.raises(ArgumentError, match=message):
        trained(tmp_path, data, **settings)
