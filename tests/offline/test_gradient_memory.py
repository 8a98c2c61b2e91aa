"""Gradients that start from zero are written straight into their memory, and nobody can tell."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from onnxtrain.api import TrainingSession
from onnxtrain.device.run.graph import Graph
from onnxtrain.device.run.session_settings import default_options
from onnxtrain.format.model.file import ModelFile

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(4)


def network() -> onnx.ModelProto:
    """Two linear layers; the gradients of `a` and `b` are one value."""
    weights = {
        "v": RNG.standard_normal((5, 7)), "w": RNG.standard_normal((7, 3)),
        "a": RNG.standard_normal(3), "b": RNG.standard_normal(3),
    }  # fmt: skip
    nodes = [
        helper.make_node("MatMul", ["x", "v"], ["h"]),
        helper.make_node("Tanh", ["h"], ["t"]),
        helper.make_node("MatMul", ["t", "w"], ["m"]),
        helper.make_node("Add", ["m", "a"], ["n"]),
        helper.make_node("Add", ["n", "b"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "network",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 5])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
        [numpy_helper.from_array(v.astype(np.float32), n) for n, v in weights.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("artifacts")
    onnxtrain.prepare(network(), made, train=["v", "w", "a", "b"], loss="mse", optimizer="adamw")
    return made


def batch(seed: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    shapes = ((4, 5), (4, 3))
    x, y = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return x, y


def gradients(session: TrainingSession) -> dict[str, Array]:
    found = {name: parameter.grad for name, parameter in session.state.parameters}
    return {name: array.copy() for name, array in found.items() if array is not None}


def assert_equal(one: dict[str, Array], other: dict[str, Array]) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)


def without_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Graph, "gradients", ())


def test_the_graph_names_its_gradients(folder: Path) -> None:
    model = ModelFile.read(folder / "training_model.onnx")
    assert set(model.metadata.gradients) == {"v_grad", "w_grad", "a_grad", "b_grad"}
    assert not set(model.metadata.gradients) & {value.name for value in model.outputs}
    assert ModelFile.read(folder / "step_model.onnx").metadata.gradients == ()


def test_the_same_as_with_copies(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[Any]:
        found: list[Any] = []
        session = TrainingSession(folder)
        for seed in range(6):
            found.extend(session.train_step(*batch(seed)))
            found.append(gradients(session))
            if seed in (1, 2, 5):  # two batches, one, three
                session.optimizer_step()
                session.lazy_reset_grad()
        found.append({n: p.data.copy() for n, p in session.state.parameters})
        return found

    direct = run()
    without_direct(monkeypatch)
    for one, other in zip(direct, run(), strict=True):
        if isinstance(one, dict):
            assert_equal(one, other)
        else:
            np.testing.assert_array_equal(one, other)


def test_a_gradient_stays_where_it_is(folder: Path) -> None:
    session = TrainingSession(folder)
    session.train_step(*batch(1))
    grad = session.state.parameters["w"].grad
    assert grad is not None
    before = grad.copy()
    session.lazy_reset_grad()
    np.testing.assert_array_equal(grad, before)
    session.train_step(*batch(2))
    assert session.state.parameters["w"].grad is grad
    assert not np.array_equal(grad, before)
    grad[:] = 1.0  # steps use what is written into it
    session.train_step(*batch(2))
    fresh = TrainingSession(folder)
    fresh.train_step(*batch(2))
    expected = fresh.state.parameters["w"].grad
    assert expected is not None
    np.testing.assert_array_equal(grad, expected + 1.0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bad_batch_after_a_reset(folder: Path, value: float) -> None:
    session, other = TrainingSession(folder), TrainingSession(folder)
    for each in (session, other):
        each.train_step(*batch(1))
        each.optimizer_step()
        each.lazy_reset_grad()
    x, y = batch(2)
    x[0, 0] = value
    session.train_step(x, y)
    assert session.skipped_batches == 1
    assert all(not array.any() for array in gradients(session).values())
    session.optimizer_step()
    assert session.skipped_steps == 1
    for each in (session, other):
        each.train_step(*batch(3))
        each.optimizer_step()
    assert_equal(gradients(session), gradients(other))
    for name, parameter in session.state.parameters:
        np.testing.assert_array_equal(parameter.data, other.state.parameters[name].data)


def test_a_bad_batch_among_accumulated_ones(folder: Path) -> None:
    session = TrainingSession(folder)
    session.train_step(*batch(1))
    before = gradients(session)
    x, y = batch(2)
    x[0, 0] = np.nan
    session.train_step(x, y)
    assert_equal(gradients(session), before)


def test_names_in_the_metadata_that_do_not_fit(folder: Path) -> None:
    """They are not trusted: those that are no gradients are passed over."""
    text = (folder / "training_model.onnx").read_bytes()
    assert text.count(b'"v_grad"') == 1
    changed = text.replace(b'"v_grad"', b'"h_grad"')
    graph = Graph.__new__(Graph)
    graph.model = ModelFile.read(changed)
    assert set(graph.gradients) == {"w_grad", "a_grad", "b_grad"}


def convolutions(layers: int = 4) -> onnx.ModelProto:
    """Convolutions whose weight gradients end with nodes that onnxruntime writes anew."""
    weights, nodes, at = {}, [], "x"
    for i in range(layers):
        weights[f"w{i}"] = RNG.standard_normal((64, 64, 3, 3)) * 0.1
        nodes += [
            helper.make_node("Conv", [at, f"w{i}"], [f"c{i}"], f"conv{i}", pads=[1, 1, 1, 1]),
            helper.make_node("Relu", [f"c{i}"], [f"r{i}"], f"relu{i}"),
        ]
        at = f"r{i}"
    graph = helper.make_graph(
        [*nodes, helper.make_node("GlobalAveragePool", [at], ["y"])], "convolutions",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [16, 64, 16, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [16, 64, 1, 1])],
        [numpy_helper.from_array(v.astype(np.float32), n) for n, v in weights.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def ran_in_order(folder: Path, fused: bool) -> list[str]:
    """The names of the nodes of a graph, as stock onnxruntime runs them."""

    def options() -> Any:
        made = default_options()
        made.enable_profiling, made.profile_file_prefix = True, str(folder / "profile")
        return made

    with TrainingSession(folder, session_options=options, native=False) as session:
        x = RNG.standard_normal((16, 64, 16, 16)).astype(np.float32)
        run = session.step if fused else session.train_step
        run(x, np.zeros((16, 64, 1, 1), np.float32))
    gc.collect()  # the profile is written when the session is gone
    (profile,) = folder.glob("profile*")
    events = json.loads(profile.read_text())
    return [e["name"] for e in events if e["name"].endswith("_kernel_time")]


@pytest.mark.parametrize("fused", [True, False], ids=["step", "training"])
def test_the_backward_pass_begins_with_the_last_layer(tmp_path: Path, fused: bool) -> None:
    """Else what the first layers need for their gradients is in memory all the time."""
    onnxtrain.prepare(convolutions(), tmp_path, loss="mse", optimizer="adamw", native=False)
    names = ran_in_order(tmp_path, fused)
    sums = [i for i, name in enumerate(names) if name.startswith("finite_check/ReduceSum")][:4]
    of_first = [i for i, name in enumerate(names) if name.startswith(("conv0_grad", "relu0_grad"))]
    assert len(sums) == 4  # one more is that of the sums
    assert all(of_first[0] > i for i in sums[:3]), "the gradients of all other layers are there"


@pytest.mark.parametrize("functions", [True, False], ids=["functions", "plain"])
def test_no_tap_is_copied_before_the_cotangent_is_known(tmp_path: Path, functions: bool) -> None:
    """Else the copy is in memory while all gradients behind this layer are computed."""
    onnxtrain.prepare(convolutions(1), tmp_path, loss="mse", optimizer="adamw", native=functions)
    names = ran_in_order(tmp_path, fused=True)
    of_relu = [i for i, name in enumerate(names) if "ReluGrad" in name or "relu0_grad" in name]
    slices = [i for i, name in enumerate(names) if "Slice" in name]
    assert len(slices) == 9
    assert slices[0] > of_relu[-1]
