"""The nodes that exporters write for Gelu: one gradient for all, and nothing kept between."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from gradcheck import check_gradient, run
from onnxtrain.offline.autodiff.engine import differentiate
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.passes.formulas import join_formulas

ORDERS = {
    "torch": ["Div x root2 a", "Erf a b", "Add b one c", "Mul x c d", "Mul d half y"],
    "half first": ["Mul x half h", "Div x root2 a", "Erf a b", "Add b one c", "Mul h c y"],
    "dynamo": ["Div x root2 a", "Erf a b", "Add b one c", "Mul half c d", "Mul x d y"],
    "product": ["Mul x root_half a", "Erf a b", "Add one b c", "Mul half c d", "Mul d x y"],
}


def gelu_model(order: str, outputs=("y",), dtype=TensorProto.FLOAT, **changed) -> onnx.ModelProto:
    numbers = {"root2": math.sqrt(2), "root_half": math.sqrt(0.5), "one": 1.0, "half": 0.5}
    numbers |= changed
    nodes = []
    for line in ORDERS[order]:
        op, *inputs, output = line.split()
        nodes.append(helper.make_node(op, inputs, [output], name=f"{op}_{output}"))
    used = {name for node in nodes for name in node.input}
    array_type = helper.tensor_dtype_to_np_dtype(dtype)
    graph = helper.make_graph(
        nodes,
        "gelu",
        [helper.make_tensor_value_info("x", dtype, ["n", 5])],
        [helper.make_tensor_value_info(name, dtype, ["n", 5]) for name in outputs],
        [
            numpy_helper.from_array(np.array(v, array_type), k)
            for k, v in numbers.items()
            if k in used
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def sample(dtype=np.float32) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(4, 5), scale=2).astype(dtype)


def slope(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    cumulative = np.vectorize(lambda v: 0.5 * (1 + math.erf(v / math.sqrt(2))))(x)
    return cumulative + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


@pytest.mark.parametrize("order", ORDERS)
def test_gradient_in_every_order_of_the_factors(order: str) -> None:
    model = onnxtrain.gradient(gelu_model(order), "x", of="y")
    x = sample()
    dy = np.linspace(-1, 2, x.size, dtype=np.float32).reshape(x.shape)
    y, dx = run(model, {"x": x, "y_grad": dy})
    np.testing.assert_allclose(y, run(gelu_model(order), {"x": x})[0], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(dx, dy * slope(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("order", ["torch", "half first", "dynamo"])
def test_the_forward_pass_is_fused(order: str, tmp_path) -> None:
    model = onnxtrain.gradient(gelu_model(order), "x", of="y")
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    optimised = onnx.load(options.optimized_model_filepath)
    assert "Gelu" in [node.op_type for node in optimised.graph.node]


def test_far_from_zero_the_slope_is_0_or_1() -> None:
    model = onnxtrain.gradient(gelu_model("torch"), "x", of="y")
    x = np.array([[-1000, -20, 0, 20, 1000]], np.float32)
    _, dx = run(model, {"x": x, "y_grad": np.ones_like(x)})
    np.testing.assert_array_equal(dx, [[0, 0, 0.5, 1, 1]])


def test_in_half_precision() -> None:
    model = onnxtrain.gradient(gelu_model("torch", dtype=TensorProto.FLOAT16), "x", of="y")
    x = sample(np.float16)
    _, dx = run(model, {"x": x, "y_grad": np.ones_like(x)})
    np.testing.assert_allclose(dx, slope(x), atol=5e-3)


@pytest.mark.parametrize("changed", [{"half": 0.4}, {"one": 0.9}, {"root2": 1.5}])
def test_what_only_looks_like_it_is_taken_node_by_node(changed: dict) -> None:
    model = gelu_model("torch", **changed)
    check_gradient(model, {"x": sample()}, ["x"], of="y")


def test_a_value_between_that_is_an_output_too() -> None:
    model = gelu_model("torch", outputs=("y", "c"))
    for output in ("y", "c"):
        extended = onnxtrain.gradient(model, "x", of=output)
        x = sample()
        values = run(extended, {"x": x, f"{output}_grad": np.ones_like(x)})
        density = np.exp(-x * x / 2) * 2 / math.sqrt(2 * math.pi)
        expected = slope(x) if output == "y" else density
        np.testing.assert_allclose(values[-1], expected, rtol=1e-5, atol=1e-6)


def test_gradients_of_what_lies_between_can_be_asked_for() -> None:
    extended = onnxtrain.gradient(gelu_model("torch"), ["x", "c"], of="y")
    x = sample()
    _, dx, dc = run(extended, {"x": x, "y_grad": np.ones_like(x)})
    np.testing.assert_allclose(dx, slope(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dc, x / 2, rtol=1e-6)


def test_a_factor_that_is_trained_is_no_number() -> None:
    model = gelu_model("torch")
    extended = onnxtrain.gradient(model, ["x", "half"], of="y")
    x = sample()
    y, dx, dhalf = run(extended, {"x": x, "y_grad": np.ones_like(x)})
    np.testing.assert_allclose(dx, slope(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dhalf, (2 * y).sum(), rtol=1e-5)


@pytest.mark.parametrize("joined", [False, True])
def test_only_the_pass_changes_the_forward_graph(joined: bool) -> None:
    graph = ir.from_proto(gelu_model("dynamo")).graph
    (x,), (y,), forward = graph.inputs, graph.outputs, list(graph)
    inputs = [tuple(node.inputs) for node in forward]
    rules = join_formulas(graph, [x, y]) if joined else {}
    differentiate(Ops(graph, 18), forward, {y: y}, [x], rules=rules)
    assert ([tuple(node.inputs) for node in forward] != inputs) == joined
    written = [node.op_type for node in graph][len(forward) :]
    assert written.count("Erf") == joined  # else each node has its own gradient
