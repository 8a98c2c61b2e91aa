"""Models of losses, and what they compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

import onnxtrain
from graphs import model, value
from onnxtrain import onnxblock

Feeds = dict[str, np.ndarray]


def build(
    block: onnxblock.Block,
    shape: Any,
    kind: int = TensorProto.FLOAT,
    opset: int = 18,
    **options: Any,
) -> onnx.ModelProto:
    """Return the model of a loss of the output y of y = x."""
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    base = model(nodes, [value("x", shape, kind)], [value("y", shape, kind)], opset=opset)
    whole = Whole(block)
    with onnxblock.base(base):
        whole("y", **options)
    return whole.to_model_proto()


class Whole(onnxblock.ForwardBlock):
    """The loss as the only output of the model."""

    def __init__(self, block: onnxblock.Block) -> None:
        self.block = block

    def build(self, *names: str, **options: Any) -> str:
        return self.block(*names, **options)


def evaluate(built: onnx.ModelProto, feeds: Feeds) -> tuple[np.ndarray, np.ndarray]:
    """Return the loss and the gradient of its sum by x."""
    with_gradient = onnxtrain.gradient(built, wrt="x")
    onnx.checker.check_model(with_gradient, full_check=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        with_gradient.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    seeds = [i.name for i in session.get_inputs() if i.name.endswith("_grad")]
    if seeds:
        plain = onnxruntime.InferenceSession(
            built.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        feeds = feeds | {seeds[0]: np.ones_like(plain.run(None, feeds)[0])}
    return tuple(session.run(None, feeds))
