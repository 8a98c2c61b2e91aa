"""Random numbers that follow from a seed: their distribution, their gradients, any runtime."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from graphs import model, value
from oldest_program import run_all
from onnxtrain.errors import ModelError
from onnxtrain.offline.training_graph import build_training_graphs

node = helper.make_node
TYPES = {
    np.float16: TensorProto.FLOAT16,
    np.float32: TensorProto.FLOAT,
    np.float64: TensorProto.DOUBLE,
    np.int64: TensorProto.INT64,
    np.bool_: TensorProto.BOOL,
}
SEED = np.array([3, 5], np.uint32)
HERE = Path(__file__).resolve().parent
OLDEST = os.environ.get("ONNXTRAIN_OLDEST_PYTHON", str(HERE.parents[1] / ".venv-oldest/bin/python"))


def training_graph(
    nodes: list, inputs: list, outputs: list[str], initializers: dict | None = None
) -> onnx.ModelProto:
    """The training graph of nodes that no gradient passes; their outputs come behind the loss."""
    made = model(
        [*nodes, node("Mul", ["w", "w"], ["loss"])],
        inputs,
        [value("loss", [])],
        {"w": np.float32(1), **(initializers or {})},
    )
    return build_training_graphs(made, ["loss", *outputs], ["w"]).training


def feeds_of(graph: onnx.ModelProto, seed: np.ndarray, **feeds: np.ndarray) -> dict:
    known = {"w": np.float32(1), "w_grad.accumulation.buffer": np.float32(0)}
    known |= {"lazy_reset_grad": np.array([True]), "random_seed": seed, **feeds}
    return {v.name: np.asarray(known[v.name]) for v in graph.graph.input}


def run(graph: onnx.ModelProto, seed: np.ndarray = SEED, **feeds: np.ndarray) -> list[np.ndarray]:
    """What the graph gives behind the loss."""
    session = ort.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    own = ("loss", "w_grad.accumulation.out", "updated_flag", "finite_check")
    names = [v.name for v in graph.graph.output if v.name not in own]
    return session.run(names, feeds_of(graph, seed, **feeds))


def seeds(count: int) -> list[np.ndarray]:
    return list(np.random.default_rng(0).integers(0, 2**32, (count, 2), np.uint32))


def dropout(dims: list, ratio: object = 0.25, dtype: type = np.float32, names: str = "y mask"):
    """A graph of one Dropout in training mode."""
    return training_graph(
        [node("Dropout", ["x", "ratio", "training"], names.split())],
        [value("x", dims, TYPES[dtype])],
        names.split(),
        {"ratio": np.asarray(ratio, dtype), "training": np.array(True)},
    )


def sigmas(found: float, expected: float, deviation: float, count: int) -> float:
    """By how many standard deviations a mean is off."""
    return abs(found - expected) / (deviation / np.sqrt(count))


# ---- Dropout -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.25, 0.5, 0.9, 0.999])
def test_dropout_keeps_its_share_and_scales_it(ratio) -> None:
    x = np.random.default_rng(1).normal(size=(400, 250)).astype(np.float32)
    y, mask = run(dropout([400, 250], ratio), x=x)
    assert mask.dtype == bool
    assert sigmas(mask.mean(), 1 - ratio, np.sqrt(ratio * (1 - ratio)) or 1, mask.size) < 4
    scale = np.float32(1 / (1 - np.float32(ratio)))
    np.testing.assert_allclose(y[mask], x[mask] * scale, rtol=1e-6)
    assert not y[~mask].any()


@pytest.mark.slow
@pytest.mark.parametrize("dims", [[], [5000], [50, 100], [20, 25, 10], [5, 10, 10, 10], [5] * 5])
@pytest.mark.parametrize("symbolic", [False, True])
def test_dropout_of_any_rank(dims, symbolic) -> None:
    declared = [f"d{i}" for i in range(len(dims))] if symbolic else dims
    graph = dropout(declared, 0.5)
    kept = np.mean([run(graph, seed, x=np.ones(dims, np.float32))[1].mean() for seed in seeds(8)])
    assert sigmas(kept, 0.5, 0.5, 8 * int(np.prod(dims))) < 4
    y, mask = run(graph, x=np.ones(dims, np.float32))
    assert y.shape == mask.shape == tuple(dims)
    assert np.array_equal(y, 2 * mask.astype(np.float32))


@pytest.mark.parametrize("dims", [[0], [0, 3], [3, 0], [2, 0, 4]])
def test_dropout_of_nothing(dims) -> None:
    y, mask = run(dropout([f"d{i}" for i in range(len(dims))]), x=np.ones(dims, np.float32))
    assert y.shape == mask.shape == tuple(dims)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_dropout_in_any_precision(dtype) -> None:
    x = np.random.default_rng(1).normal(size=(100, 40)).astype(dtype)
    y, mask = run(dropout([100, 40], 0.25, dtype), x=x)
    assert y.dtype == dtype
    np.testing.assert_allclose(y, x * mask / 0.75, rtol=2e-3 if dtype is np.float16 else 1e-6)
    _, single = run(dropout([100, 40], 0.25), x=x.astype(np.float32))
    assert np.array_equal(mask, single)  # what is dropped does not depend on the precision


def test_dropout_without_a_mask_and_without_a_ratio() -> None:
    graph = training_graph(
        [node("Dropout", ["x", "", "training"], ["y"])],
        [value("x", [100, 100])],
        ["y"],
        {"training": np.array(True)},
    )
    (y,) = run(graph, x=np.ones((100, 100), np.float32))
    assert set(np.unique(y)) == {0, 2}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("ratio", [0.2, 0.7])
def test_ratio_and_mode_may_be_inputs(training, ratio) -> None:
    graph = training_graph(
        [node("Dropout", ["x", "ratio", "training"], ["y", "mask"])],
        [value("x", ["N", 50]), value("ratio", []), value("training", [], TensorProto.BOOL)],
        ["y", "mask"],
    )
    x = np.ones((200, 50), np.float32)
    y, mask = run(graph, x=x, ratio=np.float32(ratio), training=np.array(training))
    if training:
        assert sigmas(mask.mean(), 1 - ratio, 0.5, mask.size) < 4
        np.testing.assert_allclose(y, mask / (1 - ratio), rtol=1e-6)
    else:
        assert mask.all() and np.array_equal(y, x)


@pytest.mark.parametrize("inputs", [["x"], ["x", "ratio"], ["x", "ratio", "training"]])
def test_dropout_that_drops_nothing_needs_no_seed(inputs) -> None:
    graph = training_graph(
        [node("Dropout", inputs, ["y"])],
        [value("x", [4, 4])],
        ["y"],
        {"ratio": np.float32(0.5), "training": np.array(False)},
    )
    assert "random_seed" not in [v.name for v in graph.graph.input]
    x = np.ones((4, 4), np.float32)
    assert np.array_equal(run(graph, x=x)[0], x)


# ---- independence --------------------------------------------------------------------------------


def masks(graph: onnx.ModelProto, count: int, dims: tuple) -> np.ndarray:
    x = np.ones(dims, np.float32)
    return np.array([run(graph, seed, x=x) for seed in seeds(count)], np.float64)


def assert_uncorrelated(a: np.ndarray, b: np.ndarray, share: float, limit: float = 4) -> None:
    product = (a - share) * (b - share)
    assert sigmas(product.mean(), 0, share * (1 - share), product.size) < limit


def test_steps_nodes_rows_and_columns_are_independent() -> None:
    graph = training_graph(
        [node("Dropout", ["x", "ratio", "training"], [f"y{k}", f"m{k}"]) for k in range(3)],
        [value("x", [200, 60])],
        ["m0", "m1", "m2"],
        {"ratio": np.float32(0.3), "training": np.array(True)},
    )
    drawn = masks(graph, 6, (200, 60))  # step, node, row, column
    for axis in range(4):
        for distance in (1, 2):
            a = np.delete(drawn, range(distance), axis)
            b = np.delete(drawn, range(drawn.shape[axis] - distance, drawn.shape[axis]), axis)
            assert_uncorrelated(a, b, 0.7)
    flat = drawn.reshape(6 * 3, 200 * 60)
    rates = flat.mean(1)
    assert sigmas(rates.std(), np.sqrt(0.21 / flat.shape[1]), rates.std(), 36) < 4
    for axis in (2, 3):  # no row and no column is kept more than others
        rates = drawn.mean((0, 1, 5 - axis))
        count = drawn.size // rates.size
        assert np.abs(rates - 0.7).max() < 5 * np.sqrt(0.21 / count)


def test_the_corners_of_rectangles_are_independent() -> None:
    """Numbers come from one hash for each row and one for each column; that must not show."""
    drawn = masks(dropout([256, 64], 0.5, names="y mask"), 4, (256, 64))[:, 1] - 0.5
    corners = drawn[:, ::2, ::2] * drawn[:, 1::2, ::2] * drawn[:, ::2, 1::2] * drawn[:, 1::2, 1::2]
    assert sigmas(corners.mean(), 0, 0.5**4, corners.size) < 4


def test_neighbouring_seeds_are_independent() -> None:
    graph = dropout([100, 100], 0.5)
    x = np.ones((100, 100), np.float32)
    drawn = [
        run(graph, np.array(seed, np.uint32), x=x)[1]
        for seed in ((0, 0), (0, 1), (1, 0), (2, 0), (2**32 - 1, 0))
    ]
    for i, a in enumerate(drawn):
        for b in drawn[:i]:
            assert_uncorrelated(a, b, 0.5)


def test_the_same_seed_draws_the_same() -> None:
    graph = dropout([30, 30], 0.5)
    x = np.ones((30, 30), np.float32)
    assert np.array_equal(run(graph, x=x)[1], run(graph, x=x)[1])
    # A part of a batch is dropped as it is in the whole: a row depends on its number alone.
    wide = dropout(["N", 30], 0.5)
    assert np.array_equal(run(wide, x=x)[1][:7], run(wide, x=x[:7])[1])


# ---- the other operators -------------------------------------------------------------------------


def random_node(op: str, dims: list, **attributes: object) -> onnx.ModelProto:
    if op.endswith("Like"):
        made, inputs = node(op, ["x"], ["y"], **attributes), [value("x", dims)]
    else:
        made, inputs = node(op, [], ["y"], shape=dims, **attributes), []
    return training_graph([made], inputs, ["y"])


LIKE_OR_NOT = pytest.mark.parametrize("like", ["", "Like"])


@LIKE_OR_NOT
def test_random_uniform(like) -> None:
    graph = random_node(f"RandomUniform{like}", [100, 500], low=-2.0, high=3.0)
    (y,) = run(graph, x=np.ones((100, 500), np.float32))
    assert y.shape == (100, 500) and y.min() >= -2 and y.max() < 3
    counts = np.histogram(y, 50, (-2, 3))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 90  # chi-square of 49 degrees: 1 in 3000
    assert_uncorrelated((y + 2) / 5, np.roll((y + 2) / 5, 1), 0.5)


@LIKE_OR_NOT
def test_random_normal(like) -> None:
    graph = random_node(f"RandomNormal{like}", [100, 500], mean=1.0, scale=2.0)
    (y,) = run(graph, x=np.ones((100, 500), np.float32))
    z = (y.astype(np.float64) - 1) / 2
    assert sigmas(z.mean(), 0, 1, z.size) < 4
    assert sigmas((z**2).mean(), 1, np.sqrt(2), z.size) < 4
    assert sigmas((z**3).mean(), 0, np.sqrt(15), z.size) < 4
    assert sigmas((z**4).mean(), 3, np.sqrt(96), z.size) < 4
    for share, bound in ((0.6827, 1), (0.9545, 2), (0.9973, 3)):
        assert sigmas((np.abs(z) < bound).mean(), share, np.sqrt(share * (1 - share)), z.size) < 4
    assert np.isfinite(y).all() and np.abs(z).max() > 3.5


@pytest.mark.parametrize("op", ["RandomNormal", "RandomUniform", "RandomNormalLike"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_random_numbers_in_any_precision(op, dtype) -> None:
    graph = random_node(op, [20, 50], dtype=TYPES[dtype])
    (y,) = run(graph, x=np.ones((20, 50), np.float32))
    assert y.dtype == dtype and np.isfinite(y).all()
    assert sigmas(y.mean(dtype=np.float64), 0 if "Normal" in op else 0.5, 1, y.size) < 4


@pytest.mark.parametrize("dims", [[], [7], [0, 2], [2, 3, 4, 5, 6]])
@pytest.mark.parametrize("op", ["RandomNormalLike", "RandomUniformLike"])
def test_random_numbers_of_any_rank(op, dims) -> None:
    (y,) = run(random_node(op, [f"d{i}" for i in range(len(dims))]), x=np.ones(dims, np.float32))
    assert y.shape == tuple(dims) and y.dtype == np.float32


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, np.bool_])
def test_bernoulli(dtype) -> None:
    graph = training_graph(
        [node("Bernoulli", ["p"], ["y"], dtype=TYPES[dtype])], [value("p", ["N", 5])], ["y"]
    )
    p = np.tile(np.float32([0, 0.1, 0.5, 0.9, 1]), (20_000, 1))
    (y,) = run(graph, p=p)
    assert y.dtype == dtype and set(np.unique(y)) == {0, 1}
    rates = y.mean(0, dtype=np.float64)
    assert rates[0] == 0 and rates[4] == 1
    for rate, chance in zip(rates[1:4], (0.1, 0.5, 0.9), strict=True):
        assert sigmas(rate, chance, np.sqrt(chance * (1 - chance)), len(p)) < 4


# ---- names and places ----------------------------------------------------------------------------


def test_the_seed_is_the_last_input() -> None:
    graph = dropout([4, 4])
    last = graph.graph.input[-1]
    assert last.name == "random_seed"
    assert last.type.tensor_type.elem_type == TensorProto.UINT32
    assert [d.dim_value for d in last.type.tensor_type.shape.dim] == [2]
    onnx.checker.check_model(graph, full_check=True)
    assert {n.domain for n in graph.graph.node} == {""}
    assert not {n.op_type for n in graph.graph.node} & {"Dropout"}


def test_names_of_values_stay() -> None:
    assert [v.name for v in dropout([4, 4]).graph.output][:3] == ["loss", "y", "mask"]


def test_a_model_that_has_the_name_already() -> None:
    with pytest.raises(ModelError, match="rename it"):
        training_graph(
            [node("Dropout", ["random_seed", "", "training"], ["y"])],
            [value("random_seed", [4])],
            ["y"],
            {"training": np.array(True)},
        )


# ---- gradients -----------------------------------------------------------------------------------


def run_trained(graph: onnx.ModelProto, parameters: dict, **feeds: np.ndarray) -> dict:
    feeds = {**feeds, **parameters, "random_seed": SEED, "lazy_reset_grad": np.array([True])}
    for name, array in parameters.items():
        feeds[f"{name}_grad.accumulation.buffer"] = np.zeros_like(array)
    session = ort.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [v.name for v in graph.graph.output]
    return dict(zip(names, session.run(names, feeds), strict=True))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_gradient_of_dropout_is_its_mask(dtype) -> None:
    rng = np.random.default_rng(0)
    made = model(
        [
            node("Dropout", ["w", "ratio", "training"], ["y"]),
            node("Mul", ["y", "x"], ["p"]),
            node("ReduceSum", ["p"], ["loss"], keepdims=0),
        ],
        [value("x", [40, 30], TYPES[dtype])],
        [value("loss", [], TYPES[dtype])],
        {
            "w": rng.normal(size=(40, 30)).astype(dtype),
            "ratio": np.float32(0.4),
            "training": np.array(True),
        },
    )
    graph = build_training_graphs(made, ["loss", "y"], ["w"]).training
    x = rng.normal(size=(40, 30)).astype(dtype)
    w = np.full((40, 30), 3, dtype)
    found = run_trained(graph, {"w": w}, x=x)
    assert 0.3 < (found["y"] == 0).mean() < 0.5
    np.testing.assert_allclose(found["w_grad.accumulation.out"], x * found["y"] / w, rtol=1e-6)


def test_gradients_of_a_variational_autoencoder() -> None:
    """z = mean + exp(spread / 2) · noise; with the noise held, finite differences are exact."""
    rng = np.random.default_rng(0)
    made = model(
        [
            node("MatMul", ["x", "mean"], ["m"]),
            node("MatMul", ["x", "spread"], ["v"]),
            node("RandomNormalLike", ["m"], ["noise"], dtype=TensorProto.DOUBLE),
            node("Mul", ["v", "half"], ["h"]),
            node("Exp", ["h"], ["s"]),
            node("Mul", ["s", "noise"], ["sn"]),
            node("Add", ["m", "sn"], ["z"]),
            node("Dropout", ["z", "ratio", "training"], ["d"]),
            node("Sin", ["d"], ["y"]),
            node("ReduceMean", ["y"], ["loss"], keepdims=0),
        ],
        [value("x", ["N", 4], TensorProto.DOUBLE)],
        [value("loss", [], TensorProto.DOUBLE)],
        {
            "mean": rng.normal(size=(4, 3)),
            "spread": rng.normal(size=(4, 3)),
            "half": np.float64(0.5),
            "ratio": np.float32(0.3),
            "training": np.array(True),
        },
    )
    graph = build_training_graphs(made, ["loss"], ["mean", "spread"]).training
    x = rng.normal(size=(8, 4))
    parameters = {"mean": rng.normal(size=(4, 3)), "spread": rng.normal(size=(4, 3))}
    found = run_trained(graph, parameters, x=x)
    for name, value_ in parameters.items():
        way = rng.normal(size=(4, 3))
        up, down = (
            run_trained(graph, parameters | {name: value_ + sign * 1e-6 * way}, x=x)["loss"]
            for sign in (1, -1)
        )
        gradient = found[f"{name}_grad.accumulation.out"]
        assert np.abs(gradient).max() > 1e-3
        np.testing.assert_allclose((gradient * way).sum(), (up - down) / 2e-6, rtol=1e-5)


# ---- any runtime ---------------------------------------------------------------------------------


def test_the_oldest_onnxruntime_draws_the_same(tmp_path) -> None:
    if not Path(OLDEST).exists():
        pytest.skip(f"no environment with the oldest onnxruntime at {OLDEST}; `make test` makes it")
    graphs = {
        "dropout": dropout(["N", 40], 0.3),
        "static": dropout([30, 40], 0.5),
        "uniform": random_node("RandomUniformLike", ["N", 40]),
        "normal": random_node("RandomNormalLike", ["N", 40]),
        "shape": random_node("RandomNormal", [3, 1000], mean=2.0),
        "bernoulli": training_graph(
            [node("Bernoulli", ["x"], ["y"])], [value("x", ["N", 40])], ["y"]
        ),
    }
    for name, graph in graphs.items():
        onnx.save(graph, tmp_path / f"{name}.onnx")
    x = np.random.default_rng(0).normal(size=(30, 40)).astype(np.float32)
    for seed in seeds(2):
        np.savez(tmp_path / "feeds.npz", **feeds_of(graphs["dropout"], seed, x=x))
        program = [OLDEST, str(HERE / "oldest_program.py"), str(tmp_path)]
        subprocess.run(program, check=True, capture_output=True)
        newest = run_all(tmp_path)
        with np.load(tmp_path / "outputs.npz") as oldest:
            for name, ours in newest.items():
                if ours.dtype == bool:
                    assert np.array_equal(ours, oldest[name]), name
                else:  # Log and Cos are not rounded alike
                    np.testing.assert_allclose(ours, oldest[name], rtol=1e-5, atol=1e-5)
