"""Options of `onnxtrain train`: weights of classes, a limit of steps, event files."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import onnxtrain
from onnxtrain.cli import main


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A linear model, prepared with weights, and data whose classes are not balanced."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(3)
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "linear",
        [value("x", onnx.TensorProto.FLOAT, ["N", 4])],
        [value("y", onnx.TensorProto.FLOAT, ["N", 2])],
        [numpy_helper.from_array(rng.normal(size=(4, 2)).astype(np.float32), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, "model.onnx")
    # As numpy makes it, in double precision.
    np.savez("train.npz", x=rng.normal(size=(40, 4)), labels=(np.arange(40) < 4).astype(np.int32))
    return tmp_path


def train(capsys, *options: str):
    code = main(["train", "artifacts", "--data", "train.npz", "--restart", *options, "--json"])
    shown = capsys.readouterr()
    return code, json.loads(shown.out) if code == 0 else shown.err


def losses_of(**settings):
    session = onnxtrain.TrainingSession("artifacts")
    data = np.load("train.npz")
    given = (data["x"], data["labels"])
    return onnxtrain.fit(session, given, 1, batch_size=8, seed=0, progress=False, **settings).losses


@pytest.mark.parametrize(
    ("option", "weights"), [("balanced", "balanced"), ("0.5,4", [0.5, 4.0])], ids=str
)
def test_weights_of_classes(option, weights, folder, capsys) -> None:
    assert main(["prepare", "model.onnx", "-o", "artifacts", "--sample-weight", "-q"]) == 0
    code, found = train(capsys, "--class-weight", option, "--batch-size", "8")
    assert code == 0, found
    assert found["losses"] == losses_of(class_weight=weights) != losses_of()
    code = main(["eval", "artifacts", "--data", "train.npz", "--json"])
    assert code == 0 and 0 <= json.loads(capsys.readouterr().out)["accuracy"] <= 1


def test_weights_that_cannot_be(folder, capsys) -> None:
    assert main(["prepare", "model.onnx", "-o", "artifacts", "-q"]) == 0
    assert "sample_weight=True" in train(capsys, "--class-weight", "balanced")[1]
    assert "--class-weight takes" in train(capsys, "--class-weight", "even")[1]


def test_a_limit_of_steps_and_event_files(folder, capsys) -> None:
    assert main(["prepare", "model.onnx", "-o", "artifacts", "-q"]) == 0
    code, found = train(
        capsys, "--epochs", "9", "--batch-size", "8", "--max-steps", "7", "--tensorboard", "logs"
    )
    assert code == 0, found
    assert len(found["losses"]) == 7 and found["stopped"].startswith("max_steps")
    (file,) = Path("logs").iterdir()
    assert file.read_bytes().count(b"learning_rate") == 7


@pytest.mark.parametrize("axis", [1, -1])
def test_a_tagger_is_measured_without_what_does_not_count(
    axis, tmp_path, monkeypatch, capsys
) -> None:
    """Nobody asked for accuracy: it fits the axes of the model, and leaves out negative labels."""
    monkeypatch.chdir(tmp_path)
    value, rng = helper.make_tensor_value_info, np.random.default_rng(0)
    turn = helper.make_node("Transpose", ["s"], ["y"], perm=[0, 2, 1] if axis == 1 else [0, 1, 2])
    dims = ["N", 3, 6] if axis == 1 else ["N", 6, 3]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["s"]), turn], "tagger",
        [value("x", onnx.TensorProto.FLOAT, ["N", 6, 4])],
        [value("y", onnx.TensorProto.FLOAT, dims)],
        [numpy_helper.from_array(rng.normal(size=(4, 3)).astype(np.float32), "w")],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), "model.onnx")
    x, labels = rng.normal(size=(10, 6, 4)).astype(np.float32), rng.integers(0, 3, (10, 6))
    labels[:, 4:] = -100
    np.savez("train.npz", x=x, labels=labels)
    loss = f"cross_entropy:ignore_index=-100,class_axis={axis}"
    assert main(["prepare", "model.onnx", "-o", "artifacts", "--loss", loss, "-q"]) == 0
    code, found = train(capsys, "--validation", "train.npz", "--lr", "0.1", "--epochs", "2")
    assert code == 0, found
    weights = onnxtrain.TrainingSession.from_folder(
        "artifacts", checkpoint="artifacts/trained"
    ).get_parameter("w")
    right = (x @ weights).argmax(-1)[labels >= 0] == labels[labels >= 0]
    assert found["epochs"][-1]["values"]["accuracy"] == pytest.approx(right.mean())


def test_labels_that_are_the_next_elements_are_compared_with_them(
    tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    value, rng = helper.make_tensor_value_info, np.random.default_rng(0)
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "ids"], ["y"])],
        "bigrams",
        [value("ids", onnx.TensorProto.INT64, ["N", "T"])],
        [value("y", onnx.TensorProto.FLOAT, ["N", "T", 7])],
        [numpy_helper.from_array(rng.normal(size=(7, 7)).astype(np.float32), "table")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), "model.onnx")
    ids = rng.integers(0, 7, (10, 5))
    np.savez("train.npz", ids=ids, labels=ids)
    words = ["--loss", "next_token", "--outputs", "y", "-q"]
    assert main(["prepare", "model.onnx", "-o", "artifacts", *words]) == 0
    code, found = train(capsys, "--validation", "train.npz", "--lr", "0.1", "--epochs", "3")
    assert code == 0, found
    with onnxtrain.TrainingSession.from_folder(
        "artifacts", checkpoint="artifacts/trained"
    ) as session:
        session.export_model_for_inferencing("bigrams.onnx", ["y"])
        right = (session.get_parameter("table").argmax(1)[ids[:, :-1]] == ids[:, 1:]).mean()
        assert found["epochs"][-1]["values"]["accuracy"] == pytest.approx(right)
        assert onnxtrain.evaluate(session, (ids, ids), "accuracy")["accuracy"] == right
    compared = onnxtrain.compare("bigrams.onnx", "bigrams.onnx", (ids, ids), latency=False)
    assert compared.first.metrics["accuracy"] == pytest.approx(right)


@pytest.mark.parametrize("labels", [["1", "2", "3"], ["1.0", "2.", "3.0"]])
def test_numbers_of_a_table_may_be_names_of_classes(labels, tmp_path) -> None:
    from onnxtrain.cli.tables import _labels

    found, classes = _labels(labels, "label", ["1", "2", "3"], "--data")
    assert found.tolist() == [0, 1, 2] and classes == ["1", "2", "3"]
    found, classes = _labels(labels, "label", None, "--data")
    assert found.tolist() == [1, 2, 3] and classes is None


def test_a_label_that_the_loss_ignores_is_no_wrong_class(folder, capsys) -> None:
    loss = "cross_entropy:ignore_index=-1"
    assert main(["prepare", "model.onnx", "-o", "artifacts", "--loss", loss, "-q"]) == 0
    given = dict(np.load("train.npz"))
    given["labels"][:5] = -1
    np.savez("train.npz", **given)
    assert train(capsys, "--validation", "train.npz")[0] == 0
    given["labels"][:5] = -2
    np.savez("train.npz", **given)
    assert "range from -2 to" in train(capsys)[1]
