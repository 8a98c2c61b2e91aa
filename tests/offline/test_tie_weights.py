"""Matrices of equal values are one parameter: found, named, trained, exported, and kept apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

import onnxtrain
from graphs import model, value
from onnxtrain.api import CheckpointState
from onnxtrain.artifacts import generate_artifacts
from onnxtrain.errors import OnnxTrainError
from onnxtrain.offline.prepare import prepare

RANDOM = np.random.default_rng(0)
TABLE = RANDOM.standard_normal((7, 4)).astype(np.float32)
MIX = RANDOM.standard_normal((4, 4)).astype(np.float32)
TYPES = dict(optimizer="sgd", loss="mse")


def language(
    table: np.ndarray = TABLE,
    head: np.ndarray = TABLE.T,
    names: tuple[str, str] = ("table", "head"),
) -> onnx.ModelProto:
    """Rows of a table, a layer, and a product with the head."""
    return model(
        [
            helper.make_node("Gather", [names[0], "x"], ["rows"], "rows"),
            helper.make_node("MatMul", ["rows", "mix"], ["mixed"], "mix"),
            helper.make_node("Tanh", ["mixed"], ["bent"], "tanh"),
            helper.make_node("MatMul", ["bent", names[1]], ["y"], "head"),
        ],
        [value("x", ["n"], onnx.TensorProto.INT64)],
        [value("y", ["n", int(head.shape[-1])])],
        {
            names[0]: table,
            "mix": MIX,
            names[1]: np.ascontiguousarray(head),
        },
    )


def chain(**weights: np.ndarray) -> onnx.ModelProto:
    """A product with each weight in turn."""
    nodes = [
        helper.make_node("MatMul", [f"h{i}", name], [f"h{i + 1}"], f"product{i}")
        for i, name in enumerate(weights)
    ]
    last = f"h{len(weights)}"
    return model(nodes, [value("h0", ["n", 6])], [value(last, ["n", 6])], weights)


def test_one_parameter_trains_with_the_sum_of_the_gradients(tmp_path: Path) -> None:
    apart = prepare(language(), tmp_path / "apart", **TYPES, tie_weights=False)
    tied = prepare(language(), tmp_path / "tied", **TYPES)
    assert list(apart.trainable) == ["table", "mix", "head"] and not apart.tied
    assert list(tied.trainable) == ["table", "mix"]
    assert tied.tied == ("table = head (transposed)",) and "tied          table = head" in str(tied)
    x, target = np.array([1, 3, 3, 6]), np.ones((4, 7), np.float32)
    moved = {}
    for name in ("apart", "tied"):
        session = onnxtrain.TrainingSession.from_folder(tmp_path / name)
        session.set_learning_rate(1.0)
        session.step(x, target)
        moved[name] = {
            n: session.get_parameter(n) for n in (apart if name == "apart" else tied).trainable
        }
    change = moved["apart"]["table"] - TABLE + (moved["apart"]["head"] - TABLE.T).T
    np.testing.assert_allclose(moved["tied"]["table"] - TABLE, change, rtol=1e-5, atol=1e-6)


def test_the_exported_model_keeps_the_tie(tmp_path: Path) -> None:
    prepare(language(), tmp_path, **TYPES)
    session = onnxtrain.TrainingSession.from_folder(tmp_path)
    session.set_learning_rate(0.1)
    for _ in range(3):
        session.step(np.array([1, 2]), np.ones((2, 7), np.float32))
    session.export_model_for_inferencing(tmp_path / "out.onnx", ["y"])
    exported = onnx.load(tmp_path / "out.onnx")
    stored = {t.name: numpy_helper.to_array(t) for t in exported.graph.initializer}
    assert sorted(stored) == ["mix", "table"]
    table = stored["table"]
    assert not np.array_equal(table, TABLE)
    (y,) = ort.InferenceSession(tmp_path / "out.onnx").run(None, {"x": np.arange(7)})
    np.testing.assert_allclose(y, np.tanh(table @ stored["mix"]) @ table.T, rtol=1e-4, atol=1e-5)
    # What was exported is one parameter again.
    assert onnxtrain.inspect(exported).parameter_count == 7 * 4 + 4 * 4


def test_a_copy_that_the_loss_does_not_reach_follows(tmp_path: Path) -> None:
    made = language()
    made.graph.node.append(helper.make_node("MatMul", ["rows", "other"], ["z"], "other"))
    made.graph.output.append(value("z", ["n", 7]))
    made.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(TABLE.T), "other"))
    prepare(made, tmp_path, **TYPES, of="y")
    session = onnxtrain.TrainingSession.from_folder(tmp_path)
    session.set_learning_rate(1.0)
    session.step(np.array([1, 2]), np.ones((2, 7), np.float32))
    session.export_model_for_inferencing(tmp_path / "out.onnx", ["z"])
    table = session.get_parameter("table")
    (z,) = ort.InferenceSession(tmp_path / "out.onnx").run(None, {"x": np.arange(7)})
    np.testing.assert_allclose(z, table @ table.T, rtol=1e-4, atol=1e-5)


def test_the_copy_that_receives_a_gradient_is_kept() -> None:
    made = language()
    first = numpy_helper.from_array(np.ascontiguousarray(TABLE.T), "first")
    made.graph.node.insert(1, helper.make_node("MatMul", ["rows", "first"], ["z"], "other"))
    made.graph.output.append(value("z", ["n", 7]))
    made.graph.initializer.insert(0, first)
    report = onnxtrain.inspect(made, of="y")
    assert "first" not in report.weights
    assert "table" in report.weights
    assert any(line.startswith("table = ") for line in report.tied)


@pytest.mark.parametrize("name", ["table", "head"])
def test_either_name_selects_all_uses(name: str, tmp_path: Path) -> None:
    assert list(prepare(language(), tmp_path, **TYPES, train=name).trainable) == ["table"]
    frozen = prepare(language(), tmp_path, **TYPES, freeze=name)
    assert list(frozen.trainable) == ["mix"] and {"table", "head"} <= set(frozen.frozen)


def test_one_use_cannot_train_where_another_is_frozen(tmp_path: Path) -> None:
    with pytest.raises(OnnxTrainError, match=r"table = head \(transposed\) is one parameter"):
        prepare(language(), tmp_path, **TYPES, train="table", freeze="head")
    made = prepare(language(), tmp_path, **TYPES, train="table", freeze="head", tie_weights=False)
    assert list(made.trainable) == ["table"]


def test_the_name_of_a_parameter_is_kept(tmp_path: Path) -> None:
    made = language(names=("onnx::Gather_5", "lm_head.weight"))
    assert list(prepare(made, tmp_path, **TYPES).trainable) == ["mix", "lm_head.weight"]


W = RANDOM.standard_normal((6, 6)).astype(np.float32)
PATTERNS = {
    "single": np.full((1, 1), 0.3, np.float32),
    "empty": np.zeros((6, 0), np.float32),
    "zeros": np.zeros((6, 6), np.float32),
    "ones": np.ones((6, 6), np.float32),
    "identity": np.eye(6, dtype=np.float32),
    "rows": np.tile(np.log(np.arange(1, 7, dtype=np.float32)), (6, 1)),
    "different": W + np.float32(1e-7),
}


@pytest.mark.parametrize("kind", PATTERNS)
def test_what_is_equal_by_initialization_trains_apart(kind: str) -> None:
    second = PATTERNS[kind]
    first = W if kind == "different" else second
    nodes = [helper.make_node("Gather", [n, "x"], [f"{n}_row"], f"row_{n}") for n in ("a", "b")]
    nodes.append(helper.make_node("Concat", ["a_row", "b_row"], ["y"], "join", axis=0))
    ids = value("x", ["n"], onnx.TensorProto.INT64)
    made = model(nodes, [ids], [value("y", None)], {"a": first, "b": second})
    report = onnxtrain.inspect(made)
    assert list(report.weights) == ["a", "b"] and not report.tied


def test_layers_that_are_copies_train_apart() -> None:
    copies = {f"layers.{i}.{n}.weight": w for i in range(2) for n, w in (("f", W), ("g", W @ W))}
    assert not onnxtrain.inspect(chain(**copies)).tied
    # Once the layers differ, what they have in common is shared.
    copies["layers.1.g.weight"] = W + 1
    assert onnxtrain.inspect(chain(**copies)).tied == ("layers.0.f.weight = layers.1.f.weight",)


def test_several_groups_and_many_copies() -> None:
    other = RANDOM.standard_normal((6, 6)).astype(np.float32)
    made = {f"w{i}": W.T if i % 2 else W for i in range(6)} | {"v0": other, "v1": other}
    report = onnxtrain.inspect(chain(**{n: np.ascontiguousarray(w) for n, w in made.items()}))
    assert report.tied == (
        "w0 = w1 (transposed) = w2 = w3 (transposed) = 2 more", "v0 = v1",
    )  # fmt: skip
    assert report.parameter_count == 72
    assert "tied          w0 = w1 (transposed)" in str(report)
    assert onnxtrain.inspect(chain(**made), tie_weights=False).parameter_count == 8 * 36


@pytest.mark.parametrize(
    ("op_type", "shape", "says"),
    [
        ("MatMul", (1, 7, 4), ""),
        ("MatMul", (1, 1, 7, 4), ""),
        ("Conv", (4, 7, 1), " (transposed)"),
    ],
)
def test_axes_of_size_one_do_not_matter(
    op_type: str, shape: tuple[int, ...], says: str, tmp_path: Path
) -> None:
    other = (TABLE.T if says else TABLE).reshape(shape)
    made = model(
        [
            helper.make_node("MatMul", ["x", "w"], ["y"], "product"),
            helper.make_node(op_type, ["x", "other"], ["z"], "again"),
            helper.make_node("Add", ["y", "z"], ["sum"], "sum"),
            helper.make_node("Tanh", ["sum"], ["out"], "bent"),
        ],
        [value("x", ["n", 7, 7])],
        [value("out", None)],
        {"w": TABLE, "other": np.ascontiguousarray(other)},
    )
    if op_type == "Conv":  # rows and columns of the second product are the other way round
        made.graph.node.insert(2, helper.make_node("Transpose", ["z"], ["t"], perm=[0, 2, 1]))
        made.graph.node[3].input[1] = "t"
    assert onnxtrain.inspect(made).tied == (f"w = other{says}",)
    prepare(made, tmp_path, **TYPES)
    session = onnxtrain.TrainingSession.from_folder(tmp_path)
    x = RANDOM.standard_normal((2, 7, 7)).astype(np.float32)
    session.step(x, np.zeros((1,) * (len(shape) - 3) + (2, 7, 4), np.float32))
    session.export_model_for_inferencing(tmp_path / "out.onnx", ["out"])
    (out,) = ort.InferenceSession(tmp_path / "out.onnx").run(None, {"x": x})
    w = session.get_parameter("w")
    second = (w.T @ x).transpose(0, 2, 1) if says else x @ w
    np.testing.assert_allclose(out.reshape(2, 7, 4), np.tanh(x @ w + second), atol=1e-5)
    assert not np.array_equal(w, TABLE)


def test_upstreams_function_and_the_command_line(tmp_path: Path) -> None:
    from onnxtrain.cli import main

    made = generate_artifacts(language(), artifact_directory=tmp_path / "a", loss="mse")
    assert list(made.trainable) == ["table", "mix"]
    apart = generate_artifacts(
        language(), artifact_directory=tmp_path / "b", loss="mse", tie_weights=False
    )
    assert list(apart.trainable) == ["table", "mix", "head"]
    file, options = tmp_path / "model.onnx", ["--loss", "mse", "--quiet"]
    onnx.save(language(), file)
    assert main(["prepare", str(file), "-o", str(tmp_path / "c"), *options]) == 0
    assert (
        main(["prepare", str(file), "-o", str(tmp_path / "d"), "--no-tie-weights", *options]) == 0
    )
    for folder, names in (("c", {"table", "mix"}), ("d", {"table", "mix", "head"})):
        state = CheckpointState.load_checkpoint(tmp_path / folder / "checkpoint")
        assert {name for name, _ in state.parameters} == names


def test_weights_inside_a_branch_are_tied_too(tmp_path: Path) -> None:
    def branch(name: str) -> onnx.GraphProto:
        product = helper.make_node("MatMul", ["x", name], [f"{name}_y"], f"product_{name}")
        return helper.make_graph([product], name, [], [value(f"{name}_y", ["n", 6])])

    made = model(
        [
            helper.make_node(
                "If", ["flag"], ["h"], "if", then_branch=branch("a"), else_branch=branch("b")
            ),
            helper.make_node("MatMul", ["h", "c"], ["y"], "last"),
        ],
        [value("x", ["n", 6]), value("flag", [], onnx.TensorProto.BOOL)],
        [value("y", ["n", 6])],
        {"a": W, "b": np.ascontiguousarray(W.T), "c": W},
    )
    made_artifacts = prepare(made, tmp_path, **TYPES)
    assert list(made_artifacts.trainable) == ["a"]
    session = onnxtrain.TrainingSession.from_folder(tmp_path)
    x, flag = np.eye(6, dtype=np.float32), np.array(False)
    session.step(x, flag, np.zeros((6, 6), np.float32))
    session.export_model_for_inferencing(tmp_path / "out.onnx", ["y"])
    (y,) = ort.InferenceSession(tmp_path / "out.onnx").run(None, {"x": x, "flag": flag})
    w = session.get_parameter("a")
    np.testing.assert_allclose(y, w.T @ w, rtol=1e-4, atol=1e-4)


def recurrent(names: tuple[str, str]) -> onnx.ModelProto:
    """Two LSTM layers, one behind the other, whose weights have these prefixes."""
    random = np.random.default_rng(3)
    shapes = {"w": (1, 16, 4), "r": (1, 16, 4), "b": (1, 32)}
    weights = {n: random.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    tensors = {f"{name}_{key}": w for name in names for key, w in weights.items()}
    nodes = []
    for i, name in enumerate(names):
        inputs = [f"h{i}", *(f"{name}_{key}" for key in weights)]
        nodes += [
            helper.make_node("LSTM", inputs, [f"s{i}"], f"lstm{i}", hidden_size=4),
            helper.make_node("Squeeze", [f"s{i}", "axis"], [f"h{i + 1}"], f"squeeze{i}"),
        ]
    return model(
        nodes, [value("h0", [3, "n", 4])], [value("h2", [3, "n", 4])],
        tensors | {"axis": np.array([1])},
    )  # fmt: skip


def test_copies_train_as_one_initializer_that_is_used_twice(tmp_path: Path) -> None:
    """Weights of recurrent layers, and their biases, which are matrices in ONNX."""
    x, target = (
        RANDOM.standard_normal((3, 2, 4)).astype(np.float32),
        np.zeros((3, 2, 4), np.float32),
    )
    stepped = {}
    for kind, names in (("copies", ("a", "b")), ("shared", ("a", "a"))):
        made = prepare(recurrent(names), tmp_path / kind, **TYPES)
        assert list(made.trainable) == ["a_w", "a_r", "a_b"]
        session = onnxtrain.TrainingSession.from_folder(tmp_path / kind)
        session.set_learning_rate(1.0)
        for _ in range(3):
            session.step(x, target)
        stepped[kind] = session
    for name in ("a_w", "a_r", "a_b"):
        copies, shared = (stepped[kind].get_parameter(name) for kind in ("copies", "shared"))
        np.testing.assert_allclose(copies, shared, rtol=1e-4, atol=1e-5)
