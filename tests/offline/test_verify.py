"""No artifact that onnxruntime refuses is written: graphs are loaded before the folder appears."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from onnxtrain.artifacts import LossType, OptimType, generate_artifacts
from onnxtrain.cli import main
from onnxtrain.errors import OnnxTrainError
from onnxtrain.offline import prepare as preparing

RNG = np.random.default_rng(0)


def weight(name: str, *shape: int) -> onnx.TensorProto:
    return numpy_helper.from_array(RNG.standard_normal(shape).astype(np.float32), name)


def linear(domain: str = "") -> onnx.ModelProto:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    if domain:
        nodes.insert(0, helper.make_node("Twice", ["x"], ["x2"], domain=domain))
        nodes[1].input[0] = "x2"
    graph = helper.make_graph(
        nodes, "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 3])],
        [weight("w", 4, 3)],
        value_info=[helper.make_tensor_value_info("x2", TensorProto.FLOAT, ["N", 4])],
    )  # fmt: skip
    imports = [helper.make_opsetid("", 17)]
    if domain:
        imports.append(helper.make_opsetid(domain, 1))
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `prepare` write an evaluation graph that onnxruntime refuses."""
    original = preparing.evaluation_graph

    def with_a_mistake(*given: Any, **named: Any) -> ir.Model:
        model = original(*given, **named)
        node = next(n for n in model.graph if n.op_type == "MatMul")
        node.op_type = "MatMulInteger"
        return model

    monkeypatch.setattr(preparing, "evaluation_graph", with_a_mistake)


@pytest.mark.usefixtures("broken")
def test_a_graph_that_does_not_load_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "artifacts"
    with pytest.raises(OnnxTrainError) as caught:
        onnxtrain.prepare(linear(), folder, loss="mse")
    message = str(caught.value)
    assert "eval_model.onnx" in message and "MatMulInteger" in message
    assert "verify=False" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("broken")
def test_what_was_there_stays(tmp_path: Path) -> None:
    (tmp_path / "eval_model.onnx").write_text("mine")
    with pytest.raises(OnnxTrainError, match="does not load"):
        generate_artifacts(linear(), loss=LossType.MSELoss, optimizer=OptimType.SGD,
                           artifact_directory=tmp_path)  # fmt: skip
    assert [p.name for p in tmp_path.iterdir()] == ["eval_model.onnx"]
    assert (tmp_path / "eval_model.onnx").read_text() == "mine"


@pytest.mark.usefixtures("broken")
def test_verification_can_be_left_out(tmp_path: Path) -> None:
    made = onnxtrain.prepare(linear(), tmp_path / "a", loss="mse", verify=False)
    assert "eval_model.onnx" in made.files
    written = generate_artifacts(linear(), loss=LossType.MSELoss, verify=False,
                                 artifact_directory=tmp_path / "b")  # fmt: skip
    assert "eval_model.onnx" in written.files


@pytest.mark.usefixtures("broken")
def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(linear(), tmp_path / "model.onnx")
    command = ["prepare", str(tmp_path / "model.onnx"), "-o", str(tmp_path / "a"), "--loss", "mse"]
    assert main(command) != 0
    assert "--no-verify" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
    assert main([*command, "--no-verify"]) == 0
    assert (tmp_path / "a" / "eval_model.onnx").exists()


def test_operators_of_an_unknown_library_are_noted(tmp_path: Path) -> None:
    """Without the library, onnxruntime cannot load the graphs; a device may have it."""
    made = onnxtrain.prepare(linear("own.operators"), tmp_path, loss="mse", train="w")
    assert any("own.operators" in note and "custom_op_library" in note for note in made.notes)


def test_with_a_prefix_and_every_file(tmp_path: Path) -> None:
    made = onnxtrain.prepare(linear(), tmp_path, loss="mse", prefix="sub/run_",
                             nominal_checkpoint=True)  # fmt: skip
    assert made.notes == ()
    assert "sub/run_step_model.onnx" in made.files
