"""Training on providers that have their own memory: what they are given is copied when it is bound.

No such provider is here. The wrapper below copies at the same moment, so that a value which changes
in the memory of the process is not seen unless it is bound again.
"""

import numpy as np
import onnxruntime as ort
import pytest
from small_runs import GOLDEN, assert_same, open_session, parameters, samples

from onnxtrain.api import CheckpointState, Module, Optimizer, TrainingSession
from onnxtrain.device.random_state import set_seed

# The stock package has it; it computes nothing here, but it is not the CPU.
ELSEWHERE = ["AzureExecutionProvider", "CPUExecutionProvider"]

pytestmark = pytest.mark.skipif(
    ELSEWHERE[0] not in ort.get_available_providers(),
    reason="this onnxruntime has no second provider",
)


class CopyingBinding:
    """A binding that takes inputs as they are when they are bound."""

    def __init__(self, binding) -> None:
        self._binding = binding

    def bind_ortvalue_input(self, name, value) -> None:
        copy = ort.OrtValue.ortvalue_from_numpy(np.array(value.numpy()))
        self._binding.bind_ortvalue_input(name, copy)

    def __getattr__(self, name):
        return getattr(self._binding, name)


@pytest.fixture
def copying(monkeypatch):
    made, run = ort.InferenceSession.io_binding, ort.InferenceSession.run_with_iobinding

    def bind(session):
        is_elsewhere = session.get_providers() != ELSEWHERE[1:]
        return CopyingBinding(made(session)) if is_elsewhere else made(session)

    monkeypatch.setattr(ort.InferenceSession, "io_binding", bind)
    monkeypatch.setattr(
        ort.InferenceSession,
        "run_with_iobinding",
        lambda self, binding, *options: run(self, getattr(binding, "_binding", binding), *options),
    )


def elsewhere(model="mlp"):
    set_seed(1)
    return TrainingSession.from_folder(GOLDEN / model, device=ELSEWHERE)


def here(model="mlp"):
    set_seed(1)
    return open_session(model)


@pytest.mark.parametrize("model", ["mlp", "head", "cnn"])
def test_steps_with_a_schedule_are_those_of_the_cpu(copying, model) -> None:
    sessions = [here(model), elsewhere(model)]
    losses = []
    for session in sessions:
        session.set_learning_rate(0.01)
        session.register_linear_lr_scheduler(1, 6, 0.01)
        found = []
        for index in range(5):
            found.append(float(session.step(*samples(16, model, index))[0]))
            session.scheduler_step()
        losses.append(found)
    assert losses[0] == losses[1]
    assert_same(*sessions)


def test_no_rate_no_change(copying) -> None:
    session = elsewhere()
    session.step(*samples())
    session.set_learning_rate(0.0)
    before = parameters(session)
    session.step(*samples(seed=1))
    after = parameters(session)
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_module_and_optimizer(copying) -> None:
    """Accumulated gradients, the flag that resets them, rate and step count."""
    found = []
    for device in ("cpu", ELSEWHERE):
        folder = GOLDEN / "mlp"
        state = CheckpointState.load_checkpoint(folder / "checkpoint")
        module = Module(folder / "training_model.onnx", state, device=device)
        optimizer = Optimizer(folder / "optimizer_model.onnx", module)
        module.train()
        for index in range(3):
            module(*samples(16, seed=index))
            module(*samples(16, seed=index + 7))
            optimizer.set_learning_rate(0.01 / (index + 1))
            optimizer.step()
            module.lazy_reset_grad()
        found.append({name: np.array(p.data) for name, p in module.state.parameters})
    assert all(np.array_equal(found[0][name], found[1][name]) for name in found[0])
