"""Gradients flow along integers that mean floats: models in onnxruntime's operator form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_static,
)

import onnxtrain
from fusing import Array, f, run

SCALE, ZERO = np.float32(0.03), np.uint8(120)  # of everything that is quantized on the way


@dataclass(frozen=True)
class Operator:
    """An operator of integers, in ONNX and in torch; `weights` are its constant operand."""

    name: str
    shape: tuple[int, ...]
    torch: Callable[..., torch.Tensor]
    attrs: dict[str, Any] = field(default_factory=dict)
    weights: Array | None = None
    weight_scale: Array | None = None
    domain: str = "com.microsoft"
    operands: int = 1


def small(*shape: int) -> Array:
    return np.random.default_rng(1).integers(-20, 20, shape).astype(np.int8)


F = torch.nn.functional
IMAGE = (2, 3, 6, 6)
OPERATORS = {
    "conv": Operator(
        "QLinearConv", IMAGE, lambda x, w: F.conv2d(x, w, padding=1), {"pads": [1] * 4},
        small(4, 3, 3, 3), np.float32(0.02), domain="",
    ),
    "conv by channel": Operator(
        "QLinearConv", IMAGE, F.conv2d, {}, small(4, 3, 2, 2),
        np.linspace(0.01, 0.03, 4, dtype=np.float32), domain="",
    ),
    "matmul": Operator("QLinearMatMul", (2, 5, 6), torch.matmul, {}, small(6, 4),
                       np.float32(0.02), domain=""),
    "matmul by column": Operator("QLinearMatMul", (5, 6), torch.matmul, {}, small(6, 4),
                                 np.linspace(0.01, 0.03, 4, dtype=np.float32), domain=""),
    "gemm": Operator("QGemm", (5, 6), lambda x, w: x @ w.T, {"transB": 1}, small(4, 6),
                     np.linspace(0.01, 0.03, 4, dtype=np.float32)),
    "add": Operator("QLinearAdd", (3, 4), torch.add, operands=2),
    "mul": Operator("QLinearMul", (3, 4), torch.mul, operands=2),
    "concat": Operator("QLinearConcat", (3, 4), lambda a, b: torch.cat([a, b], 1), {"axis": 1},
                       operands=2),
    "sigmoid": Operator("QLinearSigmoid", (3, 4), torch.sigmoid),
    "leaky relu": Operator("QLinearLeakyRelu", (3, 4), lambda x: F.leaky_relu(x, 0.1),
                           {"alpha": 0.1}),
    "global average": Operator("QLinearGlobalAveragePool", IMAGE,
                               lambda x: x.mean((2, 3), keepdim=True)),
    "average": Operator("QLinearAveragePool", IMAGE, lambda x: F.avg_pool2d(x, 2),
                        {"kernel_shape": [2, 2], "strides": [2, 2]}),
    "softmax": Operator("QLinearSoftmax", (3, 4), lambda x: x.softmax(-1),
                        {"axis": -1, "opset": 13}),
    "max pool": Operator("MaxPool", IMAGE, lambda x: F.max_pool2d(x, 2),
                         {"kernel_shape": [2, 2], "strides": [2, 2]}, domain=""),
    "reshape": Operator("Flatten", IMAGE, lambda x: x.flatten(1), domain=""),
    "transpose": Operator("Transpose", IMAGE, lambda x: x.permute(0, 2, 3, 1),
                          {"perm": [0, 2, 3, 1]}, domain=""),
}  # fmt: skip


def network(case: Operator) -> onnx.ModelProto:
    """Quantize the inputs, apply the operator, and turn its integers back to floats."""
    names = [f"x{i}" for i in range(case.operands)]
    nodes = [helper.make_node("QuantizeLinear", [n, "s", "z"], [f"{n}.q"]) for n in names]
    inputs = [name for n in names for name in (f"{n}.q", "s", "z")]
    tensors: dict[str, Any] = {"s": SCALE, "z": ZERO}
    if case.weights is not None:
        tensors |= {"w": case.weights, "w.s": case.weight_scale,
                    "w.z": np.zeros(np.shape(case.weight_scale), np.int8)}  # fmt: skip
        inputs += ["w", "w.s", "w.z"]
    if case.name == "QLinearConcat":
        inputs = ["s", "z", *inputs]
    elif case.name == "QGemm":
        inputs += ["", "s", "z"]
    elif case.name.startswith("QLinear"):
        inputs += ["s", "z"]
    else:
        inputs = inputs[:1]
    nodes += [
        helper.make_node(case.name, inputs, ["y.q"], domain=case.domain, **case.attrs),
        helper.make_node("DequantizeLinear", ["y.q", "s", "z"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "graph",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, case.shape) for n in names],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in tensors.items()],
    )  # fmt: skip
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9)


@pytest.mark.parametrize("case", OPERATORS.values(), ids=OPERATORS)
def test_gradient_along_integers(case: Operator) -> None:
    names = [f"x{i}" for i in range(case.operands)]
    model = onnxtrain.gradient(network(case), names, of="y")
    assert case.name in [n.op_type for n in model.graph.node]
    given = [(np.round(f(*case.shape) * 20) * SCALE).clip(-3, 3) for _ in names]
    floats = [torch.tensor(a, requires_grad=True) for a in given]
    weights = [] if case.weights is None else [_expanded(case)]
    y = case.torch(*floats, *weights)
    seed = f(*y.shape)
    y.backward(torch.tensor(seed))
    feeds = {**dict(zip(names, given, strict=True)), "y_grad": seed}
    result, *gradients = run(model, feeds)
    inside = (y.detach().numpy() > -3.5) & (y.detach().numpy() < 3.9)
    assert inside.all(), "nothing is clipped"
    np.testing.assert_allclose(result, y.detach(), atol=float(SCALE))
    for gradient, x in zip(gradients, floats, strict=True):
        np.testing.assert_allclose(gradient, x.grad, rtol=1e-4, atol=1e-4)


def _expanded(case: Operator) -> torch.Tensor:
    assert case.weights is not None and case.weight_scale is not None
    scale = case.weight_scale
    if scale.ndim and case.name != "QLinearMatMul":
        scale = scale.reshape(-1, *[1] * (case.weights.ndim - 1))
    return torch.tensor(case.weights.astype(np.float32) * scale)


def test_what_is_clipped_has_no_gradient() -> None:
    model = onnxtrain.gradient(network(OPERATORS["add"]), ["x0", "x1"], of="y")
    x0 = np.zeros((3, 4), np.float32)
    x1 = np.zeros((3, 4), np.float32)
    x0[0], x1[0] = 3, 3  # the sum is clipped
    x0[1] = 9  # and this before it
    seed = np.ones((3, 4), np.float32)
    _, d0, d1 = run(model, {"x0": x0, "x1": x1, "y_grad": seed})
    np.testing.assert_array_equal(d0, [[0] * 4, [0] * 4, [1] * 4])
    np.testing.assert_array_equal(d1, [[0] * 4, [0] * 4, [1] * 4])


# ---- whole networks ------------------------------------------------------------------------------


def residual_network() -> onnx.ModelProto:
    """A network with a residual connection; the scale before it is what trains."""
    nodes = [
        helper.make_node("Mul", ["x", "scale"], ["m"]),
        helper.make_node("Conv", ["m", "w1", "b1"], ["c1"], pads=[1] * 4),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2", "b2"], ["c2"], pads=[1] * 4),
        helper.make_node("Add", ["c2", "r1"], ["a"]),
        helper.make_node("MaxPool", ["a"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("GlobalAveragePool", ["p"], ["g"]),
        helper.make_node("Flatten", ["g"], ["t"]),
        helper.make_node("MatMul", ["t", "w3"], ["y"]),
    ]
    rng = np.random.default_rng(5)
    shapes = {"w1": (8, 3, 3, 3), "b1": (8,), "w2": (8, 8, 3, 3), "b2": (8,), "w3": (8, 4)}
    tensors = {n: (rng.standard_normal(s) * 0.2).astype(np.float32) for n, s in shapes.items()}
    tensors["scale"] = np.ones((1, 3, 1, 1), np.float32)
    graph = helper.make_graph(
        nodes, "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
        [numpy_helper.from_array(a, n) for n, a in tensors.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


class Reader(CalibrationDataReader):
    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self._batches: Iterator[dict[str, Array]] = iter(
            [{"x": rng.standard_normal((4, 3, 8, 8)).astype(np.float32)} for _ in range(4)]
        )

    def get_next(self) -> dict[str, Array] | None:  # type: ignore[override]
        return next(self._batches, None)


def test_a_network_in_operator_form_has_the_gradient_of_the_other_form(tmp_path: Path) -> None:
    onnx.save(residual_network(), tmp_path / "float.onnx")
    found = {}
    x, seed = Reader().get_next()["x"], f(4, 4)
    for form in (QuantFormat.QOperator, QuantFormat.QDQ):
        quantize_static(
            tmp_path / "float.onnx", tmp_path / "int8.onnx", Reader(), quant_format=form,
            activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
            op_types_to_quantize=["Conv", "Add", "MaxPool", "GlobalAveragePool", "MatMul"],
        )  # fmt: skip
        model = onnx.load(tmp_path / "int8.onnx")
        made = onnxtrain.gradient(model, ["x", "scale"], of="y")
        found[form] = run(made, {"x": x, "y_grad": seed})
        if form is QuantFormat.QOperator:
            kept = {n.op_type for n in made.graph.node}
            assert {"QLinearConv", "QLinearAdd", "QLinearMatMul"} <= kept
            made = onnxtrain.prepare(model, tmp_path / "artifacts", loss="mse", train=["scale"])
            session = onnxtrain.TrainingSession(tmp_path / "artifacts")
            losses = [float(session.step(x, np.ones((4, 4), np.float32))[0]) for _ in range(9)]
            assert losses[-1] < losses[0]
    for one, other in zip(*found.values(), strict=True):
        cosine = (one * other).sum() / np.linalg.norm(one) / np.linalg.norm(other)
        assert cosine > 0.98
