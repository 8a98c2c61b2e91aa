"""Sparse updates: gradients of chosen channels, the choice within a budget, export."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

import onnxtrain
from graphs import model, value
from onnxtrain import Sparse, TrainingSession, prepare
from onnxtrain.errors import ArgumentError, OnnxTrainError
from onnxtrain.offline.passes.sparse.add import add_rows
from onnxtrain.offline.passes.sparse.choose import Cost, choose_channels
from onnxtrain.offline.passes.sparse.layers import find_sparse_layers

node = helper.make_node
RNG = np.random.default_rng(0)
X = RNG.standard_normal((12, 3, 6, 6)).astype(np.float32)
LABELS = RNG.integers(0, 5, 12)
SHAPES = {
    "first": (8, 3, 3, 3),
    "depthwise": (8, 1, 3, 3),
    "pointwise": (12, 8, 1, 1),
    "matrix": (36, 10),  # of a MatMul on three axes
    "bias": (10,),
    "turned": (10, 10),  # of a MatMul that reads it transposed
    "left": (120, 7),  # of a Gemm
    "right": (5, 7),  # of a Gemm that transposes it
    "shift": (5,),
}
WEIGHTS = {
    name: (RNG.standard_normal(shape) / np.sqrt(np.prod(shape[1:]) + 1)).astype(np.float32)
    for name, shape in SHAPES.items()
}


def network() -> onnx.ModelProto:
    return model(
        [
            node("Conv", ["x", "first"], ["a"], pads=[1] * 4),
            node("Relu", ["a"], ["b"]),
            node("Conv", ["b", "depthwise"], ["c"], pads=[1] * 4, group=8),
            node("Relu", ["c"], ["d"]),
            node("Conv", ["d", "pointwise"], ["e"]),
            node("Relu", ["e"], ["f"]),
            node("Reshape", ["f", "tokens"], ["g"]),
            node("MatMul", ["g", "matrix"], ["h"]),
            node("Add", ["h", "bias"], ["i"]),
            node("Relu", ["i"], ["j"]),
            node("Transpose", ["turned"], ["turned_T"], perm=[1, 0]),
            node("MatMul", ["j", "turned_T"], ["j_2"]),
            node("Flatten", ["j_2"], ["k"]),
            node("Gemm", ["k", "left"], ["l"]),
            node("Tanh", ["l"], ["m"]),
            node("Gemm", ["m", "right", "shift"], ["y"], transB=1),
        ],
        [value("x", ["batch", 3, 6, 6])],
        [value("y", ["batch", 5])],
        {**WEIGHTS, "tokens": np.array([0, 12, 36])},
    )


LAYERS = {layer.weight: layer for layer in find_sparse_layers(network().graph)}


def step(
    folder: Path, given: onnx.ModelProto, train: list[str], **options: object
) -> TrainingSession:
    prepare(given, folder, train=train, optimizer="sgd", **options)
    session = TrainingSession(folder)
    session.set_learning_rate(0.1)
    session.step(X, LABELS)
    return session


def test_layers_are_found() -> None:
    axes = {name: layer.axis for name, layer in LAYERS.items()}
    assert axes == {
        "first": 0, "depthwise": 0, "pointwise": 0, "matrix": 1, "turned": 0, "left": 1, "right": 0,
    }  # fmt: skip


@pytest.mark.parametrize("names", [[name] for name in LAYERS] + [list(LAYERS)], ids=" ".join)
def test_chosen_channels_take_the_step_of_the_whole_weight(
    tmp_path: Path, names: list[str]
) -> None:
    chosen = {n: np.array([1, LAYERS[n].channels - 2]) for n in names}
    given, rows = add_rows(network(), None, chosen, list(LAYERS.values()))
    assert rows == [f"{name}.rows" for name in LAYERS if name in names]
    whole = step(tmp_path / "whole", network(), names)
    sparse = step(tmp_path / "sparse", given, rows)
    for name in names:
        expected = np.moveaxis(whole.get_parameter(name), LAYERS[name].axis, 0)
        assert np.abs(expected - np.moveaxis(WEIGHTS[name], LAYERS[name].axis, 0)).max() > 1e-4
        np.testing.assert_allclose(
            sparse.get_parameter(f"{name}.rows"), expected[chosen[name]], atol=1e-6
        )


def test_gradients_have_the_size_of_the_chosen_channels(tmp_path: Path) -> None:
    given, rows = add_rows(network(), None, {"first": np.array([2, 5])}, list(LAYERS.values()))
    made = prepare(given, tmp_path, train=rows, native=False)
    assert made.trainable == {"first.rows": 2 * 27}
    graph = onnx.shape_inference.infer_shapes(onnx.load(tmp_path / "training_model.onnx")).graph
    shapes = {
        info.name: tuple(d.dim_value for d in info.type.tensor_type.shape.dim)
        for info in graph.value_info
    }
    # Nothing but the weight itself and the joined one has its shape: no gradient does.
    joined = {n.output[0] for n in graph.node if n.op_type == "ScatterND"}
    assert {name for name, dims in shapes.items() if dims == (8, 3, 3, 3)} <= joined | {"first"}


def test_exported_models_have_the_trained_channels(tmp_path: Path) -> None:
    data = [(X[:6], LABELS[:6]), (X[6:], LABELS[6:])]
    made = prepare(network(), tmp_path, train=Sparse("24KB", data=data), optimizer="sgd")
    assert any(name.endswith(".rows") for name in made.trainable)
    with TrainingSession(tmp_path) as session:
        session.set_learning_rate(0.5)
        for _ in range(20):
            session.step(X, LABELS)
        expected = session.predict(X)
        session.export_model_for_inferencing(tmp_path / "plain.onnx", ["y"])
        session.export_model_for_inferencing(tmp_path / "merged.onnx", ["y"], optimize=True)
    for name in ("plain", "merged"):
        run = ort.InferenceSession(tmp_path / f"{name}.onnx", providers=["CPUExecutionProvider"])
        np.testing.assert_allclose(run.run(None, {"x": X})[0], expected, atol=1e-5)
    merged = onnx.load(tmp_path / "merged.onnx").graph
    assert "ScatterND" not in {n.op_type for n in merged.node}


# ---- the choice ----------------------------------------------------------------------------------


def test_gain_decides(tmp_path: Path) -> None:
    """Channels that nothing reads have no gain, and are not chosen."""
    given = network()
    right = numpy_helper.to_array(next(t for t in given.graph.initializer if t.name == "right"))
    dead = right.copy()
    dead[:, :4] = 0  # channels 0 to 3 of "left" lead nowhere
    given.graph.initializer.extend([numpy_helper.from_array(dead, "dead")])
    given.graph.node[-1].input[1] = "dead"
    data = [{"x": X, "labels": LABELS}]
    made = prepare(given, tmp_path, train=Sparse("18KB", data=data), optimizer="sgd")
    places = next(
        numpy_helper.to_array(t) for t in onnx.load(tmp_path / "eval_model.onnx").graph.initializer
        if t.name == "left.rows.places"
    )  # fmt: skip
    assert "left.rows" in made.trainable
    assert places.min() >= 4


def test_budget_is_kept_and_used() -> None:
    gains = {name: np.random.default_rng(i).random(50) for i, name in enumerate("abc")}
    costs = {"a": Cost(10, 100, 300), "b": Cost(20, 50, 200), "c": Cost(5, 30, 0)}
    taken = []
    for budget in (40, 200, 500, 900, 3000):
        found = choose_channels(gains, costs, budget)
        assert found is not None and found.taken <= budget
        first = next(iter(found.channels))
        assert found.taken == costs[first].way + sum(
            costs[n].layer + len(c) * costs[n].channel for n, c in found.channels.items()
        )
        taken.append(found.gain)
    assert taken == sorted(taken) and taken[-1] > taken[0]
    assert choose_channels(gains, costs, 30) is None


def test_the_best_channels_come_first() -> None:
    gains = {"a": np.array([1.0, 5.0, 3.0, 0.0])}
    found = choose_channels(gains, {"a": Cost(10, 0, 0)}, 20)
    assert found is not None
    np.testing.assert_array_equal(found.channels["a"], [1, 2])


def test_word_without_data(tmp_path: Path) -> None:
    made = prepare(network(), tmp_path, train="sparse:30KB", optimizer="sgd")
    assert any("size of their weights" in note and "data=" in note for note in made.notes)
    assert 0 < made.parameter_count < sum(w.size for w in WEIGHTS.values())


def test_sparse_beside_others(tmp_path: Path) -> None:
    made = prepare(network(), tmp_path, train=["bias", "sparse:30KB"], optimizer="sgd")
    assert "bias" in made.trainable
    five = prepare(network(), tmp_path, classes=4, train="sparse:30KB", optimizer="sgd")
    assert any("rows" not in name for name in five.trainable)


def test_more_memory_trains_more(tmp_path: Path) -> None:
    data = [(X, LABELS)]
    counts = [
        prepare(network(), tmp_path, train=Sparse(size, data=data)).parameter_count
        for size in ("8KB", "40KB", "10MB")
    ]
    assert counts == sorted(counts) and counts[0] < counts[1] < counts[2]
    assert counts[2] == sum(WEIGHTS[name].size for name in LAYERS)


def test_training_lowers_the_loss(tmp_path: Path) -> None:
    prepare(network(), tmp_path, train=Sparse("20KB", data=[(X, LABELS)]), optimizer="adamw")
    with TrainingSession(tmp_path) as session:
        session.set_learning_rate(0.01)
        losses = [float(session.step(X, LABELS)[0]) for _ in range(200)]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ("sparse", "memory"),
        ("sparse:50%", "a size such as 200MB"),
        ("sparse:10B", "too little for any channel"),
        (["sparse:1MB", "sparse:2MB"], "more than once"),
        (["sparse:1MB", "lora"], "do not go together"),
    ],
)
def test_what_is_refused(tmp_path: Path, train: object, words: str) -> None:
    with pytest.raises(OnnxTrainError, match=words):
        prepare(network(), tmp_path, train=train)


def test_data_that_does_not_fit(tmp_path: Path) -> None:
    for data, words in (([], "no batch"), ([(X,)], "tuple of x, labels"), ([{"x": X}], "'labels'"),
                        ([(X[:, 0], LABELS)], "does not fit the model")):  # fmt: skip
        with pytest.raises(ArgumentError, match=words):
            prepare(network(), tmp_path, train=Sparse("1MB", data=data))
    with pytest.raises(ArgumentError, match="batches"):
        onnxtrain.Sparse("1MB", batches=0)


def test_a_weight_that_a_branch_reads_too_is_left_alone() -> None:
    given = network()
    read = helper.make_graph([node("Identity", ["matrix"], ["m"])], "b", [], [value("m", [36, 10])])
    given.graph.node.append(node("If", ["flag"], ["z"], then_branch=read, else_branch=read))
    assert "matrix" not in {layer.weight for layer in find_sparse_layers(given.graph)}


def test_weights_of_constant_nodes(tmp_path: Path) -> None:
    """As converters of Paddle write them."""
    given = network()
    tensors = {t.name: t for t in given.graph.initializer if t.name in SHAPES}
    kept = [t for t in given.graph.initializer if t.name not in SHAPES]
    del given.graph.initializer[:]
    given.graph.initializer.extend(kept)
    nodes = [node("Constant", [], [name], value=tensor) for name, tensor in tensors.items()]
    nodes += given.graph.node
    del given.graph.node[:]
    given.graph.node.extend(nodes)
    data = [(X, LABELS)]
    made = prepare(given, tmp_path / "a", train=Sparse("20KB", data=data))
    assert (
        made.trainable
        == prepare(network(), tmp_path / "b", train=Sparse("20KB", data=data)).trainable
    )


def test_models_without_layers(tmp_path: Path) -> None:
    scaled = model(
        [node("Mul", ["x", "scale"], ["y"])],
        [value("x", ["batch", 4])], [value("y", ["batch", 4])], {"scale": np.ones(4, np.float32)},
    )  # fmt: skip
    with pytest.raises(OnnxTrainError, match="finds no Conv, Gemm or MatMul"):
        prepare(scaled, tmp_path, train="sparse:1MB", loss="mse")
