"""Which BatchNormalization uses the statistics of the batch, and which the stored ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import onnxtrain
from graphs import model, value
from onnxtrain.artifacts import generate_artifacts
from onnxtrain.errors import ArgumentError
from onnxtrain.offline.prepare import prepare

FIRST = {"bn1.mean", "bn1.var"}
SECOND = {"bn2.mean", "bn2.var"}


def network(constant_scale: bool = False) -> onnx.ModelProto:
    """Two normalized layers and a head, exported in training mode."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    nodes, tensors = [], {}
    for i in (1, 2):
        names = [f"bn{i}.scale", f"bn{i}.bias", f"bn{i}.mean", f"bn{i}.var"]
        tensors |= {n: normal(4) for n in names} | {f"fc{i}.weight": normal(4, 4)}
        tensors[names[3]] = np.abs(tensors[names[3]]) + np.float32(0.5)
        if constant_scale:
            for name in names[:2]:
                made = helper.make_tensor(name, onnx.TensorProto.FLOAT, [4], tensors.pop(name))
                nodes.append(helper.make_node("Constant", [], [name], name, value=made))
        nodes += [
            helper.make_node("MatMul", [f"h{i - 1}", f"fc{i}.weight"], [f"p{i}"], f"fc{i}"),
            helper.make_node(
                "BatchNormalization", [f"p{i}", *names], [f"h{i}", f"m{i}", f"v{i}"], f"bn{i}",
                training_mode=1, momentum=0.5,
            ),
        ]  # fmt: skip
    nodes.append(helper.make_node("MatMul", ["h2", "head.weight"], ["y"], "head"))
    tensors["head.weight"] = normal(4, 3)
    return model(nodes, [value("h0", ["n", 4])], [value("y", ["n", 3])], tensors)


def stepped(folder: Path) -> tuple[onnxtrain.TrainingSession, float, float]:
    """Take a step; return the session, and the loss before it, in training and in evaluation."""
    session = onnxtrain.TrainingSession.from_folder(folder)
    x = np.random.default_rng(1).standard_normal((8, 4)).astype(np.float32)
    target = np.arange(8) % 3
    evaluated = session.eval_step(x, target)
    trained = session.step(x, target)
    first = [np.asarray(v[0] if isinstance(v, list | tuple) else v) for v in (trained, evaluated)]
    return session, float(first[0]), float(first[1])


@pytest.mark.parametrize(
    ("train", "bn", "batch"),
    [
        (None, None, FIRST | SECOND),
        (None, "frozen", set()),
        ("head*", None, set()),
        ("head*", "auto", set()),
        ("head*", "batch", FIRST | SECOND),
        ("head*", "model", FIRST | SECOND),
        (["bn2.scale", "head*"], None, SECOND),
        (["fc1*", "head*"], None, set()),
    ],
)
def test_a_frozen_node_uses_the_stored_statistics(train, bn, batch, tmp_path: Path) -> None:
    made = prepare(network(), tmp_path, train=train, bn=bn, optimizer="sgd")
    assert set(made.statistics) == batch
    assert (FIRST | SECOND) - batch <= set(made.frozen)
    stored = _values(tmp_path)
    session, trained, evaluated = stepped(tmp_path)
    for name in FIRST | SECOND:
        moved = not np.array_equal(session.get_parameter(name), stored[name])
        assert moved == (name in batch), name
    if not batch:
        assert trained == pytest.approx(evaluated, rel=1e-5)  # the same network in both


def _values(folder: Path) -> dict[str, np.ndarray]:
    session = onnxtrain.TrainingSession.from_folder(folder)
    return {name: session.get_parameter(name).copy() for name in FIRST | SECOND}


def test_new_classes_leave_the_statistics_alone(tmp_path: Path) -> None:
    assert not prepare(network(), tmp_path, classes=5).statistics


def test_statistics_are_all_that_a_node_without_weights_learns(tmp_path: Path) -> None:
    made = prepare(network(constant_scale=True), tmp_path, train="head*")
    assert set(made.statistics) == FIRST | SECOND


def test_upstreams_function_does_what_the_model_says_and_tells(tmp_path: Path) -> None:
    given = {"artifact_directory": tmp_path, "loss": "mse"}
    made = generate_artifacts(network(), ["head.weight"], **given)
    assert set(made.statistics) == FIRST | SECOND
    assert len(made.notes) == 1 and 'bn="auto"' in made.notes[0] and "2 nodes" in made.notes[0]
    assert 'bn="auto"' in str(made)
    quiet = generate_artifacts(network(), ["head.weight"], **given, bn="auto")
    assert not quiet.statistics and not quiet.notes
    assert not generate_artifacts(network(), **given).notes


def test_a_mode_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="bn is 'auto', 'batch', 'frozen' or 'model'"):
        prepare(network(), tmp_path, bn="none")  # type: ignore[arg-type]


def test_statistics_of_a_layer_that_is_used_twice_are_updated_twice(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    given = {n: random.standard_normal(4).astype(np.float32) for n in ("scale", "bias", "mean")}
    given |= {"var": np.ones(4, np.float32), "w": random.standard_normal((4, 3), np.float32)}
    statistics = ["scale", "bias", "mean", "var"]
    nodes = [
        helper.make_node("BatchNormalization", ["x", *statistics], ["a"], momentum=0.5),
        helper.make_node("Tanh", ["a"], ["b"]),
        helper.make_node("BatchNormalization", ["b", *statistics], ["c"], momentum=0.5),
        helper.make_node("MatMul", ["c", "w"], ["y"]),
    ]
    both = model(nodes, [value("x", ["n", 4])], [value("y", ["n", 3])], given)
    onnxtrain.prepare(both, tmp_path / "artifacts", bn="batch")
    session = onnxtrain.TrainingSession(tmp_path / "artifacts")
    x = random.standard_normal((8, 4)).astype(np.float32)
    session.step(x, np.arange(8) % 3)
    first = 0.5 * given["mean"] + 0.5 * x.mean(0)
    normalized = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5) * given["scale"] + given["bias"]
    expected = 0.5 * first + 0.5 * np.tanh(normalized).mean(0)
    np.testing.assert_allclose(session.get_parameter("mean"), expected, rtol=1e-4, atol=1e-6)
