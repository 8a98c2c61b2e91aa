"""Heads in closed form are those of scikit-learn, and go on as other parameters do."""

import json
import warnings

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import onnxtrain
from graphs import model, value
from onnxtrain.cli import main
from onnxtrain.errors import ArgumentError, CheckpointError, InputError

datasets = pytest.importorskip("sklearn.datasets", reason="it is in an extra")
from sklearn.linear_model import Ridge, RidgeClassifier, RidgeCV  # noqa: E402
from sklearn.neighbors import NearestCentroid  # noqa: E402

PIXELS, LABELS = datasets.load_digits(return_X_y=True)
RNG = np.random.default_rng(0)
ORDER = RNG.permutation(len(PIXELS))  # the writers of the last digits are others
X, LABELS = (PIXELS[ORDER] / 16).astype(np.float32), LABELS[ORDER]
BODY = (RNG.normal(size=(64, 40)) / 4).astype(np.float32)
FEATURES = np.maximum(X @ BODY, 0)
TRAIN, TEST = slice(0, 1200), slice(1200, None)


def network(form: str = "gemm", classes: int = 10, batch: int | str = "N") -> onnx.ModelProto:
    """A frozen layer, and a head in one of several forms."""
    node = helper.make_node
    nodes = [node("MatMul", ["x", "body"], ["h"]), node("Relu", ["h"], ["features"])]
    shape = (40, classes)
    if form == "gemm":
        nodes.append(node("Gemm", ["features", "head.w", "head.b"], ["y"], transB=1))
        shape = (classes, 40)
    elif form == "no bias":
        nodes.append(node("MatMul", ["features", "head.w"], ["y"]))
    elif form == "softmax":
        nodes += [
            node("MatMul", ["features", "head.w"], ["product"]),
            node("Add", ["head.b", "product"], ["scores"]),
            node("Softmax", ["scores"], ["y"]),
        ]
    elif form == "transpose":
        shape = (classes, 40)
        nodes += [
            node("Transpose", ["head.w"], ["turned"], perm=[1, 0]),
            node("MatMul", ["features", "turned"], ["product"]),
            node("Add", ["product", "head.b"], ["y"]),
        ]
    weights = {"body": BODY, "head.w": RNG.normal(size=shape).astype(np.float32)}
    if form != "no bias":
        weights["head.b"] = np.zeros(classes, np.float32)
    outputs = [value("y", [batch, classes], TensorProto.FLOAT)]
    return model(nodes, [value("x", [batch, 64])], outputs, weights)


@pytest.fixture
def opened(tmp_path):
    def make(form: str = "gemm", **options):
        built = network(form, options.pop("classes", 10), options.pop("batch", "N"))
        onnxtrain.prepare(built, tmp_path / "artifacts", **{"train": "head.*"} | options)
        return onnxtrain.TrainingSession(tmp_path / "artifacts")

    return make


def scores(session, x=X[TEST]) -> np.ndarray:
    return session.predict(x)


@pytest.mark.parametrize("form", ["gemm", "no bias", "softmax", "transpose"])
def test_ridge_is_that_of_scikit_learn(form, opened) -> None:
    session = opened(form)
    onnxtrain.fit_head(session, (X[TRAIN], LABELS[TRAIN]), regularization=0.3)
    theirs = RidgeClassifier(alpha=0.3, fit_intercept=form != "no bias")
    theirs.fit(FEATURES[TRAIN], LABELS[TRAIN])
    found = scores(session).argmax(1)
    assert np.mean(found == theirs.predict(FEATURES[TEST])) > 0.998
    assert np.mean(found == LABELS[TEST]) > 0.85


@pytest.mark.parametrize("count", [30, 1200], ids=["fewer than features", "more than features"])
def test_the_regularization_is_that_of_leave_one_out(count, opened) -> None:
    session = opened()
    found = onnxtrain.fit_head(session, (X[:count], LABELS[:count]))
    assert found.regularization is not None and found.samples == count
    targets = 2.0 * (LABELS[:count, None] == np.arange(10)) - 1
    around = found.regularization * np.logspace(-1.5, 1.5, 7)
    theirs = RidgeCV(alphas=around).fit(FEATURES[:count].astype(np.float64), targets)
    assert theirs.alpha_ == pytest.approx(found.regularization)
    # What is told of samples left out is what leaving them out gives.
    hits = [
        Ridge(alpha=found.regularization)
        .fit(np.delete(FEATURES[:count], i, 0), np.delete(targets, i, 0))
        .predict(FEATURES[i : i + 1])
        .argmax()
        == LABELS[i]
        for i in range(0, 30)
    ]
    if count == 30:
        assert found.accuracy == pytest.approx(np.mean(hits))


