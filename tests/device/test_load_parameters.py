"""Parameters by name, some or all of them, and optimizers that begin anew."""

from pathlib import Path

import numpy as np
import pytest

from onnxtrain import TrainingSession
from onnxtrain.errors import CheckpointError, StateError, UnknownNameError
from onnxtrain.format.checkpoint.content import OptimizerGroup

GOLDEN = Path(__file__).parents[1] / "golden"
GRAPHS = ("training_model", "eval_model", "optimizer_model", "step_model")
X = np.random.default_rng(0).normal(size=(12, 8)).astype(np.float32)
LABELS = X[:, :3].argmax(axis=1)


def session(name: str = "mlp") -> TrainingSession:
    return TrainingSession.from_folder(GOLDEN / name)


def nominal(name: str) -> TrainingSession:
    folder = GOLDEN / name
    return TrainingSession(folder / "nominal_checkpoint", *(folder / f"{g}.onnx" for g in GRAPHS))


def values(of: TrainingSession) -> dict[str, np.ndarray]:
    return {name: parameter.data.copy() for name, parameter in of.state.parameters}


def test_some_parameters_are_set() -> None:
    held = session()
    before = values(held)
    held.load_parameters({"fc2.bias": np.array([1, 2, 3], np.float32)})
    after = values(held)
    assert after["fc2.bias"].tolist() == [1, 2, 3]
    assert all(np.array_equal(after[n], before[n]) for n in before if n != "fc2.bias")


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("fc3.bias", np.zeros(3, np.float32), UnknownNameError),
        ("fc2.bias", np.zeros(4, np.float32), StateError),
        ("fc2.bias", np.zeros(3, np.float64), StateError),
        ("fc2.bias", [0, 0, 0], StateError),
    ],
)
def test_nothing_is_set_if_one_does_not_fit(name, value, error) -> None:
    for held in (session(), session("head")):
        before = values(held)
        with pytest.raises(error):
            held.load_parameters({"fc2.weight": np.zeros((3, 16), np.float32), name: value})
        assert all(np.array_equal(array, before[n]) for n, array in values(held).items())


@pytest.mark.parametrize("name", ["mlp", "head"])
def test_a_nominal_checkpoint_becomes_complete(name) -> None:
    full, bare = session(name), nominal(name)
    given = values(full)
    assert bare.module.shape_of("fc2.weight") == (3, 16)
    with pytest.raises(StateError, match="no values for"):
        bare.load_parameters({"fc2.bias": given["fc2.bias"]})
    with pytest.raises(StateError, match="shape"):
        bare.load_parameters({**given, "fc2.bias": np.zeros(4, np.float32)})
    with pytest.raises(StateError, match="nominal"):
        bare.step(X, LABELS)
    bare.load_parameters(given)
    for _ in range(3):
        assert full.step(X, LABELS)[0] == bare.step(X, LABELS)[0]
    given["fc2.bias"][:] = 7  # a copy was taken
    assert not (bare.get_parameter("fc2.bias") == 7).any()


def test_statistics_are_told_from_frozen_parameters() -> None:
    assert set(session("cnn").module.statistics) == {"bn.mean", "bn.var"}
    assert session("head").module.statistics == ()


@pytest.mark.parametrize("name", ["mlp", "head"])
def test_an_optimizer_begins_anew_or_goes_on(name) -> None:
    held, fresh = session(name), session(name)
    first = values(held)
    for _ in range(4):
        held.step(X, LABELS)
    assert held.optimizer is not None
    group = held.optimizer.group()
    kept = OptimizerGroup(
        group.step, 0.0, {n: [np.array(m) for m in moments] for n, moments in group.states.items()}
    )
    middle = values(held)
    held.step(X, LABELS)
    wanted = values(held)
    held.load_parameters({n: a for n, a in first.items() if held.state.parameters[n].requires_grad})
    held.optimizer.reset()
    assert held.optimizer.step_count == 0
    for _ in range(4):
        assert held.step(X, LABELS)[0] == fresh.step(X, LABELS)[0]
    held.load_parameters(
        {n: a for n, a in middle.items() if held.state.parameters[n].requires_grad}
    )
    held.optimizer.reset(kept)
    held.step(X, LABELS)
    assert all(np.array_equal(array, wanted[n]) for n, array in values(held).items())


def test_an_optimizer_does_not_go_on_from_another() -> None:
    held = session()
    assert held.optimizer is not None
    held.step(X, LABELS)
    before = [m.copy() for moments in held.optimizer.group().states.values() for m in moments]
    sgd = session("head").optimizer
    assert sgd is not None
    with pytest.raises(CheckpointError):
        held.optimizer.reset(sgd.group())
    group = held.optimizer.group()
    states = {n: [np.zeros(1, np.float32), m[1]] for n, m in group.states.items()}
    with pytest.raises(CheckpointError, match="another shape"):
        held.optimizer.reset(OptimizerGroup(3, 0.0, states))
    after = [m for moments in held.optimizer.group().states.values() for m in moments]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
