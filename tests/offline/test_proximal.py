"""The proximal term: updates that pull weights back to a reference, in both kinds of graphs."""

import importlib.util
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxtrain import TrainingSession, artifacts, onnxblock
from onnxtrain.errors import ArgumentError, OnnxTrainError, StateError, UnknownNameError
from onnxtrain.onnxblock.optim import late_readers

GOLDEN = Path(__file__).parents[1] / "golden"
OPTIM = onnxblock.optim
OPTIMIZERS = {
    "SGD": OPTIM.SGD,
    "momentum": lambda: OPTIM.SGD(momentum=0.9, weight_decay=0.01),
    "AdamW": OPTIM.AdamW,
    "Adam": OPTIM.Adam,
    "RMSprop": OPTIM.RMSprop,
    "Adagrad": OPTIM.Adagrad,
    "Lion": OPTIM.Lion,
    "clipped": lambda: OPTIM.SGD(momentum=0.9, clip_grad=OPTIM.ClipGradNorm(0.1)),
}
X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
LABELS = X[:, :3].argmax(axis=1)


def golden(name: str) -> onnx.ModelProto:
    """A model that the golden artifacts are made of."""
    spec = importlib.util.spec_from_file_location("make", GOLDEN / "make_artifacts.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)()


def mlp() -> onnx.ModelProto:
    return golden("mlp")


def cnn() -> onnx.ModelProto:
    return golden("cnn")


def write(folder, model, optimizer, **options):
    artifacts.generate_artifacts(
        model, loss=artifacts.LossType.CrossEntropyLoss, optimizer=optimizer,
        artifact_directory=folder, **options,
    )  # fmt: skip
    return folder


def weights(session) -> dict[str, np.ndarray]:
    return {name: parameter.data.copy() for name, parameter in session.state.parameters}


def equal(a, b) -> bool:
    return all(a[name].tobytes() == b[name].tobytes() for name in a)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_strength_it_changes_nothing(name, tmp_path) -> None:
    sessions = [
        TrainingSession.from_folder(write(tmp_path / str(p), mlp(), OPTIMIZERS[name](), proximal=p))
        for p in (False, True)
    ]
    sessions[1].set_proximal(0.0)
    for _ in range(10):
        losses = {float(session.step(X, LABELS)) for session in sessions}
        assert len(losses) == 1
    assert equal(*map(weights, sessions))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_both_ways_to_step_are_the_same(name, tmp_path) -> None:
    folder = write(tmp_path, mlp(), OPTIMIZERS[name](), proximal=True)
    fused, separate = (TrainingSession.from_folder(folder) for _ in range(2))
    first = weights(fused)
    for session in (fused, separate):
        session.set_learning_rate(0.05)
        session.set_proximal(0.7)
    for _ in range(5):
        fused.step(X, LABELS)
        separate.train_step(X, LABELS)
        separate.optimizer_step()
        separate.lazy_reset_grad()
    assert equal(weights(fused), weights(separate))
    assert not equal(weights(fused), first)


def test_it_is_the_gradient_of_half_the_squared_distance(tmp_path) -> None:
    """Gradient descent by hand, in double precision."""
    mu, rate = 0.3, 0.1
    folder = write(tmp_path, mlp(), OPTIM.SGD(), proximal=True)
    session, plain = (TrainingSession.from_folder(folder) for _ in range(2))
    session.set_learning_rate(rate)
    rng = np.random.default_rng(1)
    reference = {n: rng.normal(size=a.shape).astype(np.float32) for n, a in weights(plain).items()}
    session.set_proximal(mu, reference)
    for _ in range(4):
        session.step(X, LABELS)
        plain.train_step(X, LABELS)
        plain.lazy_reset_grad()
        for name, parameter in plain.state.parameters:
            pull = mu * (parameter.data.astype(np.float64) - reference[name])
            parameter.data[:] -= (rate * (parameter.grad + pull)).astype(np.float32)
    for name, array in weights(session).items():
        np.testing.assert_allclose(array, plain.get_parameter(name), rtol=2e-6, atol=1e-7)


def test_the_reference_is_what_the_parameters_were(tmp_path) -> None:
    """A strong pull and no learning from data bring the parameters back."""
    session = TrainingSession.from_folder(write(tmp_path, mlp(), OPTIM.SGD(), proximal=True))
    first = weights(session)
    session.set_learning_rate(0.5)
    for _ in range(3):
        session.step(X, LABELS)
    away = weights(session)
    session.set_proximal(1.0, first)
    session.set_learning_rate(1e-9)
    session.step(X, LABELS)
    assert not equal(away, first)
    # One step of gradient descent with rate 1 and µ = 1 goes exactly to w₀ − gradient.
    session.set_learning_rate(1.0)
    session.train_step(X, LABELS)
    gradients = {n: p.grad.copy() for n, p in session.state.parameters}
    session.optimizer_step()
    for name, array in weights(session).items():
        np.testing.assert_allclose(array, first[name] - gradients[name], rtol=1e-4, atol=1e-6)


def test_running_statistics_dropout_and_frozen_layers(tmp_path) -> None:
    x = np.random.default_rng(0).normal(size=(8, 1, 6, 6)).astype(np.float32)
    folder = write(tmp_path / "cnn", cnn(), OPTIM.AdamW(), proximal=True)
    session = TrainingSession.from_folder(folder)
    session.set_proximal(0.5)
    session.step(x, np.arange(8) % 3)
    names = session.input_names()
    assert names == ["input", "labels"]
    head = write(tmp_path / "head", mlp(), OPTIM.SGD(), proximal=True, requires_grad=["fc2.*"])
    session = TrainingSession.from_folder(head)
    session.set_proximal(0.5)
    session.step(X, LABELS)
    inputs = {v.name for v in onnx.load(head / "step_model.onnx").graph.input}
    assert {"fc2.weight.reference", "fc2.bias.reference", "proximal_mu"} <= inputs
    assert "fc1.weight.reference" not in inputs


def large() -> onnx.ModelProto:
    """A layer that is updated in pieces."""
    values = (0.01 * np.random.default_rng(0).normal(size=(8, 200_000))).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["input", "weight"], ["wide"]),
         helper.make_node("ReduceMean", ["wide", "axes"], ["output"], keepdims=0)],
        "large",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", 8])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["N"])],
        [numpy_helper.from_array(values, "weight"),
         numpy_helper.from_array(np.array([1]), "axes")],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@pytest.mark.parametrize("name", ["momentum", "AdamW", "clipped"])
