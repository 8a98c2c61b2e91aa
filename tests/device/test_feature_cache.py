"""Frozen layers run once over the data, and training gives the same numbers as without that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnxtrain
from onnxtrain.api import TrainingSession
from onnxtrain.device.loop.feature_cache import FrozenFeatures
from onnxtrain.errors import ArgumentError

GOLDEN = Path(__file__).parents[1] / "golden"


def data(count: int = 22, width: tuple[int, ...] = (8,)) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return rng.standard_normal((count, *width)).astype(np.float32), rng.integers(0, 3, count)


def train(**options: Any) -> tuple[list[float], dict[str, np.ndarray], TrainingSession]:
    session = TrainingSession.from_folder(GOLDEN / "head")
    history = onnxtrain.fit(
        session, data(), epochs=3, batch_size=4, seed=7, progress=False, **options
    )
    values = {name: parameter.data.copy() for name, parameter in session.state.parameters}
    return list(history.losses), values, session


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_same_numbers(accumulate: int) -> None:
    losses, values, _ = train(accumulate=accumulate)
    cached_losses, cached_values, _ = train(accumulate=accumulate, cache_features=True)
    assert cached_losses == losses and same(cached_values, values)


def test_features_in_files(tmp_path: Path) -> None:
    losses, values, _ = train()
    cached_losses, cached_values, _ = train(cache_features=tmp_path / "features")
    assert cached_losses == losses and same(cached_values, values)
    (file,) = (tmp_path / "features").glob("*.npy")
    assert np.load(file).shape == (22, 16)


def test_the_session_is_as_before() -> None:
    *_, session = train(cache_features=True)
    assert session.input_names() == ["input", "labels"]
    x, labels = data(5)
    assert np.isfinite(session.step(x, labels)[0])


def test_evaluation_takes_samples() -> None:
    session = TrainingSession.from_folder(GOLDEN / "head")
    history = onnxtrain.fit(
        session, data(), evaluate=data(9), metrics="accuracy", cache_features=True, progress=False
    )
    assert 0 <= history.epochs[-1]["accuracy"] <= 1


def test_what_crosses() -> None:
    features = FrozenFeatures(TrainingSession.from_folder(GOLDEN / "head"))
    assert features.inputs == ("input",) and features.values == ("active",)


@pytest.mark.parametrize("folder", ["mlp", "cnn"])
def test_nothing_frozen(folder: str) -> None:
    session = TrainingSession.from_folder(GOLDEN / folder)
    width = (8,) if folder == "mlp" else (1, 6, 6)
    with pytest.raises(ArgumentError, match="no frozen features"):
        onnxtrain.fit(session, data(width=width), cache_features=True, progress=False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([data()], "as arrays"),
        ((data()[0],), "1 arrays for the inputs input, labels"),
        ({"input": data()[0]}, "no array for the input 'labels'"),
        ((data()[0], data(5)[1]), "different numbers of samples: input 22, labels 5"),
    ],
)
def test_bad_data(given: Any, message: str) -> None:
    session = TrainingSession.from_folder(GOLDEN / "head")
    with pytest.raises(ArgumentError, match=message):
        onnxtrain.fit(session, given, cache_features=True, progress=False)


# ---- passes --------------------------------------------------------------------------------------


def test_micro_batches_make_the_same_update() -> None:
    sessions = [TrainingSession.from_folder(GOLDEN / "mlp") for _ in range(2)]
    for session, passes in zip(sessions, (1, 4), strict=True):
        onnxtrain.fit(
            session, data(24), epochs=2, batch_size=8, micro_batch=passes, seed=1, progress=False
        )
    assert sessions[0].optimizer.step_count == sessions[1].optimizer.step_count == 6
    for name, parameter in sessions[0].state.parameters:
        np.testing.assert_allclose(
            sessions[1].state.parameters[name].data, parameter.data, rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(
    ("given", "passes", "message"),
    [(data(), 3, "cannot be divided"), ([data()], 2, "batches of arrays"), (data(), 0, "micro")],
)
def test_bad_passes(given: Any, passes: int, message: str) -> None:
    session = TrainingSession.from_folder(GOLDEN / "mlp")
    with pytest.raises(ArgumentError, match=message):
        onnxtrain.fit(session, given, batch_size=8, micro_batch=passes, progress=False)
