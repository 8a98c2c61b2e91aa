"""A new last layer: the rest of the model stays as it is."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxtrain.errors import ArgumentError, ModelError, UnknownNameError
from onnxtrain.offline.passes.replace_classifier import new_head


def model(*nodes: onnx.NodeProto, dims=("batch", 6), outputs=("y",)) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    shapes = {"w": (6, 4), "wt": (4, 6), "b": (4,), "kernel": (4, 6, 1, 1), "w0": (6, 6)}
    tensors = [
        numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name)
        for name, shape in shapes.items()
    ]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w0"], ["h"]) if len(dims) < 4
         else helper.make_node("Identity", ["x"], ["h"]), *nodes],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        tensors,
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def node(op, *inputs, to="y", **attributes):
    return helper.make_node(op, list(inputs), [to], **attributes)


CASES = {
    "gemm": model(node("Gemm", "h", "w", "b")),
    "gemm-transposed": model(node("Gemm", "h", "wt", "b", transB=1)),
    "matmul": model(node("MatMul", "h", "w")),
    "matmul-add-softmax": model(
        node("MatMul", "h", "w", to="m"), node("Add", "m", "b", to="s"), node("Softmax", "s")
    ),
    "sequence": model(node("MatMul", "h", "w"), dims=("batch", 5, 6)),
    "conv": model(
        node("Conv", "h", "kernel", "b", to="c"), node("Flatten", "c"), dims=("batch", 6, 1, 1)
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_scores_are_linear_in_what_the_old_layer_read(case) -> None:
    before = CASES[case]
    made = new_head(before, 3, seed=1)
    onnx.checker.check_model(made, full_check=True)
    assert made.graph.output[0].type.tensor_type.shape.dim[-1].dim_value == 3
    assert {t.name for t in made.graph.initializer} <= {"w0", "head.weight", "head.bias"}
    sizes = [d.dim_value or 2 for d in before.graph.input[0].type.tensor_type.shape.dim]
    x = np.random.default_rng(2).normal(size=sizes).astype(np.float32)
    with_features = onnx.ModelProto()
    with_features.CopyFrom(made)
    with_features.graph.output.append(helper.make_tensor_value_info("h", TensorProto.FLOAT, None))
    scores, features = ort.InferenceSession(with_features.SerializeToString()).run(None, {"x": x})
    weights = {t.name: numpy_helper.to_array(t) for t in made.graph.initializer}
    if case == "conv":
        features = features.reshape(len(features), -1)
    expected = features @ weights["head.weight"] + weights["head.bias"]
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-6)


def test_the_given_model_is_not_changed_and_the_seed_decides() -> None:
    before = CASES["gemm"].SerializeToString()
    one, same, other = (new_head(CASES["gemm"], 3, seed=s) for s in (1, 1, 2))
    assert CASES["gemm"].SerializeToString() == before
    assert one == same != other


def test_names_that_are_taken_are_left_alone() -> None:
    again = new_head(new_head(CASES["gemm"], 3), 5)
    assert {t.name for t in again.graph.initializer} == {"w0", "head.weight", "head.bias"}
    taken = model(
        node("Identity", "h", to="scores"), node("Gemm", "scores", "w", "b"),
    )  # fmt: skip
    made = new_head(taken, 2)
    assert made.graph.output[0].name == "head.scores"


def test_what_cannot_be_replaced_is_refused(tmp_path) -> None:
    with pytest.raises(ModelError, match="not made by a linear layer"):
        new_head(model(node("Relu", "h")), 3)
    with pytest.raises(ModelError, match="not made by a linear layer"):
        new_head(model(node("MatMul", "h", "h"), dims=(6, 6)), 3)
    with pytest.raises(UnknownNameError, match="it has y"):
        new_head(CASES["gemm"], 3, of="z")
    with pytest.raises(ArgumentError, match="positive"):
        new_head(CASES["gemm"], 0)
    with pytest.raises(ModelError, match="no model file"):
        new_head(str(tmp_path / "none.onnx"), 3)


def test_the_layer_can_go_behind_any_value_of_known_width() -> None:
    whole = model(node("Relu", "h", to="r"), node("Gemm", "r", "w", "b"))
    made = new_head(whole, 2, after="h")
    assert [n.op_type for n in made.graph.node] == ["MatMul", "Flatten", "MatMul", "Add"]
    with pytest.raises(UnknownNameError, match="'nothing'"):
        new_head(whole, 2, after="nothing")
    unknown = model(node("MatMul", "h", "w"), dims=("batch", "length", 6))
    with pytest.raises(ModelError, match="fixed sizes"):
        new_head(unknown, 2, after="h")
