"""A step that is not finite changes nothing, whatever updates the parameters."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import onnxtrain
from onnxtrain import optim
from onnxtrain.device.random_state import set_seed

OPTIMIZERS = {
    "adam": optim.Adam(),
    "adamw": optim.AdamW(),
    "adamw-clipped": optim.AdamW(clip_grad=optim.ClipGradNorm(0.5)),
    "sgd": optim.SGD(),
    "momentum": optim.SGD(momentum=0.9, nesterov=True),
    "sgd-clipped": optim.SGD(clip_grad=optim.ClipGradNorm(0.5)),
    "sgd-clipped-by-value": optim.SGD(clip_grad=optim.ClipGradValue(0.5)),
    "rmsprop": optim.RMSprop(momentum=0.9, centered=True),
    "adagrad": optim.Adagrad(),
    "lion": optim.Lion(),
}


def network(dtype: type = np.float32, width: int = 6) -> onnx.ModelProto:
    """Two layers whose loss is as infinite as their targets."""
    rng = np.random.default_rng(0)
    code = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    weights = [
        numpy_helper.from_array((rng.normal(size=dims) / 3).astype(dtype), name)
        for name, dims in (("w1", (4, width)), ("b1", (width,)), ("w2", (width, 3)))
    ]
    graph = helper.make_graph(
        [
            helper.make_node("Gemm", ["x", "w1", "b1"], ["h"]),
            helper.make_node("Tanh", ["h"], ["t"]),
            helper.make_node("MatMul", ["t", "w2"], ["y"]),
        ],
        "network",
        [helper.make_tensor_value_info("x", code, ["N", 4])],
        [helper.make_tensor_value_info("y", code, ["N", 3])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def batch(seed: int, dtype: type) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(5, 4)).astype(dtype), rng.normal(size=(5, 3)).astype(dtype)


def everything(session: onnxtrain.TrainingSession) -> bytes:
    return session.state.to_bytes(include_optimizer_state=True, allow_nonfinite=True)


def assert_bad_batches_change_nothing(
    folder: Path, dtype: type = np.float32, proximal: float = 0.0
) -> None:
    """Both ways to train go on as if a spoiled batch were not there."""
    for value in (np.nan, np.inf):
        sessions = []
        for spoiled in (True, False):
            set_seed(3)
            session = onnxtrain.TrainingSession(folder)
            session.set_proximal(proximal)
            for step in range(3):
                x, target = batch(step, dtype)
                if spoiled:
                    before, bad = everything(session), target.copy()
                    bad[2, 1] = value
                    session.step(x, bad)
                    assert everything(session) == before
                    session.train_step(x, bad)
                    session.optimizer_step()
                    session.lazy_reset_grad()
                    assert everything(session) == before
                session.step(x, target)
            sessions.append(session)
        assert everything(sessions[0]) == everything(sessions[1])
        assert sessions[0].skipped_steps == 6 and sessions[1].skipped_steps == 0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str, tmp_path: Path) -> None:
    onnxtrain.prepare(network(), tmp_path, loss="mse", optimizer=OPTIMIZERS[name])
    assert_bad_batches_change_nothing(tmp_path)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_types(dtype: type, tmp_path: Path) -> None:
    onnxtrain.prepare(network(dtype), tmp_path, loss="mse", optimizer="adamw")
    assert_bad_batches_change_nothing(tmp_path, dtype)


def test_the_proximal_term(tmp_path: Path) -> None:
    onnxtrain.prepare(network(), tmp_path, loss="mse", optimizer="sgd", proximal=True)
    assert_bad_batches_change_nothing(tmp_path, proximal=0.1)


def test_updates_in_pieces(tmp_path: Path) -> None:
    onnxtrain.prepare(network(width=1 << 18), tmp_path, loss="mse", optimizer="adamw")
    step = onnx.load(tmp_path / "step_model.onnx", load_external_data=False)
    branches = [a.g for n in step.graph.node if n.op_type == "If" for a in n.attribute]
    bodies = [*branches, *step.functions]
    assert any(node.op_type in ("Scan", "Loop") for body in bodies for node in body.node)
    assert_bad_batches_change_nothing(tmp_path)
