"""Linear layers on sequences are one Gemm in training graphs, and compute what they did before."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxtrain.offline.frontend.canonical_model import canonical_model
from onnxtrain.offline.graph.sweep import sweep
from onnxtrain.offline.passes.linear_layers import join_linear_layers


def layer(
    shape: list[int | str],
    transposed: bool = True,
    bias: tuple[int, ...] = (5,),
    bias_first: bool = False,
    product_is_output: bool = False,
) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((5, 4) if transposed else (4, 5)).astype(np.float32)
    nodes = [helper.make_node("Transpose", ["w"], ["wt"], perm=[1, 0])] if transposed else []
    nodes.append(helper.make_node("MatMul", ["x", "wt" if transposed else "w"], ["p"]))
    nodes.append(helper.make_node("Add", ["b", "p"] if bias_first else ["p", "b"], ["y"]))
    graph = helper.make_graph(
        nodes,
        "layer",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, [*shape[:-1], 5])
            for name in (["y", "p"] if product_is_output else ["y"])
        ],
        [
            numpy_helper.from_array(weight, "w"),
            numpy_helper.from_array(rng.standard_normal(bias).astype(np.float32), "b"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def joined(model: onnx.ModelProto) -> onnx.ModelProto:
    made = canonical_model(model)
    join_linear_layers(made)
    sweep(made.graph)
    return ir.to_proto(made)


def run(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options)
    return session.run(["y"], {"x": x})[0]


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("bias_first", [True, False])
@pytest.mark.parametrize("shape", [["n", 3, 4], ["n", "t", 4], [2, 3, 4], ["a", "b", 6, 4]])
def test_layers_are_joined(shape: list[int | str], transposed: bool, bias_first: bool) -> None:
    model = layer(shape, transposed, bias_first=bias_first)
    made = joined(model)
    onnx.checker.check_model(made, full_check=True)
    kinds = [node.op_type for node in made.graph.node]
    assert "Gemm" in kinds and "MatMul" not in kinds and "Transpose" not in kinds
    sizes = [d if isinstance(d, int) else i + 2 for i, d in enumerate(shape)]
    x = np.random.default_rng(1).standard_normal(sizes).astype(np.float32)
    expected = run(model, x)
    result = run(made, x)
    assert result.shape == expected.shape
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "model",
    [
        layer(["n", 4]),  # a matrix: onnxruntime joins those by itself
        layer(["n", 3, 4], bias=(3, 5)),  # not the bias of a layer
        layer(["n", 3, 4], bias=(1,)),
        layer(["n", 3, 4], product_is_output=True),  # the product is wanted as well
    ],
    ids=["matrix", "wide-bias", "scalar-bias", "product-is-output"],
)
def test_others_are_left_alone(model: onnx.ModelProto) -> None:
    assert "MatMul" in [node.op_type for node in joined(model).graph.node]
