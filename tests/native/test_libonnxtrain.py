"""libonnxtrain with the kernels inside: losses and checkpoints of Python with the same kernels."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import pytest

import onnxtrain
from onnxtrain.device.random_state import set_seed

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / name) for name in ("capi", "device", "golden")]

import make_artifacts  # noqa: E402
from small_runs import samples  # noqa: E402
from upstream_table import Host, Session  # noqa: E402

MODELS = {"mlp": make_artifacts.mlp, "cnn": make_artifacts.cnn}


@pytest.fixture
def host(built: Path | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """A program whose kernels record their calls in the folder of the test."""
    library = None if built is None else built.parent / "libonnxtrain.so"
    if library is None or not library.exists():
        pytest.skip("there is no build of libonnxtrain with kernels")
    recorded = tmp_path / "calls"
    recorded.mkdir()
    monkeypatch.setenv("ONNXTRAIN_RECORD", str(recorded))
    return Host(library)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("fused", [True, False])
def test_kernels_run_in_c_as_in_python(host: Host, tmp_path: Path, model: str, fused: bool) -> None:
    folder = tmp_path / "artifacts"
    onnxtrain.prepare(MODELS[model](), folder, loss="cross_entropy", optimizer="adamw")
    set_seed(7)
    host.train("SetSeed", ctypes.c_int64(7))
    ours, theirs = Session(host, folder, fused=fused), onnxtrain.TrainingSession(folder)
    try:
        for index in range(5):
            losses = [_loss(session, index, model, fused) for session in (ours, theirs)]
            assert losses[0] == losses[1]
        ours.state.save(tmp_path / "cpp", True)
        theirs.save_checkpoint(tmp_path / "python", include_optimizer_state=True)
        assert (tmp_path / "cpp").read_bytes() == (tmp_path / "python").read_bytes()
    finally:
        ours.close()
    assert "AdamW" in theirs.native


def _loss(session: Any, seed: int, model: str, fused: bool) -> float:
    """The loss of a step, by one call or by the three of ONNX Runtime's interface."""
    data = samples(16, model, seed=seed)
    if fused:
        made = session.step(*data)
    else:
        made = session.train_step(*data)
        session.optimizer_step()
        session.lazy_reset_grad()
    return float(made[0] if isinstance(made, tuple) else made)  # Python returns scores, too


def test_kernels_of_the_library_are_called(host: Host, tmp_path: Path) -> None:
    folder = tmp_path / "artifacts"
    onnxtrain.prepare(make_artifacts.cnn(), folder, loss="cross_entropy", optimizer="adamw")
    session = Session(host, folder)
    session.step(*samples(16, "cnn"))
    session.close()
    assert any((tmp_path / "calls").iterdir())
