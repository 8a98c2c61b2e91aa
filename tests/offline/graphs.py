"""Small models, written by hand for the tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Shape = Sequence[int | str] | None


def value(name: str, shape: Shape, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    initializers: dict[str, Any] | None = None,
    opset: int = 18,
    domains: Sequence[str] = (),
    **options: Any,
) -> onnx.ModelProto:
    tensors = [numpy_helper.from_array(np.asarray(a), n) for n, a in (initializers or {}).items()]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, tensors)
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8, **options)


def linear(opset: int = 18) -> onnx.ModelProto:
    """y = relu(x w + b), loss = mean(y); x is (batch, 3), w (3, 2)."""
    rng = np.random.default_rng(0)
    return model(
        [
            helper.make_node("MatMul", ["x", "w"], ["xw"], "product"),
            helper.make_node("Add", ["xw", "b"], ["h"], "bias"),
            helper.make_node("Relu", ["h"], ["y"], "relu"),
            helper.make_node("ReduceMean", ["y"], ["loss"], "mean", keepdims=0),
        ],
        [value("x", ["batch", 3])],
        [value("loss", []), value("y", ["batch", 2])],
        {
            "w": rng.standard_normal((3, 2)).astype(np.float32),
            "b": rng.standard_normal(2).astype(np.float32),
        },
        opset=opset,
    )
