"""Models that onnxruntime quantizes: gradients pass the products of integers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic

import onnxtrain
from fusing import Array, f, run

WIDTH = 24


def float_model(convolution: bool = False) -> onnx.ModelProto:
    """Scale, product with constant weights, bias; the scale lies before the product."""
    shape = [2, 3, 6, 6] if convolution else [5, WIDTH]
    weight = f(4, 3, 3, 3) if convolution else f(WIDTH, 10)
    product = helper.make_node("Conv" if convolution else "MatMul", ["s", "w"], ["h"])
    scale, bias = (f(1, 3, 1, 1), f(1, 4, 1, 1)) if convolution else (f(WIDTH), f(10))
    nodes = [
        helper.make_node("Mul", ["x", "scale"], ["s"]),
        product,
        helper.make_node("Add", ["h", "bias"], ["y"]),
    ]
    tensors = {"w": weight, "scale": scale, "bias": bias}
    graph = helper.make_graph(
        nodes, "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(a, n) for n, a in tensors.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def quantized(model: onnx.ModelProto, folder: Path, per_channel: bool) -> onnx.ModelProto:
    onnx.save(model, folder / "float.onnx")
    quantize_dynamic(
        folder / "float.onnx", folder / "int8.onnx", per_channel=per_channel,
        weight_type=QuantType.QInt8, op_types_to_quantize=["MatMul", "Conv"],
    )  # fmt: skip
    return onnx.load(folder / "int8.onnx")


def optimized(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(folder / "fused.onnx")
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load(folder / "fused.onnx")


def weights_of(model: onnx.ModelProto) -> Array:
    """The floats that the integers of a model stand for."""
    tensors = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    q, scale, zero = (
        next(a for n, a in tensors.items() if n.startswith("w") and n.endswith(end))
        for end in ("_quantized", "_scale", "_zero_point")
    )
    if q.ndim > 2 and scale.size > 1:
        scale, zero = (v.reshape(-1, 1, 1, 1) for v in (scale, zero))
    return (q.astype(np.float32) - zero.astype(np.float32)) * scale


@pytest.mark.parametrize("fused", [False, True], ids=["as quantized", "as optimized"])
@pytest.mark.parametrize("per_channel", [False, True], ids=["tensor", "channels"])
@pytest.mark.parametrize("convolution", [False, True], ids=["MatMul", "Conv"])
def test_gradients_pass_dynamic_quantization(
    tmp_path: Path, convolution: bool, per_channel: bool, fused: bool
) -> None:
    plain = float_model(convolution)
    model = quantized(plain, tmp_path, per_channel)
    weights = weights_of(model)
    given = optimized(model, tmp_path) if fused else model
    operators = {n.op_type for n in given.graph.node}
    kept = operators & {"MatMulInteger", "ConvInteger", "DynamicQuantizeMatMul"}
    assert kept
    made = onnxtrain.gradient(given, ["x", "scale", "bias"], of="y")
    assert kept <= {n.op_type for n in made.graph.node}
    tensors = {t.name: numpy_helper.to_array(t) for t in plain.graph.initializer}
    x = torch.tensor(f(2, 3, 6, 6) if convolution else f(5, WIDTH), requires_grad=True)
    scale, bias = (torch.tensor(tensors[n], requires_grad=True) for n in ("scale", "bias"))
    multiply = torch.nn.functional.conv2d if convolution else torch.matmul
    y = multiply(x * scale, torch.tensor(weights)) + bias
    seed = f(*y.shape)
    y.backward(torch.tensor(seed))
    found = run(made, {"x": x.detach().numpy(), "y_grad": seed})
    np.testing.assert_allclose(found[0], y.detach(), atol=0.02 * float(y.detach().abs().max()))
    for gradient, value in zip(found[1:], (x, scale, bias), strict=True):
        np.testing.assert_allclose(gradient, value.grad, rtol=1e-4, atol=1e-4)


def test_clipped_data_has_no_gradient() -> None:
    """Data that was quantized with a given scale, before MatMulInteger."""
    tensors = {"w": np.arange(-6, 6, dtype=np.int8).reshape(3, 4), "s": np.float32(0.1),
               "z": np.uint8(10)}  # fmt: skip
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("MatMulInteger", ["q", "w", "z"], ["i"]),
        helper.make_node("Cast", ["i"], ["c"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["c", "s"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 4])],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in tensors.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    x = np.array([[-2, 0.5, 3], [30, -0.9, 24]], np.float32)  # from -1 to 24.5 are inside
    seed = f(2, 4)
    inside = np.array([[0, 1, 1], [0, 1, 1]])
    _, dx = run(onnxtrain.gradient(model, "x", of="y"), {"x": x, "y_grad": seed})
    np.testing.assert_allclose(dx, inside * (seed @ tensors["w"].T), rtol=1e-5, atol=1e-5)
