"""A model with two heads, and ways to build blocks on it and run the result."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper

from graphs import model, value
from onnxtrain import onnxblock

rng = np.random.default_rng(0)
W = rng.standard_normal((3, 2)).astype(np.float32)
B = rng.standard_normal(2).astype(np.float32)
X = rng.standard_normal((4, 3)).astype(np.float32)
Y = X @ W + B
Z = np.tanh(Y)


def two_heads(opset: int = 18) -> onnx.ModelProto:
    """y = x w + b and z = tanh(y); both are outputs."""
    return model(
        [
            helper.make_node("Gemm", ["x", "w", "b"], ["y"], "fc"),
            helper.make_node("Tanh", ["y"], ["z"], "act"),
        ],
        [value("x", ["batch", 3])],
        [value("y", ["batch", 2]), value("z", ["batch", 2])],
        {"w": W, "b": B},
        opset=opset,
    )


def run(built: onnx.ModelProto, feeds: dict[str, Any]) -> dict[str, np.ndarray]:
    onnx.checker.check_model(built, full_check=True)
    session = onnxruntime.InferenceSession(
        built.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


def run_training(built: onnx.ModelProto, feeds: dict[str, Any]) -> dict[str, np.ndarray]:
    """Run one step of a training model, with the weights that its blocks started from."""
    filled = {"w": W, "b": B, "lazy_reset_grad": np.array([True])} | feeds
    for info in built.graph.input:
        if info.name.endswith(".buffer"):
            shape = [d.dim_value for d in info.type.tensor_type.shape.dim]
            filled[info.name] = np.full(shape, 7, np.float32)
    inputs = {info.name for info in built.graph.input}
    return run(built, {name: a for name, a in filled.items() if name in inputs})


def input_names(built: onnx.ModelProto) -> list[str]:
    return [info.name for info in built.graph.input]


def output_names(built: onnx.ModelProto) -> list[str]:
    return [info.name for info in built.graph.output]


class Forward(onnxblock.ForwardBlock):
    """The given block as a whole model."""

    def __init__(self, block: Any) -> None:
        self.block = block

    def build(self, *names: str) -> Any:
        return self.block(*names)


def result_of(block: Any, *names: str, feeds: dict[str, Any], base: Any = None) -> np.ndarray:
    forward = Forward(block)
    with onnxblock.base(base or two_heads()):
        name = forward(*names)
    return run(forward.to_model_proto(), feeds)[name]


class Training(onnxblock.TrainingBlock):
    def __init__(self, loss: onnxblock.Block) -> None:
        super().__init__()
        self.loss = loss

    def build(self, *names: str) -> Any:
        return self.loss(*names)
