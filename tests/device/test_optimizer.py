"""Optimizer: steps, learning rate, and the state that a checkpoint has of it."""

import inspect

import numpy as np
import pytest
from small_runs import GOLDEN, open_module, open_session, samples

from onnxtrain.api import CheckpointState, LinearLRScheduler, Module, Optimizer
from onnxtrain.errors import ArgumentError, CheckpointError, ModelError, StateError
from onnxtrain.format.checkpoint.content import OptimizerGroup
from onnxtrain.format.checkpoint.file import read_checkpoint, write_checkpoint


def graph(model):
    return GOLDEN / model / "optimizer_model.onnx"


def make(model="mlp", checkpoint=None):
    """A module and its optimizer."""
    state = CheckpointState.load_checkpoint(checkpoint or GOLDEN / model / "checkpoint")
    module = Module(GOLDEN / model / "training_model.onnx", state)
    return module, Optimizer(graph(model), module)


def values(module):
    return {name: parameter.data.copy() for name, parameter in module.state.parameters}


# ---- construction --------------------------------------------------------------------------------


def test_arguments_have_upstreams_names() -> None:
    assert list(inspect.signature(Optimizer).parameters) == ["optimizer_uri", "module"]
    with pytest.raises(TypeError, match="module is a Module, not str"):
        Optimizer(graph("mlp"), "module")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("nowhere", ModelError, "no model at"),
        (GOLDEN / "mlp" / "eval_model.onnx", ModelError, "no input 'learning_rate'"),
        (graph("cnn"), CheckpointError, "is of generation .* do not belong together"),
    ],
)
def test_a_graph_that_is_no_optimizer_of_the_module(source, error, message) -> None:
    with pytest.raises(error, match=message):
        Optimizer(source, open_module())


@pytest.mark.parametrize("model", ["cnn", "head"])
def test_a_graph_of_no_generation_that_is_no_optimizer_of_the_module(model) -> None:
    onnx = pytest.importorskip("onnx", reason="it edits the graph")
    edited = onnx.load(graph(model))
    del edited.metadata_props[:]
    with pytest.raises(CheckpointError, match=r"does not update 'fc1.weight'"):
        Optimizer(edited.SerializeToString(), open_module())


def test_a_graph_that_updates_more() -> None:
    with pytest.raises(CheckpointError, match="do not belong together"):
        Optimizer(graph("mlp"), open_module("head"))


# ---- learning rate -------------------------------------------------------------------------------


def test_the_learning_rate_is_a_float32() -> None:
    _, optimizer = make()
    assert optimizer.get_learning_rate() == float(np.float32(0.001))
    optimizer.set_learning_rate(0.1)
    assert optimizer.get_learning_rate() == float(np.float32(0.1))
    optimizer.set_learning_rate(np.float64(0.5))
    assert optimizer.get_learning_rate() == 0.5
    optimizer.set_learning_rate(0)
    assert optimizer.get_learning_rate() == 0


@pytest.mark.parametrize("rate", ["fast", None, float("nan"), float("inf"), 1e300, [0.1, 0.2]])
def test_what_is_no_learning_rate(rate) -> None:
    _, optimizer = make()
    with pytest.raises(ArgumentError, match="learning rate"):
        optimizer.set_learning_rate(rate)
    assert optimizer.get_learning_rate() == float(np.float32(0.001))


def test_the_step_uses_the_learning_rate() -> None:
    for rate in (0.0, 0.125, 0.5):
        module, optimizer = make("head")
        optimizer.set_learning_rate(rate)
        before = values(module)
        module(*samples())
        optimizer.step()
        for name in ("fc2.weight", "fc2.bias"):
            parameter = module.state.parameters[name]
            expected = before[name] - np.float32(rate) * parameter.grad
            np.testing.assert_allclose(parameter.data, expected, rtol=1e-6, atol=1e-7)


# ---- steps ---------------------------------------------------------------------------------------