def test_euclidean_means_are_those_of_scikit_learn(opened) -> None:
    session = opened()
    data = (X[TRAIN], LABELS[TRAIN])
    found = onnxtrain.fit_head(session, data, "class-means", metric="euclidean")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about features that are always zero
        theirs = NearestCentroid().fit(FEATURES[TRAIN], LABELS[TRAIN])
    np.testing.assert_array_equal(scores(session).argmax(1), theirs.predict(FEATURES[TEST]))
    assert found.accuracy > 0.7 and found.regularization is None


def test_cosine_means(opened) -> None:
    session = opened("no bias")
    onnxtrain.fit_head(session, (X[TRAIN], LABELS[TRAIN]), "class-means")
    unit = FEATURES / np.linalg.norm(FEATURES, axis=1, keepdims=True)
    means = np.stack([unit[TRAIN][LABELS[TRAIN] == c].mean(0) for c in range(10)])
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    np.testing.assert_array_equal(scores(session).argmax(1), (unit[TEST] @ means.T).argmax(1))


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_classes_are_added_later(metric, opened, tmp_path) -> None:
    old = LABELS < 6
    whole, grown = opened(), opened()
    onnxtrain.fit_head(whole, (X[TRAIN], LABELS[TRAIN]), "class-means", metric=metric)
    for chosen in (old[TRAIN], ~old[TRAIN]):
        data = (X[TRAIN][chosen], LABELS[TRAIN][chosen])
        onnxtrain.fit_head(grown, data, "class-means", metric=metric, add=True)
        if set(data[1]) == set(range(6)):  # no class without samples is predicted
            assert set(scores(grown).argmax(1)) <= set(range(6))
        grown.save_checkpoint(tmp_path / "saved")
        grown = onnxtrain.TrainingSession.from_folder(
            tmp_path / "artifacts", checkpoint=tmp_path / "saved"
        )
    np.testing.assert_array_equal(scores(grown).argmax(1), scores(whole).argmax(1))


def test_probabilities_fit_and_training_goes_on(opened, tmp_path) -> None:
    session = opened()
    data, unseen = (X[TRAIN], LABELS[TRAIN]), (X[TEST], LABELS[TEST])
    found = onnxtrain.fit_head(session, data)
    before = onnxtrain.evaluate(session, unseen, "accuracy")
    assert before["accuracy"] == pytest.approx(found.accuracy, abs=0.07)
    assert before["eval_loss"] < 0.5
    session.export_model_for_inferencing(tmp_path / "head.onnx", ["y"])
    np.testing.assert_allclose(
        onnxtrain.predict(tmp_path / "head.onnx", X[TEST]), scores(session), rtol=1e-4, atol=1e-4
    )
    session.set_learning_rate(0.01)
    onnxtrain.fit(session, data, 3, cache_features=True, progress=False, seed=0)
    assert onnxtrain.evaluate(session, unseen)["eval_loss"] < before["eval_loss"]


def test_regression(opened) -> None:
    session = opened(classes=2, loss="mse")
    targets = np.stack([LABELS, X.sum(1)], 1).astype(np.float32)
    found = onnxtrain.fit_head(session, (X[TRAIN], targets[TRAIN]), regularization=1.0)
    theirs = Ridge(alpha=1.0).fit(FEATURES[TRAIN], targets[TRAIN])
    np.testing.assert_allclose(
        scores(session), theirs.predict(FEATURES[TEST]), rtol=1e-3, atol=0.01
    )
    assert found.accuracy is None


def test_yes_or_no(opened) -> None:
    session = opened(classes=1, loss="bce")
    labels = (LABELS % 2).astype(np.float32)[:, None]
    found = onnxtrain.fit_head(session, (X[TRAIN], labels[TRAIN]))
    right = (scores(session) > 0) == (labels[TEST] > 0)
    assert np.mean(right) > 0.8 and found.accuracy > 0.8


def test_batches_and_fixed_sizes(opened) -> None:
    fixed, free = opened(batch=7), opened()
    onnxtrain.fit_head(fixed, (X[:100], LABELS[:100]))
    batches = [(X[start : start + 30], LABELS[start : start + 30]) for start in range(0, 90, 30)]
    onnxtrain.fit_head(free, [*batches, {"x": X[90:100], "labels": LABELS[90:100]}])
    np.testing.assert_allclose(scores(fixed), scores(free), rtol=1e-3, atol=1e-3)


