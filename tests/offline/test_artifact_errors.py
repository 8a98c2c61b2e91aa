"""Bad input to `generate_artifacts`: a clear error, and no half-written folder."""

import os
import stat
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from graphs import linear, value
from onnxtrain import onnxblock
from onnxtrain.artifacts import OptimType, generate_artifacts
from onnxtrain.errors import ModelError, NotDifferentiableError, OnnxTrainError

BAD = {
    "overlap": ({"requires_grad": ["w"], "frozen_params": ["w"]}, OnnxTrainError, "overlap"),
    "unknown name": ({"requires_grad": ["v"]}, LookupError, "'v'"),
    "unmatched pattern": ({"requires_grad": ["v*"]}, LookupError, "'v\\*'"),
    "a loss class": ({"loss": onnxblock.loss.MSELoss}, RuntimeError, "instance"),
    "a loss that is no scalar": ({"loss_input_names": ["y"]}, NotDifferentiableError, "single"),
    "an optimizer and nothing to train": (
        {"requires_grad": [], "optimizer": OptimType.SGD}, OnnxTrainError, "nothing trains"
    ),
    "no optimizer": ({"optimizer": "AdamW"}, TypeError, "OptimType"),
    "outputs that are no list": ({"additional_output_names": "y"}, OnnxTrainError, "list"),
    "an unknown output": ({"additional_output_names": ["z"]}, LookupError, "'z'"),
    "a missing library": ({"custom_op_library": "none.so"}, OnnxTrainError, "custom_op_library"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_leaves_no_file(case: str, tmp_path: Path) -> None:
    arguments, kind, words = BAD[case]
    with pytest.raises(kind, match=words):
        generate_artifacts(linear(), **arguments, artifact_directory=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_integers_do_not_train(tmp_path: Path) -> None:
    given = linear()
    given.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 2]), "ints"))
    given.graph.node.append(helper.make_node("Gather", ["b", "ints"], ["picked"]))
    given.graph.output.append(value("picked", [2], TensorProto.FLOAT))
    with pytest.raises(NotDifferentiableError, match="'ints'"):
        generate_artifacts(given, ["ints"], artifact_directory=tmp_path)


def test_a_weight_that_the_loss_does_not_depend_on(tmp_path: Path) -> None:
    given = linear()
    given.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(2, np.float32), "far"))
    given.graph.node.append(helper.make_node("Neg", ["far"], ["minus"]))
    given.graph.output.append(value("minus", [2]))
    with pytest.raises(NotDifferentiableError, match="'far'"):
        generate_artifacts(given, ["far"], artifact_directory=tmp_path)


def test_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model file"):
        generate_artifacts("nowhere.onnx", artifact_directory=tmp_path)
    with pytest.raises(ModelError, match="ModelProto"):
        generate_artifacts(3, artifact_directory=tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IREAD | stat.S_IEXEC)
    with pytest.raises(OnnxTrainError, match="cannot be written"):
        generate_artifacts(linear(), artifact_directory=tmp_path / "out")


def test_a_file_in_the_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("in the way")
    with pytest.raises(OnnxTrainError, match="cannot be written"):
        generate_artifacts(linear(), artifact_directory=tmp_path / "out")


def test_old_artifacts_survive_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full when the last file is moved into place."""
    generate_artifacts(linear(), artifact_directory=tmp_path)
    before = {f.name: f.read_bytes() for f in tmp_path.iterdir()}
    replace, calls = os.replace, []

    def full(source, target):
        calls.append(target)
        if len(calls) == 6:
            raise OSError(28, "No space left on device")
        return replace(source, target)

    monkeypatch.setattr("onnxtrain.artifact_folder.os.replace", full)
    with pytest.raises(OnnxTrainError, match="No space left"):
        generate_artifacts(linear(), ["w"], artifact_directory=tmp_path)
    monkeypatch.undo()
    assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == before
