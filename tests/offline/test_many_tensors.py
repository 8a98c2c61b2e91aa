"""Networks of very many small parameters: what is done to each is done to several at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from onnxtrain import optim

DEPTH, WIDTH, RANK = 40, 12, 3


def network() -> onnx.ModelProto:
    """Forty layers, x + tanh(x A B), of a sequence."""
    rng = np.random.default_rng(0)
    nodes, weights, x = [], [], "x"
    for i in range(DEPTH):
        for name, shape in (("A", (WIDTH, RANK)), ("B", (RANK, WIDTH))):
            array = (rng.normal(size=shape) / 3).astype(np.float32)
            weights.append(numpy_helper.from_array(array, f"{i}.{name}"))
        nodes += [
            helper.make_node("MatMul", [x, f"{i}.A"], [f"{i}.narrow"]),
            helper.make_node("MatMul", [f"{i}.narrow", f"{i}.B"], [f"{i}.wide"]),
            helper.make_node("Tanh", [f"{i}.wide"], [f"{i}.bent"]),
            helper.make_node("Add", [x, f"{i}.bent"], [f"{i}.x"]),
        ]
        x = f"{i}.x"
    graph = helper.make_graph(
        [*nodes, helper.make_node("Identity", [x], ["y"])],
        "network",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", "T", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", "T", WIDTH])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def by_torch(steps: int, x: np.ndarray, target: np.ndarray) -> dict[str, torch.Tensor]:
    w = {
        t.name: torch.tensor(numpy_helper.to_array(t), dtype=torch.float64, requires_grad=True)
        for t in network().graph.initializer
    }
    optimizer = torch.optim.AdamW(list(w.values()), lr=1e-2, weight_decay=0.1)
    for _ in range(steps):
        y = torch.tensor(x, dtype=torch.float64)
        for i in range(DEPTH):
            y = y + torch.tanh(y @ w[f"{i}.A"] @ w[f"{i}.B"])
        loss = torch.nn.functional.mse_loss(y, torch.tensor(target, dtype=torch.float64))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return w


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    x, target = rng.normal(size=(2, 2, 5, WIDTH)).astype(np.float32)
    return x, target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("many")
    optimizer = optim.AdamW.torch(weight_decay=0.1)
    onnxtrain.prepare(network(), made, loss="mse", optimizer=optimizer, native=False)
    return made


def test_steps_are_torch_s(folder: Path) -> None:
    x, target = data()
    session = onnxtrain.TrainingSession(folder)
    session.set_learning_rate(1e-2)
    for _ in range(3):
        session.step(x, target)
    for name, expected in by_torch(3, x, target).items():
        found = session.get_parameter(name)
        np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-3, atol=2e-5)


def test_the_graph_has_few_nodes_for_each_tensor(folder: Path) -> None:
    graph = onnx.load(folder / "step_model.onnx").graph
    (condition,) = (node for node in graph.node if node.op_type == "If")
    update = next(a.g for a in condition.attribute if a.name == "then_branch")
    kinds = [node.op_type for node in update.node]
    assert kinds.count("Concat") == 2 * 4
    assert kinds.count("Split") == 2 * 3
    assert len(kinds) < 60
    kinds = [node.op_type for node in graph.node]
    assert kinds.count("ReduceSumSquare") == 2 * DEPTH
    assert kinds.count("Reshape") < 4.5 * DEPTH  # not between two factors
    assert "Transpose" not in kinds


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bad_batch_changes_nothing_and_is_found(folder: Path, value: float) -> None:
    x, target = data()
    session = onnxtrain.TrainingSession(folder)
    session.step(x, target)
    before = session.state.to_bytes(include_optimizer_state=True)
    session.step(x, np.full_like(target, value))
    assert session.state.to_bytes(include_optimizer_state=True) == before


def test_sums_are_in_the_order_of_the_parameters(folder: Path) -> None:
    x, target = data()
    session = ort.InferenceSession(folder / "training_model.onnx")
    named = {t.name: numpy_helper.to_array(t) for t in network().graph.initializer}
    given = {}
    for value in session.get_inputs():
        shape = [d if isinstance(d, int) else 1 for d in value.shape]
        if value.name in named:
            given[value.name] = named[value.name]
        elif value.name == "x":
            given[value.name] = x
        elif "bool" in value.type:
            given[value.name] = np.ones(shape, bool)
        elif value.name.endswith(".accumulation.buffer") or list(value.shape) != ["N", "T", WIDTH]:
            given[value.name] = np.zeros(shape, np.float32)
        else:
            given[value.name] = target
    names = [v.name for v in session.get_outputs()]
    found = dict(zip(names, session.run(None, given), strict=True))
    totals = [v for n, v in found.items() if n.endswith(".accumulation.out")]
    assert len(totals) == 2 * DEPTH
    sums = [np.square(total).sum() for total in totals]  # as AdamW keeps squares
    np.testing.assert_allclose(found["finite_check"][: 2 * DEPTH], sums, rtol=1e-3, atol=1e-4)
