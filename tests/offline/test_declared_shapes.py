"""Declared shapes that are wrong: inference counts, and where only running tells, labels fit.

onnxruntime runs all of these models, most of them with a warning.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from onnxtrain import onnxblock
from onnxtrain.errors import OnnxTrainError
from onnxtrain.offline.frontend.canonical_model import canonical_model
from onnxtrain.onnxblock import blocks

Shape = Sequence[int | str | None] | None
RNG = np.random.default_rng(0)


def info(name: str, shape: Shape, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def weight(name: str, *shape: int) -> onnx.TensorProto:
    return numpy_helper.from_array(0.3 * RNG.standard_normal(shape).astype(np.float32), name)


def network(
    declared: Shape, middle: Shape = None, x: Shape = ("batch_size", 4), last: str = "MatMul"
) -> onnx.ModelProto:
    """Two layers whose result has the shape [N, 3]; `last` decides whether inference can tell."""
    if last == "MatMul":
        end = [helper.make_node("MatMul", ["r", "w2"], ["y"])]
    else:  # a shape that is an input: nobody knows even the rank
        end = [
            helper.make_node("MatMul", ["r", "w2"], ["m"]),
            helper.make_node("Reshape", ["m", "shape"], ["y"]),
        ]
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w1"], ["h"]),
            helper.make_node("Tanh", ["h"], ["r"]),
            *end,
        ],
        "network",
        [info("x", x), *([info("shape", ["k"], TensorProto.INT64)] if last != "MatMul" else [])],
        [info("y", declared)],
        [weight("w1", 4, 5), weight("w2", 5, 3)],
        value_info=[] if middle is None else [info("h", middle)],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def trains(model: onnx.ModelProto, folder: Path, loss: str = "mse", **feeds: Any) -> None:
    """The loss is that of numpy, and falls; of any batch size that the input takes."""
    written = onnxtrain.prepare(model, folder, loss=loss, optimizer="sgd")
    session = onnxtrain.TrainingSession.from_folder(folder)
    session.set_learning_rate(0.1)
    first = model.graph.input[0].type.tensor_type.shape.dim[0]
    for size in [first.dim_value] if first.dim_value > 0 else [1, 2, 5]:
        x = RNG.standard_normal((size, 4)).astype(np.float32)
        given = {"x": x, **feeds}
        options = ort.SessionOptions()
        options.log_severity_level = 4
        scores = ort.InferenceSession(model.SerializeToString(), options).run(None, given)[0]
        if loss == "mse":
            labels = {"target": RNG.standard_normal(scores.shape).astype(np.float32)}
            w1, w2 = (session.get_parameter(name) for name in ("w1", "w2"))
            result = (np.tanh(x @ w1) @ w2).reshape(scores.shape)
            expected = np.mean((result - labels["target"]) ** 2)
        else:
            labels, expected = {"labels": RNG.integers(0, 3, size)}, None
        losses = [float(session.step(**given, **labels)[0]) for _ in range(2)]
        assert losses[1] < losses[0]
        if expected is not None:
            assert losses[0] == pytest.approx(float(expected), rel=1e-4)
    assert set(written.trainable) == {"w1", "w2"}


WRONG: dict[str, dict[str, Any]] = {
    "right": {"declared": ["batch_size", 3]},
    "a-vector": {"declared": ["batch_size"]},
    "a-scalar": {"declared": []},
    "none": {"declared": None},
    "a-traced-batch": {"declared": [1, 3]},
    "another-size": {"declared": ["batch_size", 7]},
    "another-rank": {"declared": ["batch_size", 1, 3]},
    "another-name": {"declared": ["n", "classes"]},
    "the-wrong-name": {"declared": ["classes", "batch_size"]},
    "a-name-for-two-sizes": {"declared": ["batch_size", "batch_size"]},
    "zeros": {"declared": [0, 3]},
    "minus-one": {"declared": [-1, -1]},
    "question-marks": {"declared": ["?", "?"], "x": ["?", 4]},
    "tf2onnx": {"declared": ["unk__9", 3], "x": ["unk__7", 4]},
    "unknown-input": {"declared": ["batch", 3], "x": [None, 4]},
    "a-traced-batch-everywhere": {"declared": [1, 3], "middle": [1, 5], "x": ["None", 4]},
    "minus-one-everywhere": {"declared": [-1, -1], "x": [-1, 4]},
    "stale-middle": {"declared": ["batch_size", 3], "middle": [2, 5]},
    "wrong-middle": {"declared": ["batch_size", 3], "middle": ["batch_size", 9]},
    "wrong-rank-in-the-middle": {"declared": [], "middle": [5]},
    "static-input": {"declared": [1, 1, 3], "x": [2, 4]},
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
def test_inference_counts(case: str, loss: str, tmp_path: Path) -> None:
    trains(network(**WRONG[case]), tmp_path, loss)


@pytest.mark.parametrize(
    "declared",
    [["batch_size", 3], ["batch_size"], [], None, [7, 3], [0, -1], ["a", "b", "c"]],
    ids=str,
)
def test_what_only_running_tells(declared: Shape, tmp_path: Path) -> None:
    """The last Reshape gives any rank; the target takes the shape that comes out."""
    feeds = {"shape": np.array([-1, 3])}
    trains(network(declared, last="Reshape"), tmp_path / "a", **feeds)
    trains(network(declared, last="Reshape"), tmp_path / "b", shape=np.array([3, 1, -1]))


def test_a_target_never_broadcasts(tmp_path: Path) -> None:
    """[N] against [N, 1] would be a matrix of differences."""
    onnxtrain.prepare(network(None, last="Reshape"), tmp_path, loss="mse")
    session = onnxtrain.TrainingSession.from_folder(tmp_path)
    x, shape = RNG.standard_normal((2, 4)).astype(np.float32), np.array([-1, 1])
    target = RNG.standard_normal(6).astype(np.float32)
    loss, scores = session.eval_step(x=x, shape=shape, target=target)[:2]
    assert scores.shape == (6, 1)
    assert float(loss) == pytest.approx(np.mean((scores[:, 0] - target) ** 2), rel=1e-5)
    with pytest.raises(Exception, match=r"(?i)reshape"):
        session.eval_step(x=x, shape=shape, target=target[:1])


def test_a_function_loss_has_a_label_that_fits(tmp_path: Path) -> None:
    def loss(scores: str, wanted: str) -> str:
        return blocks.ReduceMean(keepdims=False)(blocks.Abs()(blocks.Sub()(scores, wanted)))

    onnxtrain.prepare(network([]), tmp_path, loss=loss)
    session = onnxtrain.TrainingSession.from_folder(tmp_path)
    x = RNG.standard_normal((2, 4)).astype(np.float32)
    assert np.isfinite(session.step(x=x, wanted=np.zeros((2, 3), np.float32))[0])


def test_blocks_see_what_is_true() -> None:
    with onnxblock.base(network(["batch_size"])) as accessor:
        onnxblock.loss.MSELoss()("y")
        target = accessor.model.graph.input[-1]
    dims = [d.dim_param or d.dim_value for d in target.type.tensor_type.shape.dim]
    assert dims == ["batch_size", 3]


def test_declarations_fill_what_inference_leaves_open() -> None:
    """A Reshape to a computed shape: value_info tells the sizes that gradients can use."""
    graph = helper.make_graph(
        [
            helper.make_node("Reshape", ["x", "shape"], ["r"]),
            helper.make_node("MatMul", ["r", "w"], ["y"]),
        ],
        "g", [info("x", ["N", 4]), info("shape", [2], TensorProto.INT64)], [info("y", None)],
        [weight("w", 4, 3)], value_info=[info("r", ["N", 4])],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    found = {v.name: v.shape for node in canonical_model(model).graph for v in node.outputs}
    assert str(found["r"]) == "[N,4]"
    assert str(found["y"]) == "[N,3]"


def test_declarations_inside_branches() -> None:
    def branch(name: str, shape: Shape) -> onnx.GraphProto:
        node = helper.make_node("MatMul", ["x", name], [f"{name}_y"])
        return helper.make_graph([node], name, [], [info(f"{name}_y", shape)])

    graph = helper.make_graph(
        [helper.make_node("If", ["flag"], ["y"], then_branch=branch("a", [1]),
                          else_branch=branch("b", ["batch"]))],
        "g", [info("x", ["N", 4]), info("flag", [], TensorProto.BOOL)], [info("y", [])],
        [weight("a", 4, 3), weight("b", 4, 3)],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    assert str(canonical_model(model).graph.outputs[0].shape) == "[N,3]"


def test_labels_of_another_size_are_still_refused(tmp_path: Path) -> None:
    onnxtrain.prepare(network(["n"]), tmp_path, loss="mse")
    session = onnxtrain.TrainingSession.from_folder(tmp_path)
    x = RNG.standard_normal((2, 4)).astype(np.float32)
    with pytest.raises(OnnxTrainError, match="'batch_size' is 2 in 'x' and 3 in 'target'"):
        session.step(x=x, target=np.zeros((3, 3), np.float32))


def test_the_state_of_a_recurrent_layer_decides_the_batch(tmp_path: Path) -> None:
    """As in AECMOS: any batch is declared, the state has one row, and a Squeeze hides the rank."""
    nodes = [
        helper.make_node("GRU", ["x", "w", "r", "", "", "h0"], ["y", ""], hidden_size=3),
        helper.make_node("MatMul", ["y", "fc"], ["z"]),
        helper.make_node("ReduceMean", ["z"], ["m"], axes=[0]),
        helper.make_node("Squeeze", ["m"], ["s"]),
        helper.make_node("Slice", ["s", "zero", "two"], ["a"]),
        helper.make_node("Slice", ["s", "two", "four"], ["b"]),
        helper.make_node("Concat", ["b", "a"], ["c"], axis=0),
    ]
    integers = {"zero": [0], "two": [2], "four": [4]}
    graph = helper.make_graph(
        nodes, "g", [info("x", ["frames", "batch_size", 2]), info("h0", [1, 1, 3])],
        [info("c", ["batch_size"])],
        [weight("w", 1, 9, 2), weight("r", 1, 9, 3), weight("fc", 3, 4),
         *(numpy_helper.from_array(np.array(v), n) for n, v in integers.items())],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnxtrain.prepare(model, tmp_path, loss="mse")
    session = onnxtrain.TrainingSession.from_folder(tmp_path)
    feeds = {"x": np.ones((5, 1, 2), np.float32), "h0": np.ones((1, 1, 3), np.float32)}
    losses = [float(session.step(**feeds, target=np.ones(4, np.float32))[0]) for _ in range(2)]
    assert losses[1] < losses[0]


def test_an_input_of_size_zero_takes_any_size(tmp_path: Path) -> None:
    """Of the model itself, onnxruntime takes no samples at all."""
    onnxtrain.prepare(network([0, 1], x=[0, 4]), tmp_path, loss="mse")
    session = onnxtrain.TrainingSession.from_folder(tmp_path)
    for size in (1, 3):
        x, target = np.ones((size, 4), np.float32), np.ones((size, 3), np.float32)
        assert np.isfinite(session.step(x=x, target=target)[0])


def test_ranks_come_from_use_through_pools_and_norms() -> None:
    """As in pyannote's segmentation: `squeeze` is an If, and the next Conv is some layers away."""
    then = helper.make_graph(
        [helper.make_node("Squeeze", ["x", "one"], ["squeezed"])], "then", [],
        [info("squeezed", None)],
    )  # fmt: skip
    otherwise = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["same"])], "else", [], [info("same", None)]
    )
    graph = helper.make_graph(
        [
            helper.make_node("If", ["flag"], ["y"], then_branch=then, else_branch=otherwise),
            helper.make_node("Abs", ["y"], ["a"]),
            helper.make_node("MaxPool", ["a"], ["p"], kernel_shape=[3]),
            helper.make_node("InstanceNormalization", ["p", "scale", "bias"], ["n"]),
            helper.make_node("Conv", ["n", "w"], ["z"]),
        ],
        "g", [info("x", ["B", "C", "T"]), info("flag", [], TensorProto.BOOL)], [info("z", None)],
        [weight("scale", 2), weight("bias", 2), weight("w", 4, 2, 3),
         numpy_helper.from_array(np.array([1]), "one")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    found = {v.name: v.shape for node in canonical_model(model).graph for v in node.outputs}
    assert str(found["y"]) == "[B,C,T]"
