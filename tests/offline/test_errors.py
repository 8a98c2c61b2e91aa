"""Bad input gets an error of onnxtrain that says what, where and what to do."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import onnxtrain
from graphs import linear, model, value
from onnxtrain.artifacts import LossType, generate_artifacts
from onnxtrain.errors import (
    MissingGradientError,
    ModelError,
    NotDifferentiableError,
    OnnxTrainError,
    ShapeInferenceError,
    UnknownNameError,
)


def fails(kind: type[OnnxTrainError], *words: str, **arguments) -> OnnxTrainError:
    with pytest.raises(kind) as caught:
        onnxtrain.gradient(**arguments)
    message = str(caught.value)
    for word in words:
        assert word in message, message
    assert "google.protobuf" not in message and ".cc:" not in message, message
    return caught.value


def test_a_missing_file() -> None:
    fails(ModelError, "no model file", "nowhere.onnx", model="nowhere.onnx", wrt="x")


@pytest.mark.parametrize("keep", [0, 1, 50, 150])
def test_a_truncated_file(tmp_path: Path, keep: int) -> None:
    file = tmp_path / "half.onnx"
    file.write_bytes(linear().SerializeToString()[:keep])
    fails(ModelError, "half.onnx", model=file, wrt="w")


def test_every_truncation_of_a_model_is_an_error_of_ours(tmp_path: Path) -> None:
    whole = linear().SerializeToString()
    for keep in range(0, len(whole) - 1):
        file = tmp_path / "cut.onnx"
        file.write_bytes(whole[:keep])
        with pytest.raises(OnnxTrainError):
            onnxtrain.gradient(file, "w")


def test_a_file_that_is_something_else(tmp_path: Path) -> None:
    file = tmp_path / "text.onnx"
    file.write_text("this is no model\n" * 10)
    fails(ModelError, "text.onnx", "not an ONNX model", model=file, wrt="w")


def test_a_directory(tmp_path: Path) -> None:
    fails(ModelError, "no model file", model=tmp_path, wrt="w")


def test_something_that_is_no_model() -> None:
    fails(ModelError, "ModelProto or a path", "int", model=3, wrt="x")


def test_missing_external_data(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    onnx.save(linear(), file, save_as_external_data=True, location="gone.bin", size_threshold=0)
    (tmp_path / "gone.bin").unlink()
    fails(ModelError, "gone.bin", "beside the model", model=file, wrt="w")
    unloaded = onnx.load(file, load_external_data=False)
    fails(ModelError, "gone.bin", "give the path", model=unloaded, wrt="w")


def test_short_external_data(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    onnx.save(linear(), file, save_as_external_data=True, location="short.bin", size_threshold=0)
    (tmp_path / "short.bin").write_bytes(b"\0" * 5)
    fails(ModelError, "short.bin", "bytes", model=file, wrt="w")


def test_shapes_that_contradict() -> None:
    given = model(
        [helper.make_node("MatMul", ["x", "w"], ["y"], "product")],
        [value("x", ["n", 4])],
        [value("y", ["n", 2])],
        {"w": np.zeros((3, 2), np.float32)},
    )
    fails(ShapeInferenceError, "contradict", "MatMul", "product", model=given, wrt="w")


def test_a_node_with_an_undefined_input() -> None:
    given = model(
        [helper.make_node("Relu", ["nothing"], ["y"], "relu")], [value("x", [2])], [value("y", [2])]
    )
    fails(ModelError, "nothing", model=given, wrt="x")


def test_a_wrt_name_that_does_not_exist() -> None:
    fails(UnknownNameError, "'weight'", "'w'", "'x'", model=linear(), wrt="weight")


def test_an_empty_wrt() -> None:
    fails(UnknownNameError, "wrt is empty", model=linear(), wrt=[])


def test_an_output_that_does_not_exist() -> None:
    fails(UnknownNameError, "no output 'z'", "'loss'", "'y'", model=linear(), wrt="w", of="z")


def test_a_wrt_that_cannot_be_reached() -> None:
    given = linear()
    given.graph.node.append(helper.make_node("Exp", ["b"], ["unused"], "exp"))
    given.graph.output.append(value("unused", [2]))
    fails(NotDifferentiableError, "'unused'", "'w'", model=given, wrt="w", of="unused")


def test_integers_have_no_gradient() -> None:
    given = model(
        [helper.make_node("Gather", ["t", "i"], ["y"])],
        [value("i", ["n"], TensorProto.INT64)],
        [value("y", ["n", 2])],
        {"t": np.zeros((5, 2), np.float32)},
    )
    fails(NotDifferentiableError, "'i'", "INT64", model=given, wrt="i")


def test_all_missing_rules_at_once() -> None:
    given = model(
        [
            helper.make_node("Strange", ["x"], ["a"], "first", domain="my.own"),
            helper.make_node("Exp", ["a"], ["b"], "exp"),
            helper.make_node("Odd", ["b"], ["c"], "second", domain="my.own"),
            helper.make_node("ReduceSum", ["c"], ["y"], "sum", keepdims=0),
        ],
        [value("x", [2])],
        [value("y", [])],
        domains=["my.own"],
    )
    for name in "abc":
        given.graph.value_info.append(value(name, [2]))
    error = fails(
        MissingGradientError, "my.own.Strange", "'first'", "my.own.Odd", "'second'", "'x'",
        "onnxtrain.offline.autodiff.rule", "straight_through", model=given, wrt="x",
    )  # fmt: skip
    assert [m.node for m in error.missing] == ["first", "second"]
    assert "freeze" not in str(error)


def test_a_missing_gradient_in_training_advises_what_training_takes(tmp_path: Path) -> None:
    given = model(
        [
            helper.make_node("Mul", ["x", "w"], ["a"], "scale"),
            helper.make_node("Strange", ["a"], ["b"], "own", domain="my.own"),
        ],
        [value("x", ["n", 2])],
        [value("b", ["n", 2])],
        {"w": np.ones(2, np.float32)},
        domains=["my.own"],
    )
    with pytest.raises(MissingGradientError) as caught:
        generate_artifacts(given, ["w"], loss=LossType.MSELoss, artifact_directory=tmp_path)
    message = str(caught.value)
    assert "my.own.Strange (node 'own')" in message
    assert "freeze" in message and "straight_through" not in message


def test_a_refused_operator_says_why() -> None:
    given = model(
        [
            helper.make_node("SequenceConstruct", ["x", "x"], ["both"]),
            helper.make_node("SequenceErase", ["both", "n"], ["rest"], "erase"),
            helper.make_node("ConcatFromSequence", ["rest"], ["y"], axis=0),
        ],
        [value("x", [2]), value("n", [], TensorProto.INT64)],
        [value("y", [2])],
    )
    names = ("ai.onnx.SequenceErase", "'erase'", "run time")
    fails(MissingGradientError, *names, model=given, wrt="x")


def test_an_opset_that_is_too_new() -> None:
    fails(ModelError, "opset 99", model=linear(opset=99), wrt="w")


def test_an_output_with_respect_to_itself() -> None:
    fails(NotDifferentiableError, "'y'", "itself", model=linear(), wrt="y", of="y")


def test_an_unknown_straight_through_operator() -> None:
    fails(OnnxTrainError, "Softmax", "straight", model=linear(), wrt="w",
          straight_through=["Softmax"])  # fmt: skip
    fails(OnnxTrainError, "ReduceMean", "shape", model=linear(), wrt="w",
          straight_through=["ReduceMean"])  # fmt: skip


@pytest.mark.parametrize("code", ["onnxtrain.gradient", "onnxtrain.artifacts", "onnxtrain.prepare"])
def test_without_the_offline_packages(code: str) -> None:
    """In a Python that finds no package but ours."""
    source = Path(onnxtrain.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import onnxtrain; {code}"],
        env={**os.environ, "PYTHONPATH": str(source)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert "pip install 'onnxtrain[offline]'" in done.stderr.splitlines()[-1]
