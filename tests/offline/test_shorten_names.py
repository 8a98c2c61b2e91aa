"""Short names in the files of graphs: which ones, and that nothing else changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxtrain.artifacts import LossType, OptimType, generate_artifacts
from onnxtrain.offline.blocks.values import all_graphs
from onnxtrain.offline.writer.shorten_names import names_in, shorten_names


@pytest.fixture
def network() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    arrays = {"w1": (6, 5), "w2": (5, 3), "b2": (3,)}
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w1"], ["hidden"], name="first"),
            helper.make_node("Relu", ["hidden"], ["_0"], name="act"),
            helper.make_node("Gemm", ["_0", "w2", "b2"], ["scores"], name="second"),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 6])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", 3])],
        [
            numpy_helper.from_array(rng.normal(size=s).astype(np.float32), n)
            for n, s in arrays.items()
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@pytest.fixture
def folder(network: onnx.ModelProto, tmp_path: Path) -> Path:
    generate_artifacts(
        network, requires_grad=["w1", "w2", "b2"], loss=LossType.CrossEntropyLoss,
        optimizer=OptimType.AdamW, artifact_directory=tmp_path,
    )  # fmt: skip
    return tmp_path


@pytest.mark.parametrize("name", ["training_model", "step_model", "optimizer_model"])
def test_what_names_stay(folder: Path, name: str) -> None:
    model = onnx.load(folder / f"{name}.onnx")
    nodes = [node for graph in all_graphs(model.graph) for node in graph.node]
    made = [value for node in nodes for value in node.output]
    outputs = {value.name for value in model.graph.output}
    own = [value for value in made if value not in outputs]
    if name != "optimizer_model":
        assert {"hidden", "_0"} <= set(own), "values of the forward pass"
    short = [value for value in own if value.startswith("_") and value != "_0"]
    assert len(short) > 10 and max(map(len, short)) <= 4
    assert len(set(made)) == len(made)
    assert all(node.name for node in nodes)
    calls = {v for node in model.graph.node if node.domain == "ai.onnxtrain" for v in node.output}
    assert not {v.name for v in model.graph.value_info} & set(short) - calls
    onnx.checker.check_model(model, full_check=True)


def test_results_are_the_same(folder: Path) -> None:
    """Also in bodies: a Scan whose body has a value of the forward pass's name is left alone."""
    model = onnx.load(folder / "training_model.onnx")
    again = onnx.ModelProto()
    again.CopyFrom(model)
    shorten_names(again, names_in(ir.from_proto(onnx.load(folder / "eval_model.onnx")).graph))
    feeds = {
        value.name: np.ones([d.dim_value or 2 for d in value.type.tensor_type.shape.dim],
                            helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
        for value in model.graph.input
    }  # fmt: skip
    first, second = (
        ort.InferenceSession(m.SerializeToString()).run(None, feeds) for m in (model, again)
    )
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


def test_bodies_are_renamed_with_what_is_around_them() -> None:
    body = helper.make_graph(
        [helper.make_node("Add", ["a_long_name_outside", "of_the_step"], ["sum_in_the_body"])],
        "body",
        [helper.make_tensor_value_info("of_the_step", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("sum_in_the_body", TensorProto.FLOAT, [2])],
    )
    graph = helper.make_graph(
        [
            helper.make_node("Neg", ["x"], ["a_long_name_outside"]),
            helper.make_node("Scan", ["rows"], ["result"], body=body, num_scan_inputs=1),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2]),
         helper.make_tensor_value_info("rows", TensorProto.FLOAT, [3, 2])],
        [helper.make_tensor_value_info("result", TensorProto.FLOAT, [3, 2])],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    shorten_names(model, ())
    assert b"long_name" not in model.SerializeToString()
    onnx.checker.check_model(model, full_check=True)
    session = ort.InferenceSession(model.SerializeToString())
    x, rows = np.float32([1, 2]), np.arange(6, dtype=np.float32).reshape(3, 2)
    np.testing.assert_array_equal(session.run(None, {"x": x, "rows": rows})[0], rows - x)
