"""What `generate_artifacts` takes: names, patterns, directories, prefixes, kinds of models."""

import json
import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

import onnxtrain
from artifact_device import Device
from graphs import linear, value
from onnxtrain.api import TrainingSession
from onnxtrain.artifacts import OptimType, generate_artifacts
from onnxtrain.format.checkpoint.file import read_checkpoint

FILES = {"training_model.onnx", "eval_model.onnx", "checkpoint"}
WITH_OPTIMIZER = FILES | {"optimizer_model.onnx", "step_model.onnx"}


def test_names_and_patterns(tmp_path: Path) -> None:
    written = generate_artifacts(linear(), ["w*"], ["b"], artifact_directory=tmp_path)
    assert (set(written.trainable), set(written.frozen)) == ({"w"}, {"b"})
    written = generate_artifacts(linear(), frozen_params=["b"], artifact_directory=tmp_path)
    assert (set(written.trainable), set(written.frozen)) == ({"w"}, {"b"})
    written = generate_artifacts(linear(), artifact_directory=tmp_path)
    assert set(written.trainable) == {"w", "b"}


def test_numbers_train_where_nothing_else_is_meant(tmp_path: Path) -> None:
    """Nothing tells a learnt scale from a constant; a pattern does if it matches nothing else."""
    given = linear()
    given.graph.node[0].output[0] = "unscaled"
    given.graph.node.insert(1, helper.make_node("Mul", ["unscaled", "scale"], ["xw"], "scale"))
    given.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(2), "scale"))
    trained = {
        patterns: set(generate_artifacts(given, patterns, artifact_directory=tmp_path).trainable)
        for patterns in (None, ("*",), ("sc*",), ("scale", "w"))
    }
    assert list(trained.values()) == [{"w", "b"}, {"w", "b"}, {"scale"}, {"scale", "w"}]


def test_prefix_nominal_checkpoint_and_notes(tmp_path: Path) -> None:
    written = generate_artifacts(
        linear(), ["w"], ["b"], prefix="my_", nominal_checkpoint=True, artifact_directory=tmp_path
    )
    assert set(written.files) == {f"my_{n}" for n in FILES | {"nominal_checkpoint"}}
    nominal = read_checkpoint(tmp_path / "my_nominal_checkpoint")
    assert nominal.nominal and set(nominal.trainable) == {"w"}
    graph = onnx.load(tmp_path / "my_training_model.onnx", load_external_data=False)
    notes = json.loads(graph.metadata_props[0].value)
    assert notes["trainable"] == ["w"] and notes["frozen"] == ["b"] and notes["loss"] == "loss"
    ort.InferenceSession(tmp_path / "my_training_model.onnx")


@pytest.mark.parametrize("kind", [str, os.fsencode, Path, None])
def test_kinds_of_directories(kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    directory = None if kind is None else kind(tmp_path / "ein Ordner")
    written = generate_artifacts(linear(), artifact_directory=directory)
    assert set(os.listdir(tmp_path if kind is None else tmp_path / "ein Ordner")) == FILES
    assert written.directory == (tmp_path if kind is None else tmp_path / "ein Ordner")


def test_a_prefix_with_a_folder(tmp_path: Path) -> None:
    given = linear()
    given.graph.initializer.append(
        onnx.numpy_helper.from_array(np.ones((50, 2), np.float32), "table")
    )
    given.graph.node[0].output[0] = "product"
    given.graph.node.insert(1, helper.make_node("Gather", ["table", "row"], ["picked"]))
    given.graph.node.insert(2, helper.make_node("Mul", ["product", "picked"], ["xw"]))
    given.graph.input.append(value("row", [1], onnx.TensorProto.INT64))
    written = generate_artifacts(
        given, ["w", "b"], optimizer=OptimType.SGD, prefix="first/try_", artifact_directory=tmp_path
    )
    assert set(written.files) == {f"first/try_{name}" for name in WITH_OPTIMIZER}
    assert set(os.listdir(tmp_path)) == {"first"}
    session = TrainingSession.from_folder(tmp_path / "first", prefix="try_")
    losses = [float(session.step(np.ones((2, 3), np.float32), np.array([3]))[0]) for _ in range(3)]
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[2]


@pytest.mark.parametrize("ir_version", [3, 8])
def test_weights_that_are_inputs_as_well(ir_version: int, tmp_path: Path) -> None:
    """As old exporters wrote them, and as torch does with keep_initializers_as_inputs."""
    given = linear()
    for tensor in given.graph.initializer:
        given.graph.input.append(value(tensor.name, list(tensor.dims)))
    given.ir_version = ir_version
    given.opset_import[0].version = 11
    assert set(onnxtrain.inspect(given).weights) == {"w", "b"}
    generate_artifacts(given, ["w"], artifact_directory=tmp_path)
    names = [i.name for i in onnx.load(tmp_path / "training_model.onnx").graph.input]
    assert names == ["x", "w", "w_grad.accumulation.buffer", "lazy_reset_grad"]


def test_a_path_with_external_data(tmp_path: Path) -> None:
    onnx.save(linear(), tmp_path / "model.onnx", save_as_external_data=True, location="weights.bin",
              size_threshold=0)  # fmt: skip
    written = generate_artifacts(
        tmp_path / "model.onnx", ["w"], ["b"], artifact_directory=tmp_path / "out"
    )
    (tmp_path / "weights.bin").unlink()
    stored = read_checkpoint(written.directory / "checkpoint")
    np.testing.assert_array_equal(
        stored.trainable["w"], onnx.numpy_helper.to_array(linear().graph.initializer[0])
    )
    results = Device(written.directory).train(x=np.ones((2, 3), np.float32))
    assert np.isfinite(results["loss"])
