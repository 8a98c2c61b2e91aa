"""Frozen layers run once over the data, and training gives the same numbers as without that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnxtrain
from onnxtrain.api import TrainingSession
from onnxtrain.device.loop.feature_cache import FrozenFeatures
from onnxtrain.errors import ArgumentError, InputError

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
        session, data(), validation=data(9), metrics="accuracy", cache_features=True, progress=False
    )
    assert 0 <= history.epochs[-1]["accuracy"] <= 1


def test_what_crosses() -> None:
    given = dict(zip(("input", "labels"), data(), strict=True))
    features = FrozenFeatures(TrainingSession.from_folder(GOLDEN / "head"), given)
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
        ((data()[0],), "data has 1 arrays, and the model has 2 inputs: input, labels"),
        ({"input": data()[0]}, "data lacks 'labels'"),
        ((data()[0], data(5)[1]), "'input' has 22, 'labels' has 5"),
    ],
)
def test_bad_data(given: Any, message: str) -> None:
    session = TrainingSession.from_folder(GOLDEN / "head")
    with pytest.raises(ArgumentError, match=message):
        onnxtrain.fit(session, given, cache_features=True, progress=False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((data()[0].astype(np.float64) * 1e-60, data()[1]), "'input' is float32, and .* at"),
        ((data()[0], data()[1].astype(np.float32) + 0.5), "'labels' is int64, but the array is"),
        ((data()[0][:, :7], data()[1]), "'input' has the shape"),
    ],
)
def test_inputs_that_training_refuses_are_refused_alike(given: Any, message: str) -> None:
    said = []
    for cache in (False, True):
        session = TrainingSession.from_folder(GOLDEN / "head")
        with pytest.raises(InputError, match=message) as caught:
            onnxtrain.fit(session, given, cache_features=cache, shuffle=False, progress=False)
        said.append(str(caught.value))
    assert said[0] == said[1]


# ---- micro-batches -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 8, 100])
@pytest.mark.parametrize("count", [24, 21])
@pytest.mark.parametrize("others", [{}, {"drop_last": True}, {"accumulate": 2}], ids=str)
def test_micro_batches_make_the_same_update(size: int, count: int, others: dict[str, Any]) -> None:
    sessions = [TrainingSession.from_folder(GOLDEN / "mlp") for _ in range(2)]
    losses = [
        onnxtrain.fit(
            session,
            data(count),
            epochs=2,
            batch_size=8,
            micro_batch_size=one,
            seed=1,
            progress=False,
            **others,
        ).losses
        for session, one in zip(sessions, (None, size), strict=True)
    ]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    for name, parameter in sessions[0].state.parameters:
        np.testing.assert_allclose(
            sessions[1].state.parameters[name].data, parameter.data, rtol=1e-4, atol=1e-5
        )


def test_a_micro_batch_is_what_runs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    session = TrainingSession.from_folder(GOLDEN / "mlp")
    sizes = []
    train_step = session.train_step

    def noted(x: np.ndarray, labels: np.ndarray) -> Any:
        sizes.append(len(x))
        return train_step(x, labels)

    monkeypatch.setattr(session, "train_step", noted)
    onnxtrain.fit(session, data(21), batch_size=8, micro_batch_size=3, progress=False)
    assert sizes == [3, 3, 2, 3, 3, 2, 3, 2]
    assert session.optimizer.step_count == 3


def test_micro_batches_of_an_iterable() -> None:
    one, other = (TrainingSession.from_folder(GOLDEN / "mlp") for _ in range(2))
    x, labels = data(8)
    onnxtrain.fit(one, [(x, labels)], progress=False)
    onnxtrain.fit(other, [(x, labels)], micro_batch_size=3, progress=False)
    for name, parameter in one.state.parameters:
        np.testing.assert_allclose(
            other.state.parameters[name].data, parameter.data, rtol=1e-4, atol=1e-5
        )
    with pytest.raises(ArgumentError, match="splits batches whose inputs all are arrays"):
        onnxtrain.fit(one, [(x.tolist(), labels)], micro_batch_size=3, progress=False)
