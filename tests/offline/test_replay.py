"""A memory of old samples keeps what a run before has taught, and resumes to the bit."""

import json
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

import onnxtrain
from graphs import model, value
from onnxtrain import Replay
from onnxtrain.cli import main
from onnxtrain.errors import ArgumentError, CheckpointError

datasets = pytest.importorskip("sklearn.datasets", reason="it is in an extra")

PIXELS, LABELS = datasets.load_digits(return_X_y=True)
RNG = np.random.default_rng(0)
ORDER = RNG.permutation(len(PIXELS))
X, LABELS = (PIXELS[ORDER] / 16).astype(np.float32), LABELS[ORDER]
TRAIN, TEST = np.arange(len(X)) < 1300, np.arange(len(X)) >= 1300
OLD = LABELS < 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The artifacts of a network of two layers, of which the last one trains."""
    weights = {
        "body": (RNG.normal(size=(64, 100)) / 4).astype(np.float32),
        "head.w": np.zeros((100, 10), np.float32),
        "head.b": np.zeros(10, np.float32),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "body"], ["h"]),
        helper.make_node("Relu", ["h"], ["features"]),
        helper.make_node("Gemm", ["features", "head.w", "head.b"], ["y"]),
    ]
    made = model(
        nodes, [value("x", ["N", 64])], [value("y", ["N", 10], TensorProto.FLOAT)], weights
    )
    path = tmp_path_factory.mktemp("replay") / "artifacts"
    onnxtrain.prepare(made, path, train="head.*")
    return path


def opened(folder, checkpoint=None) -> onnxtrain.TrainingSession:
    session = onnxtrain.TrainingSession.from_folder(folder, checkpoint=checkpoint)
    if checkpoint is None:
        session.set_learning_rate(0.01)
    return session


def train(session, chosen, epochs=6, **settings) -> onnxtrain.History:
    data = (X[TRAIN & chosen], LABELS[TRAIN & chosen])
    return onnxtrain.fit(session, data, epochs, **{"seed": 3, "progress": False} | settings)


def accuracy(session, chosen) -> float:
    data = (X[TEST & chosen], LABELS[TEST & chosen])
    return onnxtrain.evaluate(session, data, "accuracy")["accuracy"]


def kept(session):
    return session.module.training_state.private["replay"]


def values(session) -> dict[str, np.ndarray]:
    return {name: np.array(p.data) for name, p in session.state.parameters}


@pytest.mark.parametrize("cache", [False, True], ids=["samples", "features"])
def test_new_classes_do_not_erase_old_ones(cache, folder) -> None:
    found = {}
    for replay in (None, 100):
        session = opened(folder)
        train(session, OLD, 15, replay=replay, cache_features=cache)
        before = accuracy(session, OLD)
        train(session, ~OLD, 15, replay=replay, cache_features=cache)
        found[replay] = (before, accuracy(session, OLD), accuracy(session, ~OLD))
    assert found[None][0] == found[100][0] > 0.95  # the first run has nothing to replay
    assert found[None][1] < 0.4 < 0.85 < found[100][1], found
    assert found[100][2] > 0.85, found


def test_classes_share_the_memory(folder) -> None:
    session = opened(folder)
    train(session, OLD, 1, replay=100)
    assert np.bincount(kept(session)["classes"]).tolist() == [20] * 5
    train(session, (LABELS == 7) | (LABELS == 0), 1, replay=100)
    counts = np.bincount(kept(session)["classes"])
    assert sum(counts) == 100 and counts[[0, 1, 2, 3, 4, 7]].min() >= 16
    assert set(kept(session)["runs"]) == {1, 2}


def test_a_reservoir_keeps_all_alike(folder) -> None:
    session = opened(folder)
    many = (LABELS == 1) & (np.cumsum(LABELS == 1) <= 40) | (LABELS == 2)
    train(session, many, 1, replay=Replay(60, keep="reservoir"))
    assert kept(session)["classes"] == [-1] * 60
    labels = np.frombuffer(
        __import__("base64").b64decode(kept(session)["columns"][1]["data"]), "<i8"
    )
    assert 5 < np.sum(labels == 1) < 30


@pytest.mark.parametrize("size", ["26KB", "0.026MB"])
def test_a_size_in_bytes(size, folder) -> None:
    session = opened(folder)
    train(session, OLD, 1, replay=size)
    assert len(kept(session)["runs"]) == 26_000 // (64 * 4 + 8)


@pytest.mark.parametrize("part", [0.1, 0.4, 0.8], ids=["early", "middle", "second epoch"])
@pytest.mark.parametrize(
    "settings", [{}, {"cache_features": True}, {"accumulate": 3}, {"micro_batch_size": 5}], ids=str
)
def test_resuming_is_exact(part, settings, folder, tmp_path) -> None:
    stop = round(part * (32 if "accumulate" in settings else 94))

    def callback(run) -> None:
        if run.step == stop:
            run.save(tmp_path / "saved")

    first = opened(folder)
    cached = {"cache_features": settings.get("cache_features", False)}
    train(first, OLD, 1, replay=50, **cached)
    first.save_checkpoint(tmp_path / "first")
    options = {"replay": Replay(50, share=0.3), "batch_size": 20, **settings}

    whole = opened(folder, tmp_path / "first")
    saving = type("Saving", (), {"on_step_end": staticmethod(callback)})()
    train(whole, ~OLD, 2, callbacks=[saving], **options)
    again = opened(folder, tmp_path / "saved")
    train(again, ~OLD, 2, resume=True, **options)
    assert kept(again) == kept(whole)
    for name, array in values(whole).items():
        np.testing.assert_array_equal(values(again)[name], array)


def test_batches_keep_their_size(folder, monkeypatch) -> None:
    session = opened(folder)
    train(session, OLD, 1, replay=50)
    sizes, step = [], session.step

    def noted(*given):
        sizes.append(len(given[0]))
        return step(*given)

    monkeypatch.setattr(session, "step", noted)
    train(session, ~OLD, 1, replay=Replay(50, share=0.3), batch_size=32, drop_last=True)
    assert set(sizes) == {32}
    sizes.clear()
    batches = [(X[:10], LABELS[:10])] * 3
    onnxtrain.fit(session, batches, replay=50, progress=False)
    assert sizes == [20, 20, 20]


def test_samples_that_are_not_finite_are_not_kept(folder) -> None:
    session = opened(folder)
    x = X[:64].copy()
    x[5] = np.nan
    onnxtrain.fit(
        session, (x, LABELS[:64]), batch_size=8, replay=100, nonfinite="skip", progress=False
    )
    assert len(kept(session)["runs"]) == 63


def test_a_smaller_memory(folder) -> None:
    session = opened(folder)
    train(session, OLD, 1, replay=100)
    train(session, ~OLD, 1, replay=20)
    assert len(kept(session)["runs"]) == 20
    assert sorted(kept(session)["classes"]) == sorted([*range(10)] * 2)


def test_forgetting(folder, tmp_path) -> None:
    session = opened(folder)
    train(session, OLD, 1, replay=100)
    session.save_checkpoint(tmp_path / "with")
    session.save_checkpoint(tmp_path / "without", include_optimizer_state=False)
    assert (tmp_path / "without").stat().st_size < (tmp_path / "with").stat().st_size - 26_000
    Replay.clear(session)
    session.save_checkpoint(tmp_path / "cleared")
    assert (tmp_path / "cleared").stat().st_size < (tmp_path / "with").stat().st_size - 26_000


@pytest.mark.parametrize(
    ("replay", "message"),
    [
        (0, "whole number of at least 1"),
        ("5 apples", "a size like '5MB'"),
        ("0.1KB", "a sample has 264 bytes"),
        ([1], "replay is a number of samples"),
    ],
)
def test_what_cannot_be(replay, message, folder) -> None:
    with pytest.raises(ArgumentError, match=message):
        train(opened(folder), OLD, 1, replay=replay)


def test_other_samples_than_before(folder) -> None:
    session = opened(folder)
    train(session, OLD, 1, replay=50)
    with pytest.raises(ArgumentError, match=r"keeps x, labels, and this run takes feature\.0, lab"):
        train(session, OLD, 1, replay=50, cache_features=True)
    with pytest.raises(ArgumentError, match="batch_size=2"):
        train(session, OLD, 1, replay=50, batch_size=1)


def test_other_settings_than_before(folder) -> None:
    session = opened(folder)
    train(session, OLD, 1, replay=50)
    with pytest.raises(ArgumentError, match="replay"):
        train(session, OLD, 2, replay=60, resume=True)


def test_damaged_memories(folder) -> None:
    session = opened(folder)
    train(session, OLD, 1, replay=20)
    good = kept(session)
    column = good["columns"][0]
    for wrong in (
        3, {}, good | {"runs": [1]}, good | {"classes": ["a"] * 20}, good | {"columns": []},
        good | {"columns": [column | {"data": "?"}] * 2}, good | {"seen": []},
        good | {"columns": [column | {"type": "O"}] * 2}, good | {"format": 2},
        good | {"columns": [column | {"shape": [65]}] * 2}, good | {"seen": [[1]]},
        good | {"columns": [column | {"shape": [-64]}] * 2}, good | {"runs": [2**80] * 20},
    ):  # fmt: skip
        session.module.training_state.private["replay"] = wrong
        with pytest.raises(CheckpointError, match="memory for replay cannot be read"):
            train(session, OLD, 1, replay=20)


def test_the_command(folder, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for name, chosen in (("old", OLD), ("new", ~OLD)):
        np.savez(f"{name}.npz", x=X[TRAIN & chosen], labels=LABELS[TRAIN & chosen])
    np.savez("test.npz", x=X[TEST & OLD], labels=LABELS[TEST & OLD])
    train = ["train", str(folder), "--validation", "test.npz", "--json", "-q", "--lr", "0.01",
             "--epochs", "8", "--replay", "100"]  # fmt: skip
    assert main([*train, "--data", "old.npz", "--checkpoint", "one"]) == 0
    capsys.readouterr()
    assert main([*train, "--data", "new.npz", "--from", "one", "--checkpoint", "two"]) == 0
    assert json.loads(capsys.readouterr().out)["epochs"][-1]["values"]["accuracy"] > 0.8
