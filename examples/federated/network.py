"""The network of the federated examples: two convolutions, three layers, for images of 28×28."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from onnxtrain import optim


def network(seed: int = 0) -> onnx.ModelProto:
    """Return the network with fresh weights; its parameters are called as torch would."""
    rng = np.random.default_rng(seed)
    shapes = {
        "conv1": (6, 1, 5, 5),
        "conv2": (16, 6, 5, 5),
        "fc1": (120, 256),
        "fc2": (84, 120),
        "fc3": (10, 84),
    }
    weights = []
    for name, shape in shapes.items():
        bound = 1 / np.sqrt(np.prod(shape[1:]))
        for part, size in ((f"{name}.weight", shape), (f"{name}.bias", shape[:1])):
            values = rng.uniform(-bound, bound, size).astype(np.float32)
            weights.append(numpy_helper.from_array(values, part))

    def layer(name: str, x: str, y: str, **attributes: object) -> onnx.NodeProto:
        kind = "Conv" if name.startswith("conv") else "Gemm"
        return helper.make_node(kind, [x, f"{name}.weight", f"{name}.bias"], [y], **attributes)

    node, pool = helper.make_node, {"kernel_shape": [2, 2], "strides": [2, 2]}
    nodes = [
        layer("conv1", "image", "c1"), node("Relu", ["c1"], ["r1"]),
        node("MaxPool", ["r1"], ["p1"], **pool),
        layer("conv2", "p1", "c2"), node("Relu", ["c2"], ["r2"]),
        node("MaxPool", ["r2"], ["p2"], **pool), node("Flatten", ["p2"], ["f"]),
        layer("fc1", "f", "h1", transB=1), node("Relu", ["h1"], ["a1"]),
        layer("fc2", "a1", "h2", transB=1), node("Relu", ["h2"], ["a2"]),
        layer("fc3", "a2", "scores", transB=1),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 1, 28, 28])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", 10])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def write_artifacts(
    folder: Path, *, seed: int = 0, proximal: bool = False, weight_decay: float = 0.0
) -> None:
    """Write the artifacts that server and clients train from, with SGD and momentum."""
    onnxtrain.prepare(
        network(seed),
        folder,
        loss="cross_entropy",
        optimizer=optim.SGD(momentum=0.9, weight_decay=weight_decay),
        nominal_checkpoint=True,
        proximal=proximal,
    )