def test_a_step_before_any_gradient_changes_nothing() -> None:
    module, optimizer = make()
    before = values(module)
    assert optimizer.step() is None
    assert optimizer.step_count == 1
    for name, value in values(module).items():
        assert np.array_equal(value, before[name])


def test_a_step_can_be_taken_twice_with_the_same_gradients() -> None:
    module, optimizer = make("head")
    module(*samples())
    before = values(module)
    for _ in range(2):
        optimizer.step()
    # The second one is momentum 0.9 of the first, and the gradient once more.
    grad = module.state.parameters["fc2.bias"].grad
    expected = before["fc2.bias"] - np.float32(0.001) * (grad + 1.9 * grad)
    np.testing.assert_allclose(values(module)["fc2.bias"], expected, rtol=1e-6)
    assert np.array_equal(values(module)["fc1.weight"], before["fc1.weight"])


def test_steps_are_counted_and_told_to_the_graph() -> None:
    """With bias correction, the first step of AdamW has the size of the learning rate."""
    module, optimizer = make()
    before = values(module)
    module(*samples())
    optimizer.step()
    moved = before["fc2.bias"] - values(module)["fc2.bias"]
    np.testing.assert_allclose(np.abs(moved), 0.001, rtol=1e-2)
    assert optimizer.step_count == 1


# ---- two optimizers ------------------------------------------------------------------------------


def test_a_second_optimizer_goes_on_with_the_state_of_the_first() -> None:
    module, optimizer = make()
    expected_module, expected = make()
    for one in (optimizer, expected):
        one.set_learning_rate(0.05)
    for current in (optimizer, None, None):
        current = current or Optimizer(graph("mlp"), module)
        for mine, theirs in ((module, current), (expected_module, expected)):
            mine(*samples())
            theirs.step()
            mine.lazy_reset_grad()
        assert current.get_learning_rate() == expected.get_learning_rate()
        assert current.step_count == expected.step_count
    for name, value in values(module).items():
        assert np.array_equal(value, values(expected_module)[name])


def test_a_second_optimizer_of_another_kind_is_refused() -> None:
    session = open_session("head")
    state = session.state
    content = state._training.content(include_optimizer_state=False)
    assert content.optimizer_groups == {}
    session.step(*samples())
    other = GOLDEN / "head" / "training_model.onnx"
    with pytest.raises(ModelError, match="no input 'learning_rate'"):
        Optimizer(other, session.module)
    session.step(*samples())  # the first one is as it was
    assert session.optimizer.step_count == 2


# ---- the state in a checkpoint -------------------------------------------------------------------


def saved(tmp_path, model="mlp"):
    session = open_session(model, learning_rate=0.25)
    for _ in range(3):
        session.step(*samples(model=model))
    session.save_checkpoint(tmp_path / "c")
    return session, tmp_path / "c"


def test_the_learning_rate_comes_back(tmp_path) -> None:
    """Upstream always went on with 0.001."""
    _, path = saved(tmp_path)
    _, optimizer = make(checkpoint=path)
    assert optimizer.get_learning_rate() == 0.25 and optimizer.step_count == 3


def test_without_the_state_of_the_optimizer_all_starts_anew(tmp_path) -> None:
    session, path = saved(tmp_path)
    session.save_checkpoint(path, include_optimizer_state=False)
    module, optimizer = make(checkpoint=path)
    assert optimizer.get_learning_rate() == float(np.float32(0.001)) and optimizer.step_count == 0
    assert np.array_equal(
        module.state.parameters["fc1.weight"].data, session.get_parameter("fc1.weight")
    )