def test_a_saved_run_is_over(opened) -> None:
    session = opened()
    data = (X[:64], LABELS[:64])
    onnxtrain.fit(session, data, 2, progress=False)
    onnxtrain.fit_head(session, data)
    # It would not be the run that was saved.
    assert len(onnxtrain.fit(session, data, 2, resume=True, progress=False).epochs) == 2


@pytest.mark.parametrize(
    ("form", "options", "arguments", "message"),
    [
        ("gemm", {"train": "body"}, {}, "no linear layer that trains makes the scores"),
        ("softmax", {"train": "head.w"}, {}, "whose weight and bias train"),
        ("gemm", {"train": "head.w"}, {}, "whose weight and bias train"),
        ("gemm", {}, {"layer": "body"}, "no linear layer with the weight 'body'"),
        ("gemm", {}, {"add": True}, "ridge regression needs all samples"),
        ("gemm", {}, {"method": "class-means", "regularization": 1.0}, "for method='ridge'"),
        ("gemm", {}, {"method": "knn"}, "method must be one of"),
        ("gemm", {}, {"regularization": -1}, "must not be negative"),
        ("no bias", {}, {"method": "class-means", "metric": "euclidean"}, "with a bias"),
        ("gemm", {"classes": 2, "loss": "mse"}, {"method": "class-means"}, "the labels are"),
    ],
)
def test_what_cannot_be(form, options, arguments, message, opened) -> None:
    session = opened(form, **options)
    labels = LABELS[:50] if "loss" not in options else LABELS[:50].astype(np.float32)
    with pytest.raises(ArgumentError, match=message):
        onnxtrain.fit_head(session, (X[:50], labels), **arguments)


def test_labels_that_are_no_class(opened) -> None:
    with pytest.raises(InputError, match=r"the label \d is no class: the head has 5 classes"):
        onnxtrain.fit_head(opened(classes=5), (X[:50], LABELS[:50]))


def test_damaged_means(opened) -> None:
    session = opened()
    data = (X[:50], LABELS[:50])
    onnxtrain.fit_head(session, data, "class-means")
    private = session.module.training_state.private
    good = private["class_means"]
    for wrong in ({}, 3, {**good, "shape": [10, 41]}, {**good, "sums": "?"}, {**good, "metric": 1}):
        private["class_means"] = wrong
        with pytest.raises(CheckpointError, match="class means cannot be read"):
            onnxtrain.fit_head(session, data, "class-means", add=True)
    private["class_means"] = good
    with pytest.raises(ArgumentError, match="are cosine, of 10 classes"):
        onnxtrain.fit_head(session, data, "class-means", metric="euclidean", add=True)


def test_the_command(opened, tmp_path, monkeypatch, capsys) -> None:
    opened()
    monkeypatch.chdir(tmp_path)
    np.savez("old.npz", x=X[TRAIN][LABELS[TRAIN] < 6], labels=LABELS[TRAIN][LABELS[TRAIN] < 6])
    np.savez("new.npz", x=X[TRAIN][LABELS[TRAIN] >= 6], labels=LABELS[TRAIN][LABELS[TRAIN] >= 6])
    np.savez("test.npz", x=X[TEST], labels=LABELS[TEST])
    train = ["train", "artifacts", "--validation", "test.npz", "--json"]
    found = []
    for more in (
        ["--data", "old.npz", "--head", "class-means"],
        ["--data", "new.npz", "--head", "class-means", "--add"],
        ["--data", "old.npz", "--head", "ridge", "--restart"],
    ):
        assert main([*train, *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["accuracy"] < 0.6 < 0.7 < found[1]["accuracy"]
    assert found[2]["method"] == "ridge" and found[2]["regularization"] > 0
    assert main(["train", "artifacts", "--data", "old.npz", "--add"]) == 2
    assert "--add is for --head class-means" in capsys.readouterr().err


def test_beside_low_rank_factors(opened) -> None:
    session = opened(train=["lora", "head.*"])
    names = [name for name, parameter in session.state.parameters if parameter.requires_grad]
    assert any("lora_A" in name for name in names)
    onnxtrain.fit_head(session, (X[TRAIN], LABELS[TRAIN]), layer="head.w", regularization=0.3)
    theirs = RidgeClassifier(alpha=0.3).fit(FEATURES[TRAIN], LABELS[TRAIN])
    assert np.mean(scores(session).argmax(1) == theirs.predict(FEATURES[TEST])) > 0.998
