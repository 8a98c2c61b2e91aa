"""A training goes on in the other package: from here to ONNX Runtime 1.19.2, and back.

Both train the same model with their own artifacts, from the same batches; the numbers agree to
rounding.
"""

from __future__ import annotations

import numpy as np
import pytest
from test_checkpoint_interop import pytestmark, upstream
from upstream_program import batches

from onnxtrain import artifacts
from onnxtrain.api import TrainingSession
from onnxtrain.format.checkpoint.file import read_checkpoint

RATE = 0.01
with_each = pytest.mark.parametrize("folders", ["AdamW", "SGD"], indirect=True)
with_adamw = pytest.mark.parametrize("folders", ["AdamW"], indirect=True)
__all__ = ["pytestmark"]


@pytest.fixture(scope="module")
def folders(request, tmp_path_factory):
    """The artifacts of one model, made by ONNX Runtime and made here."""
    theirs, ours = (tmp_path_factory.mktemp(name) for name in ("theirs", "ours"))
    upstream("generate", theirs, request.param)
    artifacts.generate_artifacts(
        theirs / "model.onnx",
        requires_grad=["w1", "b1", "w2"],
        frozen_params=["scale"],
        loss=artifacts.LossType.MSELoss,
        optimizer=artifacts.OptimType[request.param],
        artifact_directory=ours,
    )
    return theirs, ours


def train(folder, checkpoint, steps, saved=None):
    """Train as `upstream_program.train` does; what it answers."""
    session = TrainingSession.from_folder(folder, checkpoint=checkpoint)
    session.set_learning_rate(RATE)
    losses = [float(session.step(*batch)) for batch in batches(steps)]
    if saved is not None:
        session.save_checkpoint(saved)
    trained = {name: session.get_parameter(name).tolist() for name in ("w1", "b1", "w2")}
    return {"losses": losses, "trained": trained}


def assert_close(ours, theirs) -> None:
    np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=2e-5)
    assert len(set(ours["losses"])) > 1
    for name, value in ours["trained"].items():
        np.testing.assert_allclose(value, theirs["trained"][name], rtol=2e-5, atol=1e-6)


@with_each
def test_both_train_alike(folders) -> None:
    theirs, ours = folders
    assert_close(
        train(ours, ours / "checkpoint", 10), upstream("train", theirs, "checkpoint", 10, "ten")
    )


@with_each
def test_from_here_to_there(folders) -> None:
    theirs, ours = folders
    train(ours, ours / "checkpoint", 5, theirs / "from here")
    there = upstream("train", theirs, "from here", 4, "gone on")
    assert_close(train(ours, theirs / "from here", 4), there)
    # The state of the optimizer went over: without it the next steps are others.
    assert read_checkpoint(theirs / "gone on").optimizer_groups["group0"].step == 9


@with_each
def test_from_there_to_here(folders) -> None:
    theirs, ours = folders
    upstream("train", theirs, "checkpoint", 5, "from there")
    here = train(ours, theirs / "from there", 4, ours / "gone on")
    assert_close(here, upstream("train", theirs, "from there", 4, "stayed"))
    group = read_checkpoint(ours / "gone on").optimizer_groups["group0"]
    stayed = read_checkpoint(theirs / "stayed").optimizer_groups["group0"]
    assert group.step == stayed.step == 9
    for name, tensors in group.states.items():
        for mine, other in zip(tensors, stayed.states[name], strict=True):
            if mine.any() or other.any():  # SGD has no state, and zeros stand for it
                np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-7)


@with_adamw
def test_there_and_back_and_there_again(folders) -> None:
    theirs, ours = folders
    upstream("train", theirs, "checkpoint", 3, "one")
    train(ours, theirs / "one", 3, theirs / "two")
    last = upstream("train", theirs, "two", 3, "three")
    train(ours, ours / "checkpoint", 3, ours / "a")
    train(ours, ours / "a", 3, ours / "b")
    assert_close(train(ours, ours / "b", 3), last)


@with_adamw
def test_without_the_state_of_the_optimizer(folders) -> None:
    theirs, ours = folders
    session = TrainingSession.from_folder(ours)
    session.step(*batches(1)[0])
    session.add_property("note", "from here")
    session.save_checkpoint(theirs / "small", include_optimizer_state=False)
    assert upstream("describe", theirs / "small", "note")["properties"] == {"note": "from here"}
    assert_close(train(ours, theirs / "small", 3), upstream("train", theirs, "small", 3, "more"))
