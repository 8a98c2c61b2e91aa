"""Gradients that the training graph has checked are not checked again by the optimizer graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from onnxtrain import optim
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.format.names import GRADIENTS_CHECKED

KINDS = {
    "adamw": optim.AdamW(),
    "sgd": optim.SGD(momentum=0.9),
    "clipped": optim.AdamW(clip_grad=optim.ClipGradNorm(1.0)),
    "clipped by value": optim.AdamW(clip_grad=optim.ClipGradValue(0.1)),
}
Pair = tuple[Module, Optimizer]


def network() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    shapes = {"inner": (6, 20), "bias": (20,), "outer": (20, 3)}
    weights = [
        numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name)
        for name, shape in shapes.items()
    ]
    nodes = [
        helper.make_node("Gemm", ["x", "inner", "bias"], ["h"]),
        helper.make_node("MatMul", ["h", "outer"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [5, 6])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [5, 3])
    graph = helper.make_graph(nodes, "network", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("checked")
    onnx.save(network(), root / "net.onnx")

    def folder(kind: str) -> Path:
        if not (root / kind).exists():
            settings = {"loss": "l1", "optimizer": KINDS[kind]}
            onnxtrain.prepare(root / "net.onnx", root / kind, **settings)
        return root / kind

    return folder


def data(scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    x, target = scale * rng.normal(size=(5, 6)), rng.normal(size=(5, 3))
    return x.astype(np.float32), target.astype(np.float32)


def opened(folder: Path, **settings: Any) -> Pair:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, **settings)
    return module, Optimizer(folder / "optimizer_model.onnx", module)


def everything(module: Module) -> bytes:
    return module.state.to_bytes(include_optimizer_state=True, allow_nonfinite=True)


def spoil(module: Module) -> None:
    """Write into the memory of a gradient as nobody can who uses the package."""
    memory = module.training_state.make_gradients(module.training_state.trainable_names())
    next(iter(memory.values())).array.flat[0] = np.nan


def test_the_file_checks_by_itself(folders: Callable[[str], Path]) -> None:
    def constants(kind: str) -> list[str]:
        model = onnx.load(folders(kind) / "optimizer_model.onnx")
        return [t.name for t in model.graph.initializer if t.name == GRADIENTS_CHECKED]

    assert constants("adamw") == constants("sgd") == [GRADIENTS_CHECKED]
    assert constants("clipped") == []  # its sums are the norm
    session = ort.InferenceSession(folders("adamw") / "optimizer_model.onnx")
    assert GRADIENTS_CHECKED not in {value.name for value in session.get_inputs()}


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_checked_is_not_checked_again(folders: Callable[[str], Path], kind: str) -> None:
    module, optimizer = opened(folders(kind))
    module(*data())
    spoil(module)
    optimizer.step()
    assert optimizer.skipped_steps == (kind == "clipped")


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_numbers_as_with_the_check(folders: Callable[[str], Path], kind: str) -> None:
    pairs = [opened(folders(kind)) for _ in range(2)]
    assert pairs[1][0].state.parameters["inner"].grad is not None  # seen, so checked each time
    for module, optimizer in pairs:
        for _ in range(3):
            module(*data())
            optimizer.step()
            module.lazy_reset_grad()
        assert optimizer.step_count == 3
    one, other = (
        module.training_state.content(include_optimizer_state=True) for module, _ in pairs
    )
    np.testing.assert_equal(one.trainable, other.trainable)
    groups = (one.optimizer_groups["group0"], other.optimizer_groups["group0"])
    np.testing.assert_equal(*(group.states for group in groups))


def _keep_a_view(module: Module, optimizer: Optimizer) -> None:
    gradient = module.state.parameters["bias"].grad
    assert gradient is not None
    module(*data())
    optimizer.step()
    module.lazy_reset_grad()
    module(*data())
    gradient[0] = np.nan


def _assign(module: Module, optimizer: Optimizer) -> None:
    module(*data())
    module.state.parameters["bias"].grad = np.full(20, np.inf, np.float32)


def _add_up(module: Module, optimizer: Optimizer) -> None:
    for _ in range(40):  # the squares of each are below 3e38, but not those of the sum
        module(*data(1e18))
    assert module.skipped_batches == 0


@pytest.mark.parametrize("how", [_keep_a_view, _assign, _add_up])
def test_what_changes_afterwards_is_checked(
    folders: Callable[[str], Path], how: Callable[[Module, Optimizer], None]
) -> None:
    module, optimizer = opened(folders("adamw"))
    how(module, optimizer)
    before = everything(module)
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert everything(module) == before


def test_the_training_graph_checks_what_the_optimizer_keeps(folders: Callable[[str], Path]) -> None:
    """Squares of 1e25 are infinite in float32; only AdamW keeps squares."""
    for kind, skipped in (("adamw", 1), ("sgd", 0)):
        module, optimizer = opened(folders(kind))
        before = everything(module)
        module(*data(1e25))
        optimizer.step()
        assert (module.skipped_batches, optimizer.skipped_steps) == (skipped, skipped)
        assert (everything(module) == before) == bool(skipped)


def test_options_of_the_user_serve_both_graphs(
    folders: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    """The one that checks, and the one without the check, of which onnxruntime has no warnings."""
    module, optimizer = opened(folders("adamw"), session_options=ort.SessionOptions())
    module(*data())
    spoil(module)
    optimizer.step()
    assert optimizer.skipped_steps == 0
    module.state.parameters["inner"].grad = np.full((6, 20), np.inf, np.float32)
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert "arning" not in capfd.readouterr().err
