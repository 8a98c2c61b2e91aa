"""RMS normalization that is written as seven nodes has one gradient, and one kernel each way."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from native.harness import assert_near, gradient_with_functions, kinds_of, run_both

torch = pytest.importorskip("torch", reason="torch is the oracle")

BOTH = {"RMSNorm", "RMSNormGrad"}
FORMS = [(s, i, first) for s in ("Mul", "Pow") for i in ("Reciprocal", "Div") for first in (0, 1)]


def model_of(
    square: str = "Mul", inverse: str = "Reciprocal", scale_first: int = 0, axis: int = -1
) -> onnx.ModelProto:
    factors = ["normalized", "scale"]
    nodes = [
        helper.make_node(square, ["x", "x" if square == "Mul" else "two"], ["squares"]),
        helper.make_node("ReduceMean", ["squares", "axes"], ["mean"]),
        helper.make_node("Add", ["mean", "epsilon"], ["total"]),
        helper.make_node("Sqrt", ["total"], ["root"]),
        helper.make_node(inverse, ["root"] if inverse == "Reciprocal" else ["one", "root"], ["r"]),
        helper.make_node("Mul", ["x", "r"], ["normalized"]),
        helper.make_node("Mul", factors[::-1] if scale_first else factors, ["y"]),
    ]
    numbers = {"two": np.float32(2), "one": np.float32(1), "epsilon": np.float32(1e-3)}
    constants = [onnx.numpy_helper.from_array(np.asarray(v), k) for k, v in numbers.items()]
    constants.append(onnx.numpy_helper.from_array(np.array([axis]), "axes"))
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 5, 33]),
        helper.make_tensor_value_info("scale", TensorProto.FLOAT, [33]),
    ]
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 5, 33])
    graph = helper.make_graph(nodes, "graph", inputs, [y], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def feeds() -> dict[str, Any]:
    random = np.random.default_rng(3)
    shapes = {"x": (2, 5, 33), "scale": (33,), "y_grad": (2, 5, 33)}
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_like_the_nodes_and_like_torch(form: tuple[str, str, int]) -> None:
    made, given = gradient_with_functions(model_of(*form), ["x", "scale"]), feeds()
    assert kinds_of(made) == BOTH
    plain, native = run_both(made, given)
    assert_near(plain, native, 64)
    x, scale = (
        torch.tensor(given[name], dtype=torch.float64, requires_grad=True)
        for name in ("x", "scale")
    )
    y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-3) * scale
    y.backward(torch.tensor(given["y_grad"], dtype=torch.float64))
    assert x.grad is not None
    assert scale.grad is not None
    names = [output.name for output in made.graph.output]
    for name, expected in (("x_grad", x.grad), ("scale_grad", scale.grad)):
        found = native[names.index(name)]
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-5)


def test_what_is_read_elsewhere_keeps_its_own_gradient() -> None:
    model = model_of()
    model.graph.output.append(helper.make_tensor_value_info("r", TensorProto.FLOAT, None))
    assert not BOTH & kinds_of(gradient_with_functions(model, ["x", "scale"], of="y"))


def test_another_axis_is_no_row() -> None:
    model = model_of(axis=1)
    assert not BOTH & kinds_of(gradient_with_functions(model, ["x", "scale"]))
