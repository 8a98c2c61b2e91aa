"""Whole networks train the same with the library and without, however sessions are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import onnxtrain
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.cli.demo.network import network
from onnxtrain.offline.optimizers import late_gradients

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 1, 8, 8)).astype(np.float32)
LABELS = RNG.integers(0, 10, 16)


@pytest.fixture(scope="module", params=["usual", "late"])
def artifacts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifacts as they are, and with all gradients that can be computed in the If of updates."""
    folder = tmp_path_factory.mktemp("steps") / "artifacts"
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "late":
            patch.setattr(late_gradients, "_pays", lambda size, kept: True)
            patch.setattr(late_gradients, "_LARGE", 100)
        onnxtrain.prepare(network(), folder)
    return folder


@pytest.fixture(autouse=True)
def needs_library(native_library: Path | None) -> None:
    if native_library is None:
        pytest.skip("there is no compiler to build the native library")


def losses(artifacts: Path, **options: Any) -> tuple[list[float], tuple[str, ...]]:
    with onnxtrain.TrainingSession(artifacts, **options) as session:
        session.set_learning_rate(0.01)
        return [float(session.step(X, LABELS)[0]) for _ in range(4)], session.native


def test_a_step_is_the_same_step(artifacts: Path) -> None:
    plain, nothing = losses(artifacts, native=False)
    found, kernels = losses(artifacts)
    assert nothing == ()
    assert "AdamW" in kernels
    np.testing.assert_allclose(found, plain, rtol=1e-4)
    assert losses(artifacts)[0] == found


@pytest.mark.parametrize("options", [ort.SessionOptions(), ort.SessionOptions], ids=["one", "new"])
def test_with_options_of_the_user(artifacts: Path, options: Any) -> None:
    plain, _ = losses(artifacts, native=False)
    found, kernels = losses(artifacts, session_options=options)
    assert kernels
    np.testing.assert_allclose(found, plain, rtol=1e-4)


def test_module_and_optimizer(artifacts: Path) -> None:
    plain, _ = losses(artifacts, native=False)
    state = CheckpointState.load_checkpoint(artifacts / "checkpoint")
    module = Module(artifacts / "training_model.onnx", state, artifacts / "eval_model.onnx")
    optimizer = Optimizer(artifacts / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(0.01)
    assert "AdamW" in module.native
    found = []
    for _ in range(4):
        found.append(float(module(X, LABELS)[0]))
        optimizer.step()
        module.lazy_reset_grad()
    np.testing.assert_allclose(found, plain, rtol=1e-4)


def test_plain_artifacts_have_no_kernels(tmp_path: Path) -> None:
    onnxtrain.prepare(network(), tmp_path / "plain", native=False)
    assert losses(tmp_path / "plain")[1] == ()
