"""MeZO: the same numbers as in numpy, operators without a gradient, memory, resuming."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import onnxtrain
from graphs import model, value
from onnxtrain import TrainingSession, optim, prepare
from onnxtrain.errors import ArgumentError, OnnxTrainError

node = helper.make_node
HERE = Path(__file__).resolve().parent
SEED = np.array([123456789, 987654321], np.uint32)
RNG = np.random.default_rng(0)
X = RNG.standard_normal((16, 6)).astype(np.float32)
LABELS = X[:, :3].argmax(axis=1)
W, B, V = ((RNG.standard_normal(s) * 0.3).astype(np.float32) for s in ((6, 5), (5,), (5, 3)))


def network(*more: onnx.NodeProto, hidden: str = "h", **options: object) -> onnx.ModelProto:
    """y = f(x w + b) v, where f is Relu unless nodes from "h" on say otherwise."""
    made = model(
        [
            node("MatMul", ["x", "w"], ["xw"]),
            node("Add", ["xw", "b"], ["s"]),
            *(more or [node("Relu", ["s"], ["h"])]),
            node("MatMul", [hidden, "v"], ["y"]),
        ],
        [value("x", ["batch", 6])],
        [value("y", ["batch", 3])],
        {"w": W, "b": B, "v": V, **options},
    )
    return made


# ---- the same in numpy ---------------------------------------------------------------------------


def hashed(words: np.ndarray) -> np.ndarray:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, None)):
        words = words ^ (words >> np.uint32(shift))
        if factor is not None:
            words = words * np.uint32(factor)
    return words


def directions(shapes: list[tuple[int, ...]], distribution: str) -> list[np.ndarray]:
    """The direction of each parameter for SEED, in the order of the model."""
    cuts = []
    for dims in shapes:
        both = [(int(np.prod(dims[:i])), int(np.prod(dims[i:]))) for i in range(len(dims))]
        cuts.append(min(both, key=sum))
    count = 4 + sum(map(sum, cuts))
    words = hashed(hashed(np.arange(count, dtype=np.uint32) ^ SEED[0]) ^ SEED[1])
    k, l_, k2, l2 = words[:4]
    place, found = 4, []
    for dims, (rows, columns) in zip(shapes, cuts, strict=True):
        a, b = words[place : place + rows], words[place + rows : place + rows + columns]
        place += rows + columns
        z = a[:, None] + b[None, :]
        first, second = ((y := z * (z + k)) * (y + l_), (y := z * (z + k2)) * (y + l2))
        if distribution == "signs":
            drawn = np.where(first.view(np.int32) < 0, -1.0, 1.0)
        else:
            u, v = (bits.view(np.int32) * 2.0**-32 + 0.5 for bits in (first, second))
            u, v = np.minimum(u, 1 - 2.0**-24), np.minimum(v, 1 - 2.0**-24)
            drawn = np.sqrt(-2 * np.log(1 - u)) * np.cos(2 * np.pi * v)
        found.append(drawn.reshape(dims))
    return found


def loss_of(w: np.ndarray, b: np.ndarray, v: np.ndarray) -> float:
    y = np.maximum(X @ w + b, 0) @ v
    y = y - y.max(axis=1, keepdims=True)
    scores = y - np.log(np.exp(y).sum(axis=1, keepdims=True))
    return -float(scores[np.arange(len(X)), LABELS].mean())


def run(graph: Path, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    session = ort.InferenceSession(graph, providers=["CPUExecutionProvider"])
    known = {"x": X, "labels": LABELS, "w": W, "b": B, "v": V, "random_seed": SEED}
    known |= {"learning_rate": np.array([0.01], np.float32), "step": np.array([1])}
    known |= {"lazy_reset_grad": np.array([True]), **feeds}
    for given in session.get_inputs():
        if given.name.endswith("_grad.accumulation.buffer"):
            known[given.name] = np.zeros(given.shape, np.float32)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, {i.name: known[i.name] for i in session.get_inputs()}),
                    strict=True))  # fmt: skip


@pytest.mark.parametrize("distribution", ["signs", "normal"])
def test_step_equals_numpy(tmp_path: Path, distribution: str) -> None:
    chosen = optim.MeZO(1e-3, distribution, weight_decay=0.1)
    made = prepare(network(), tmp_path, optimizer=chosen)
    assert any("slow" in note for note in made.notes)
    names = list(made.trainable)
    values = {"w": W, "b": B, "v": V}
    zs = dict(zip(names, directions([values[n].shape for n in names], distribution), strict=True))
    forth, back = (
        loss_of(**{n: values[n].astype(np.float64) + s * 1e-3 * zs[n] for n in names})
        for s in (1, -1)
    )
    g = (forth - back) / 2e-3
    step = run(tmp_path / "step_model.onnx")
    assert next(iter(step.values())) == pytest.approx((forth + back) / 2, rel=1e-5)
    train = run(tmp_path / "training_model.onnx")
    for name in names:
        expected = values[name] * (1 - 0.01 * 0.1) - 0.01 * g * zs[name]
        np.testing.assert_allclose(step[f"{name}.updated"], expected, atol=1e-5)
        accumulated = train[f"{name}_grad.accumulation.out"]
        np.testing.assert_allclose(accumulated, g * zs[name], atol=1e-3)


def test_large_parameters_are_moved_in_chunks(tmp_path: Path) -> None:
    """A parameter of many rows gets the same update in one piece and in chunks."""
    wide = (np.random.default_rng(1).standard_normal((6, 150_000)) * 0.01).astype(np.float32)
    made = model(
        [
            node("MatMul", ["x", "w"], ["wide"]),
            node("ReduceMean", ["wide"], ["y"], keepdims=1, axes=[-1]),
        ],
        [value("x", ["batch", 6])],
        [value("y", ["batch", 1])],
        {"w": wide},
        opset=17,
    )
    prepare(made, tmp_path, optimizer="mezo", loss="mse")
    graph = onnx.load(tmp_path / "step_model.onnx")
    assert "Scan" in {n.op_type for n in graph.graph.node}
    target = next(i.name for i in graph.graph.input if i.name not in
                  ("x", "w", "random_seed", "learning_rate", "step"))  # fmt: skip
    zeros = np.zeros((16, 1), np.float32)
    step = run(tmp_path / "step_model.onnx", w=wide, **{target: zeros})
    (z,) = directions([wide.shape], "signs")
    forth, back = (np.square((X @ (wide + s * 1e-3 * z)).mean(1)).mean() for s in (1, -1))
    expected = wide - 0.01 * (forth - back) / 2e-3 * z
    np.testing.assert_allclose(step["w.updated"].reshape(wide.shape), expected, atol=1e-6)


# ---- training ------------------------------------------------------------------------------------


def train(session: TrainingSession, steps: int, rate: float = 0.01) -> list[float]:
    session.set_learning_rate(rate)
    return [float(session.step(X, LABELS)[0]) for _ in range(steps)]


def test_training_lowers_the_loss(tmp_path: Path) -> None:
    onnxtrain.set_seed(0)
    prepare(network(), tmp_path, optimizer="mezo")
    with TrainingSession(tmp_path) as session:
        losses = train(session, 800, 0.02)
    assert np.mean(losses[-20:]) < 0.5 * np.mean(losses[:20])


def test_digits(tmp_path: Path) -> None:
    """The last layer of a network for digits, with a schedule, and with cached features."""
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    x, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int64)
    shapes = {"w": (64, 64), "v": (64, 10)}
    rng = np.random.default_rng(0)
    given = model(
        [
            node("MatMul", ["x", "w"], ["s"]),
            node("Relu", ["s"], ["h"]),
            node("MatMul", ["h", "v"], ["y"]),
        ],
        [value("x", ["batch", 64])],
        [value("y", ["batch", 10])],
        {n: (rng.standard_normal(s) * s[0] ** -0.5).astype(np.float32) for n, s in shapes.items()},
    )
    prepare(given, tmp_path, optimizer="mezo", train="v")
    with TrainingSession(tmp_path) as session:
        session.set_learning_rate(0.1)
        onnxtrain.fit(
            session, (x[:1500], labels[:1500]), epochs=60, batch_size=100, schedule="cosine",
            cache_features=True, progress=False, seed=0,
        )  # fmt: skip
        found = session.predict(x[1500:]).argmax(axis=1)
    assert np.mean(found == labels[1500:]) > 0.6


def test_operators_without_a_gradient(tmp_path: Path) -> None:
    """A count of positives is a step function, and NonMaxSuppression chooses boxes."""
    boxes = np.array([[[0, 0, 1, 1], [0, 0, 1, 1.1], [0, 2, 1, 3], [5, 5, 6, 6]]], np.float32)
    chosen = [
        node("Sigmoid", ["s"], ["p"]),
        node("Slice", ["p", "from", "to", "axes"], ["few"]),
        node("Unsqueeze", ["few", "axes0"], ["scores"]),
        node("ReduceMean", ["scores"], ["one"], axes=[1], keepdims=1),
        node("NonMaxSuppression", ["boxes", "one", "most", "overlap"], ["kept"]),
        node("Shape", ["kept"], ["size"], start=0, end=1),
        node("Cast", ["size"], ["count"], to=TensorProto.FLOAT),
        node("Floor", ["s"], ["whole"]),
        node("Add", ["p", "whole"], ["mixed"]),
        node("Mul", ["mixed", "count"], ["h"]),
    ]
    more = {
        "from": np.array([0]), "to": np.array([4]), "axes": np.array([1]), "axes0": np.array([0]),
        "boxes": boxes, "most": np.array([3]), "overlap": np.array([0.5], np.float32),
    }  # fmt: skip
    given = network(*chosen, **more)
    given.opset_import[0].version = 17
    onnxtrain.set_seed(1)
    made = prepare(given, tmp_path, optimizer="mezo")
    assert list(made.trainable) == ["w", "b", "v"] and not made.without_gradient
    with TrainingSession(tmp_path) as session:
        losses = train(session, 600, 0.002)
    assert np.mean(losses[-50:]) < 0.9 * np.mean(losses[:50])


def test_only_what_moves_is_computed_twice(tmp_path: Path) -> None:
    prepare(network(), tmp_path, optimizer="mezo", train="v")
    ops = [n.op_type for n in onnx.load(tmp_path / "step_model.onnx").graph.node]
    assert ops.count("Relu") == 1
    with TrainingSession(tmp_path) as session:
        train(session, 3)
        np.testing.assert_array_equal(session.get_parameter("w"), W)


def test_resumes_to_the_bit(tmp_path: Path) -> None:
    prepare(network(), tmp_path, optimizer="mezo")
    onnxtrain.set_seed(3)
    with TrainingSession(tmp_path) as whole:
        train(whole, 5)
        whole.save_checkpoint(tmp_path / "half", include_optimizer_state=True)
        expected = train(whole, 5)
    resumed = TrainingSession.from_folder(tmp_path, checkpoint=tmp_path / "half")
    assert train(resumed, 5) == expected
    for name in ("w", "b", "v"):
        np.testing.assert_array_equal(resumed.get_parameter(name), whole.get_parameter(name))


def test_estimates_are_accumulated_like_gradients(tmp_path: Path) -> None:
    """`train_step` adds the estimate to the gradients, for Module and Optimizer."""
    prepare(network(), tmp_path, optimizer="mezo")
    onnxtrain.set_seed(4)
    with TrainingSession(tmp_path) as fused, TrainingSession(tmp_path) as apart:
        train(fused, 1)
        apart.set_learning_rate(0.01)
        onnxtrain.set_seed(4)
        apart.train_step(X, LABELS)
        apart.optimizer_step()
        for name in ("w", "b", "v"):
            np.testing.assert_allclose(
                apart.get_parameter(name), fused.get_parameter(name), atol=1e-6
            )


def test_steps_that_are_not_finite_change_nothing(tmp_path: Path) -> None:
    prepare(network(), tmp_path, optimizer="mezo")
    with TrainingSession(tmp_path) as session:
        bad = X.copy()
        bad[0, 0] = np.nan
        session.step(bad, LABELS)
        assert session.skipped_steps == 1
        np.testing.assert_array_equal(session.get_parameter("w"), W)
        assert np.isfinite(train(session, 1)).all()


def test_dropout_drops_the_same_in_both_passes(tmp_path: Path) -> None:
    dropped = [node("Relu", ["s"], ["r"]), node("Dropout", ["r", "ratio", "training"], ["h"])]
    given = network(*dropped, ratio=np.float32(0.5), training=np.array(True))
    prepare(given, tmp_path, optimizer=optim.MeZO(1e-6))
    with TrainingSession(tmp_path) as session:
        # If other units were dropped, the difference of the losses over 2e-6 would be huge.
        session.set_learning_rate(1e-3)
        session.step(X, LABELS)
        assert np.abs(session.get_parameter("w") - W).max() < 0.01


def test_batch_statistics_are_those_of_one_pass(tmp_path: Path) -> None:
    norm = [node("BatchNormalization", ["s", "scale", "shift", "mean", "var"], ["h"])]
    ones, zeros = np.ones(5, np.float32), np.zeros(5, np.float32)
    given = network(*norm, scale=ones, shift=zeros, mean=zeros, var=ones)
    made = prepare(given, tmp_path, optimizer="mezo", bn="batch")
    assert set(made.statistics) == {"mean", "var"}
    with TrainingSession(tmp_path) as session:
        train(session, 1)
        moved = session.get_parameter("mean")
    np.testing.assert_allclose(moved, 0.1 * (X @ W + B).mean(0), atol=1e-3)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_types(tmp_path: Path, dtype: type) -> None:
    kind = {np.float16: TensorProto.FLOAT16, np.float64: TensorProto.DOUBLE}[dtype]
    made = model(
        [node("MatMul", ["x", "w"], ["y"])],
        [value("x", ["batch", 6], kind)],
        [value("y", ["batch", 5], kind)],
        {"w": W.astype(dtype)},
    )
    prepare(made, tmp_path, optimizer="mezo", loss="mse")
    target = np.zeros((16, 5), dtype)
    onnxtrain.set_seed(5)
    with TrainingSession(tmp_path) as session:
        session.set_learning_rate(0.02)
        losses = [float(session.step(X.astype(dtype), target)[0]) for _ in range(150)]
    assert losses[-1] < 0.7 * losses[0]


def test_proximal_and_webgpu(tmp_path: Path) -> None:
    """Both take the plain way, where the estimates exist as a whole."""
    for options in ({"proximal": True}, {"target": "webgpu"}):
        onnxtrain.set_seed(6)
        prepare(network(), tmp_path, optimizer="mezo", **options)
        with TrainingSession(tmp_path) as session:
            assert train(session, 300, 0.02)[-1] < 1.1


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="trains parameters"):
        prepare(network(), tmp_path, optimizer="mezo", train=["x", "w"])
    with pytest.raises(OnnxTrainError, match="leave memory_budget out"):
        prepare(network(), tmp_path, optimizer="mezo", memory_budget="10%")


# ---- memory --------------------------------------------------------------------------------------


def test_a_step_takes_little_more_memory_than_inference(tmp_path: Path) -> None:
    """Ten layers of 4 MB: one moved layer exists at a time, and nothing else is kept."""
    nodes, weights, x = [], {}, "x"
    rng = np.random.default_rng(0)
    for i in range(10):
        weights[f"w{i}"] = (rng.standard_normal((1024, 1024)) / 32).astype(np.float32)
        nodes += [node("MatMul", [x, f"w{i}"], [f"h{i}"]), node("Relu", [f"h{i}"], [f"r{i}"])]
        x = f"r{i}"
    nodes.append(node("Identity", [x], ["y"]))
    deep = model(nodes, [value("x", ["b", 1024])], [value("y", ["b", 1024])], weights)
    prepare(deep, tmp_path, optimizer="mezo", loss="mse")
    program = HERE / "measure_session.py"
    taken = [
        int(subprocess.run([sys.executable, program, tmp_path, what], check=True,
                           capture_output=True, text=True).stdout)
        for what in ("eval_step", "step")
    ]  # fmt: skip
    assert taken[1] - taken[0] < 20 * 2**20  # bytes; the weights have 40 MB