def test_a_state_passes_through_a_program_without_an_optimizer(tmp_path) -> None:
    """One that loads, changes properties and saves loses nothing."""
    _, path = saved(tmp_path)
    state = CheckpointState.load_checkpoint(path)
    state.properties["note"] = "seen"
    CheckpointState.save_checkpoint(state, tmp_path / "d", include_optimizer_state=True)
    before, after = (read_checkpoint(p).optimizer_groups["group0"] for p in (path, tmp_path / "d"))
    assert after.step == before.step == 3
    assert all(np.array_equal(after.states[n], before.states[n]) for n in before.states)
    assert make(checkpoint=tmp_path / "d")[1].get_learning_rate() == 0.25


def rewritten(path, change):
    """The checkpoint with a changed group of the optimizer."""
    content = read_checkpoint(path)
    group = content.optimizer_groups["group0"]
    content.optimizer_groups["group0"] = change(group)
    write_checkpoint(path, content)
    return path


def without(name):
    return lambda g: OptimizerGroup(g.step, 0.1, {n: s for n, s in g.states.items() if n != name})


def with_states(change):
    return lambda g: OptimizerGroup(g.step, 0.1, {n: change(s) for n, s in g.states.items()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("fc2.bias"), "none for the parameter 'fc2.bias'"),
        (with_states(lambda s: s[:1]), "keeps 2 tensors for each parameter, and .* has 1"),
        (with_states(lambda s: [*s, s[0]]), "keeps 2 tensors for each parameter, and .* has 3"),
        (with_states(lambda s: [s[0].T, s[1].T]), "another shape or type"),
        (with_states(lambda s: [s[0].astype(np.float64), s[1]]), "another shape or type"),
    ],
    ids=["missing", "one state", "three states", "shape", "type"],
)
def test_the_state_of_another_optimizer_is_refused(change, message, tmp_path) -> None:
    _, path = saved(tmp_path)
    state = CheckpointState.load_checkpoint(rewritten(path, change))
    module = Module(GOLDEN / "mlp" / "training_model.onnx", state)
    for _ in range(2):  # the second attempt does not quietly start from zero
        with pytest.raises(CheckpointError, match=message):
            Optimizer(graph("mlp"), module)


def test_what_onnx_runtime_saves_for_sgd_is_taken(tmp_path) -> None:
    """It saves one tensor of zeros for each parameter, which it never uses."""
    _, path = saved(tmp_path, "head")
    rewritten(path, with_states(lambda s: [np.zeros_like(s[0])]))
    module, optimizer = make("head", checkpoint=path)
    assert optimizer.step_count == 3
    module(*samples())
    optimizer.step()


# ---- schedulers ----------------------------------------------------------------------------------


def test_the_linear_scheduler_takes_the_warm_up_first() -> None:
    """Upstream's Python swapped the two counts: it went 0, 0.1, 0.2 …"""
    module, optimizer = make()
    scheduler = LinearLRScheduler(optimizer, 2, 10, 1.0)
    rates = [optimizer.get_learning_rate()]
    for _ in range(11):
        module(*samples(4))
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.get_learning_rate())
    assert rates == [0, 0.5, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0, 0]


def test_a_scheduler_goes_on_from_the_checkpoint(tmp_path) -> None:
    session = open_session()
    session.register_linear_lr_scheduler(2, 10, 1.0)
    for _ in range(3):
        session.step(*samples())
        session.scheduler_step()
    session.save_checkpoint(tmp_path / "c")
    _, optimizer = make(checkpoint=tmp_path / "c")
    assert optimizer.get_learning_rate() == 0.875 and optimizer.initial_lr == 1.0
    scheduler = LinearLRScheduler(optimizer, 2, 10, 1.0)
    assert optimizer.get_learning_rate() == 0.875
    optimizer.step()
    scheduler.step()
    assert optimizer.get_learning_rate() == 0.75


# ---- the graph of a whole step -------------------------------------------------------------------


def test_the_graph_of_a_step_is_no_optimizer() -> None:
    optimizer = Optimizer(GOLDEN / "mlp" / "step_model.onnx", open_module())
    assert optimizer.get_learning_rate() == pytest.approx(0.001)
    with pytest.raises(StateError, match="takes no gradients"):
        optimizer.step()
