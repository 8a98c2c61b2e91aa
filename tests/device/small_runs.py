"""Sessions of the small golden models, and data that they can learn."""

from pathlib import Path

import numpy as np

from onnxtrain.api import CheckpointState, Module
from onnxtrain.device.session import TrainingSession

GOLDEN = Path(__file__).parents[1] / "golden"
SHAPES = {"mlp": (8,), "head": (8,), "cnn": (1, 6, 6), "int8": (1, 6, 6)}


def open_session(model="mlp", checkpoint=None, learning_rate=None):
    """A session of a golden folder, at its start or from another checkpoint."""
    session = TrainingSession.from_folder(GOLDEN / model, checkpoint=checkpoint)
    if learning_rate is not None:
        session.set_learning_rate(learning_rate)
    return session


def open_module(model="mlp", checkpoint="checkpoint", evaluation=True, **options):
    """A module of a golden folder, with or without its evaluation graph."""
    folder = GOLDEN / model
    state = CheckpointState.load_checkpoint(folder / checkpoint)
    eval_model = folder / "eval_model.onnx" if evaluation else None
    return Module(folder / "training_model.onnx", state, eval_model, **options)


def gradients(module):
    """Copies of the accumulated gradients, by name of the parameter."""
    return {n: p.grad.copy() for n, p in module.state.parameters if p.requires_grad}


def samples(count=64, model="mlp", seed=0):
    """Inputs and labels: the class is the largest of the first three numbers."""
    inputs = np.random.default_rng(seed).normal(size=(count, *SHAPES[model])).astype(np.float32)
    return inputs, inputs.reshape(count, -1)[:, :3].argmax(axis=1).astype(np.int64)


def reopened(session, model="mlp"):
    """Another session that goes on from what a checkpoint of the first would hold."""
    return open_session(model, session.state.to_bytes(include_optimizer_state=True))


def parameters(session):
    """Copies of all parameters, by name."""
    return {name: np.array(parameter.data) for name, parameter in session.state.parameters}


def _plain(session):
    """All that a checkpoint holds of a session, as one dictionary."""
    content = session.state._training.content(include_optimizer_state=True)
    group = content.optimizer_groups["group0"]
    held = {**content.trainable, **content.frozen, "step": group.step}
    held |= {f"{name} moments": np.stack(tensors) for name, tensors in group.states.items()}
    return held | {"learning rate": session.get_learning_rate()}


def assert_same(one, other):
    """Parameters, moments, step and learning rate of two sessions are the same to the bit."""
    a, b = _plain(one), _plain(other)
    assert a.keys() == b.keys()
    for name, value in a.items():
        np.testing.assert_array_equal(b[name], value, err_msg=name)


class StopAt:
    """A callback that ends the run after a step."""

    def __init__(self, step) -> None:
        self.step = step

    def on_step_end(self, run) -> None:
        if run.step == self.step:
            run.stop()