def test_a_large_tensor(name, tmp_path) -> None:
    made = []
    for proximal in (False, True):
        artifacts.generate_artifacts(
            large(), loss=artifacts.LossType.MSELoss, optimizer=OPTIMIZERS[name](),
            artifact_directory=tmp_path / str(proximal), proximal=proximal,
        )  # fmt: skip
        session = TrainingSession.from_folder(tmp_path / str(proximal))
        session.set_proximal(0.0)
        for _ in range(3):
            session.step(X, LABELS.astype(np.float32))
        made.append(weights(session))
        if proximal:
            session.set_proximal(0.4)
            session.step(X, LABELS.astype(np.float32))
            assert not equal(made[1], weights(session))
    assert equal(*made)


@pytest.mark.parametrize("graph", ["step_model", "optimizer_model"])
@pytest.mark.parametrize("make", [mlp, cnn])
def test_parameters_are_still_written_in_place(graph, make, tmp_path) -> None:
    folder = write(tmp_path, make(), OPTIM.AdamW(), proximal=True)
    model = onnx.load(folder / f"{graph}.onnx", load_external_data=False)
    onnx.checker.check_model(model, full_check=True)
    assert {node.domain for node in model.graph.node} <= {"", "ai.onnxtrain"}
    loaded = ir.from_proto(model).graph
    inputs = {value.name: value for value in loaded.inputs}
    written = 0
    for value in loaded.outputs:
        old = inputs.get((value.name or "").removesuffix(".updated"))
        if old is not None:
            assert not late_readers(old, value), value.name
            written += 1
    assert written >= 12


def test_a_saved_state_has_no_pull(tmp_path) -> None:
    folder = write(tmp_path / "a", mlp(), OPTIM.SGD(momentum=0.9), proximal=True)
    session = TrainingSession.from_folder(folder)
    session.set_proximal(5.0)
    session.step(X, LABELS)
    session.save_checkpoint(tmp_path / "saved")
    again = TrainingSession.from_folder(folder, checkpoint=tmp_path / "saved")
    session.set_proximal(0.0)
    for each in (session, again):
        each.step(X, LABELS)
    assert equal(weights(session), weights(again))


def test_what_makes_no_sense_is_refused(tmp_path) -> None:
    with pytest.raises(ArgumentError, match="needs an optimizer"):
        write(tmp_path / "a", mlp(), None, proximal=True)
    plain = TrainingSession.from_folder(GOLDEN / "mlp")
    plain.set_proximal(0.0)
    with pytest.raises(StateError, match="proximal=True"):
        plain.set_proximal(0.1)
    session = TrainingSession.from_folder(write(tmp_path / "b", mlp(), OPTIM.SGD(), proximal=True))
    for bad in (-1.0, float("nan"), float("inf"), "much", None):
        with pytest.raises(ArgumentError, match="strength"):
            session.set_proximal(bad)
    with pytest.raises(UnknownNameError, match="no values for"):
        session.set_proximal(0.1, {})
    wrong = {name: np.zeros(3, np.float32) for name in weights(session)}
    with pytest.raises(StateError, match="shape"):
        session.set_proximal(0.1, wrong)


def test_a_model_that_has_such_a_name_already(tmp_path) -> None:
    model = mlp()
    model.graph.node[0].output[0] = model.graph.node[1].input[0] = "proximal_mu"
    with pytest.raises(OnnxTrainError, match="proximal_mu"):
        write(tmp_path, model, OPTIM.SGD(), proximal=True)
