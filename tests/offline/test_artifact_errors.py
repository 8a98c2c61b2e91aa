"""Bad input to `generate_artifacts`: a clear error, and no half-written folder."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from graphs import linear, model, value
from onnxtrain import onnxblock
from onnxtrain.artifacts import LossType, OptimType, generate_artifacts
from onnxtrain.errors import (
    ModelError,
    NotDifferentiableError,
    OnnxTrainError,
    UnknownNameError,
    UnknownNameWarning,
)
from onnxtrain.onnxblock.optim import SGD, ParameterGroup

BAD = {
    "overlap": (
        {"requires_grad": ["w"], "frozen_params": ["w"]}, OnnxTrainError, "'w' cannot both train"
    ),
    "overlapping patterns": (
        {"requires_grad": ["w"], "frozen_params": ["*"]}, OnnxTrainError, "'w' cannot both train"
    ),
    "unknown name": ({"requires_grad": ["v"]}, LookupError, "'v'.*Its weights are 'w', 'b'"),
    "unmatched pattern": ({"requires_grad": ["v*"]}, LookupError, "'v\\*'"),
    "unmatched frozen pattern": (
        {"frozen_params": ["b", "typo.*"]}, LookupError, r"'typo\.\*' matches no initializer"
    ),
    "a value in between": (
        {"requires_grad": ["y"]}, LookupError, r"'y' cannot train: .* by Relu \(node 'relu'\)"
    ),
    "a name instead of a list": ({"requires_grad": "w"}, TypeError, "requires_grad is a list"),
    "numbers instead of names": ({"frozen_params": [1]}, TypeError, "frozen_params is a list"),
    "a loss class": ({"loss": onnxblock.loss.MSELoss}, RuntimeError, "instance"),
    "a loss by its name": ({"loss": "MSELoss"}, RuntimeError, "'MSELoss', which is none of"),
    "a loss that is no scalar": (
        {"loss_input_names": ["y"]}, NotDifferentiableError, r"'y' has the shape.*single number"
    ),
    "several outputs": ({"loss": LossType.MSELoss}, OnnxTrainError, "2 outputs.*loss_input_names"),
    "too many names": (
        {"loss": LossType.MSELoss, "loss_input_names": ["y", "t", "u"]}, TypeError,
        "MSELoss cannot be called with 'y', 't', 'u'",
    ),
    "an unknown name for the loss": (
        {"loss": LossType.MSELoss, "loss_input_names": ["yy", "t"]}, LookupError, "did you mean 'y'"
    ),
    "a string for the loss": (
        {"loss": LossType.MSELoss, "loss_input_names": "y"}, TypeError, "loss_input_names is a list"
    ),
    "a loss that returns nothing": (
        {"loss": lambda *names: None}, OnnxTrainError, "return the name of its output"
    ),
    "a loss of labels alone": (
        {"loss": onnxblock.loss.MSELoss(), "loss_input_names": ["x", "t"]}, OnnxTrainError,
        "depends on no weight",
    ),
    "an optimizer and nothing to train": (
        {"requires_grad": [], "optimizer": OptimType.SGD}, OnnxTrainError, "nothing trains"
    ),
    "an optimizer and everything frozen": (
        {"frozen_params": ["*"], "optimizer": OptimType.SGD}, OnnxTrainError, "every weight"
    ),
    "no optimizer": ({"optimizer": 1}, TypeError, "optimizer is a name"),
    "an optimizer class": ({"optimizer": onnxblock.optim.AdamW}, TypeError, "optimizer is a name"),
    "a group of nothing": (
        {"optimizer": SGD(groups=[ParameterGroup("none.*")])}, LookupError, "'none.\\*'"
    ),
    "outputs that are no list": ({"additional_output_names": "y"}, TypeError, "list"),
    "an unknown output": ({"additional_output_names": ["z"]}, LookupError, "'z'"),
    "a missing library": (
        {"custom_op_library": "none.so"}, OnnxTrainError, "no custom_op_library at 'none.so'"
    ),
    "a prefix that leads out": ({"prefix": "../x"}, OnnxTrainError, "leads out"),
    "a mode of BatchNormalization": ({"bn": "train"}, ValueError, "'batch', 'frozen'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_leaves_no_file(case: str, tmp_path: Path) -> None:
    arguments, kind, words = BAD[case]
    with pytest.raises(kind, match=words) as raised:
        generate_artifacts(linear(), **arguments, artifact_directory=tmp_path / "out")
    assert issubclass(kind, RuntimeError) or isinstance(raised.value, OnnxTrainError)
    assert not os.listdir(tmp_path)


def test_a_frozen_name_that_is_missing_is_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UnknownNameWarning, match="the model has no initializer 'w2'"):
        made = generate_artifacts(
            linear(), frozen_params=["w2", "b"], artifact_directory=tmp_path,
            loss=onnxblock.loss.MSELoss(), loss_input_names=["y"],
        )  # fmt: skip
    assert set(made.trainable) == {"w"}


@pytest.mark.parametrize("argument", ["requires_grad", "frozen_params"])
def test_an_unmatched_pattern_suggests_similar_names(argument: str, tmp_path: Path) -> None:
    given = linear()
    for node in given.graph.node:
        node.input[:] = ["decoder.weight" if name == "w" else name for name in node.input]
    for tensor in given.graph.initializer:
        tensor.name = "decoder.weight" if tensor.name == "w" else tensor.name
    with pytest.raises(UnknownNameError, match=r"Did you mean 'decoder\.weight'\?"):
        generate_artifacts(given, **{argument: ["decodr.*"]}, artifact_directory=tmp_path)


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


@pytest.mark.parametrize("bn", [None, "batch", "frozen"])
def test_running_statistics_do_not_train(bn: str | None, tmp_path: Path) -> None:
    given = model(
        [helper.make_node("BatchNormalization", ["x", "scale", "b", "mean", "var"], ["y"], "bn")],
        [value("x", ["n", 3])],
        [value("y", ["n", 3])],
        {name: np.ones(3, np.float32) for name in ("scale", "b", "mean", "var")},
    )
    options = {"loss": LossType.MSELoss, "artifact_directory": tmp_path, "bn": bn}
    with pytest.raises(
        NotDifferentiableError, match="'mean' cannot train: it is a running statistic"
    ):
        generate_artifacts(given, ["mean"], **options)
    written = generate_artifacts(given, ["*"], **options)
    assert set(written.trainable) == {"scale", "b"}


def test_a_pattern_that_matches_no_weight(tmp_path: Path) -> None:
    given = linear()
    given.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 0]), "ints"))
    given.graph.node.append(helper.make_node("Gather", ["b", "ints"], ["picked"]))
    given.graph.output.append(value("picked", [2]))
    with pytest.raises(
        NotDifferentiableError, match="matches 'ints', and none of these is a weight"
    ):
        generate_artifacts(given, ["in*"], artifact_directory=tmp_path)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("way", ["argument", "context"])
def test_a_library_of_operators_is_registered(way: str, verify: bool, tmp_path: Path) -> None:
    """What is no library is refused by onnxruntime, which shows that it was asked."""
    (tmp_path / "operators.so").write_text("no library")
    options = {"ort_format": True, "artifact_directory": tmp_path / "out", "verify": verify}
    expected = r"custom_op_library.*operators\.so" if verify else r"ORT format.*operators\.so"
    with pytest.raises(OnnxTrainError, match=expected):
        if way == "argument":
            library = os.fsencode(tmp_path / "operators.so")
            generate_artifacts(linear(), custom_op_library=library, **options)
        else:
            with onnxblock.custom_op_library(tmp_path / "operators.so"):
                generate_artifacts(linear(), **options)
    assert not (tmp_path / "out").exists()


def test_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model file"):
        generate_artifacts("nowhere.onnx", artifact_directory=tmp_path)
    with pytest.raises(ModelError, match="ModelProto"):
        generate_artifacts(3, artifact_directory=tmp_path)


@pytest.mark.parametrize("place", ["no rights", "proc"])
def test_a_directory_that_cannot_be_written(place: str, tmp_path: Path) -> None:
    if place == "proc":
        folder = Path("/proc/onnxtrain")  # where not even root makes a folder
        if not folder.parent.is_dir():
            pytest.skip("there is no /proc here")
    else:
        if os.geteuid() == 0:
            pytest.skip("root may write anywhere")
        tmp_path.chmod(stat.S_IREAD | stat.S_IEXEC)
        folder = tmp_path / "out"
    with pytest.raises(OnnxTrainError, match=f"'{folder}' cannot be written"):
        generate_artifacts(linear(), artifact_directory=folder)


def test_a_file_in_the_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("in the way")
    with pytest.raises(OnnxTrainError, match="cannot be written"):
        generate_artifacts(linear(), artifact_directory=tmp_path / "out")


def test_old_artifacts_survive_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full when the new ones are committed."""
    generate_artifacts(linear(), artifact_directory=tmp_path)
    before = {f.name: f.read_bytes() for f in tmp_path.iterdir()}

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("onnxtrain.offline.writer.folder.os.rename", full)
    with pytest.raises(OnnxTrainError, match=r"No space left.*nothing was changed"):
        generate_artifacts(linear(), ["w"], artifact_directory=tmp_path)
    monkeypatch.undo()
    assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == before


@pytest.mark.slow
def test_a_full_disk_at_any_file(tmp_path: Path) -> None:
    """No file may grow beyond a limit, which is set to meet one file after the other."""
    program = Path(__file__).with_name("disk_full.py")
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), str(tmp_path)],
        capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(program.parent)},
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "")
    attempts = json.loads(result.stdout)
    assert [a for a in attempts if a["kind"] != "ours"] == []
    assert [a for a in attempts if not a["untouched"]] == []
    errors = "\n".join(a["error"] for a in attempts)
    for file in ("training_model.onnx", "step_model.onnx", "step_model.ort"):
        assert file in errors
    assert "File too large" in errors
