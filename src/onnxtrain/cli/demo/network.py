"""A small convolutional network, built with onnx."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_LAYERS = {
    "conv1": (16, 1, 3, 3),
    "conv2": (32, 16, 3, 3),
    "fc1": (64, 512),
    "fc2": (10, 64),
}


def network(seed: int = 0) -> onnx.ModelProto:
    """Return a network of two convolutions and two linear layers, with ten scores."""
    nodes = [
        _node("Conv", "conv1", ["image", "conv1.weight", "conv1.bias"], pads=[1, 1, 1, 1]),
        _node("Relu", "relu1", ["conv1"]),
        _node("Conv", "conv2", ["relu1", "conv2.weight", "conv2.bias"], pads=[1, 1, 1, 1]),
        _node("Relu", "relu2", ["conv2"]),
        _node("MaxPool", "pool", ["relu2"], kernel_shape=[2, 2], strides=[2, 2]),
        _node("Flatten", "flat", ["pool"]),
        _node("Gemm", "fc1", ["flat", "fc1.weight", "fc1.bias"], transB=1),
        _node("Relu", "relu3", ["fc1"]),
        _node("Gemm", "scores", ["relu3", "fc2.weight", "fc2.bias"], transB=1),
    ]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, 8, 8])
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 10])
    graph = helper.make_graph(nodes, "digits", [image], [scores], _weights(seed))
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9, producer_name="onnxtrain"
    )
    onnx.checker.check_model(model, full_check=True)
    return model


def _node(op: str, output: str, inputs: list[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, [output], name=f"{output}_{op}", **attributes)


def _weights(seed: int) -> list[onnx.TensorProto]:
    """Initialize the weights as torch does: uniform in ±1/sqrt(fan_in)."""
    rng = np.random.default_rng(seed)
    tensors = []
    for name, shape in _LAYERS.items():
        bound = 1 / math.sqrt(math.prod(shape[1:]))
        for part, dims in (("weight", shape), ("bias", shape[:1])):
            values = rng.uniform(-bound, bound, dims).astype(np.float32)
            tensors.append(numpy_helper.from_array(values, f"{name}.{part}"))
    return tensors
