"""Write the artifact folders that tests of the device half train from.

They are kept in the repository because those tests run where neither onnx nor torch is installed.
Run this after a deliberate change of the graphs: `python tests/golden/make_artifacts.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from onnxtrain import artifacts, onnxblock

HERE = Path(__file__).parent


def _weights(**shapes: tuple[int, ...]) -> list[TensorProto]:
    rng = np.random.default_rng(0)
    return [
        numpy_helper.from_array((0.3 * rng.standard_normal(shape)).astype(np.float32), name)
        for name, shape in shapes.items()
    ]


def _model(nodes: list, initializers: list, shape: list) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "golden",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, [shape[0], 3])],
        initializers,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def mlp() -> onnx.ModelProto:
    """Two layers: float[N, 8] to three classes."""
    node = helper.make_node
    return _model(
        [
            node("Gemm", ["input", "fc1.weight", "fc1.bias"], ["hidden"], transB=1),
            node("Relu", ["hidden"], ["active"]),
            node("Gemm", ["active", "fc2.weight", "fc2.bias"], ["output"], transB=1),
        ],
        _weights(**{"fc1.weight": (16, 8), "fc1.bias": (16,)}, **{"fc2.weight": (3, 16)},
                 **{"fc2.bias": (3,)}),
        ["N", 8],
    )  # fmt: skip


def cnn() -> onnx.ModelProto:
    """A convolution, BatchNormalization of the batch, Dropout: float[N, 1, 6, 6] to three."""
    node = helper.make_node
    ones, zeros = np.ones(4, np.float32), np.zeros(4, np.float32)
    normal = {"bn.weight": ones, "bn.bias": zeros, "bn.mean": zeros, "bn.var": ones}
    return _model(
        [
            node("Conv", ["input", "conv.weight", "conv.bias"], ["c"], pads=[1, 1, 1, 1]),
            node("BatchNormalization", ["c", *normal], ["b", "m", "v"], training_mode=1),
            node("Relu", ["b"], ["r"]),
            node("GlobalAveragePool", ["r"], ["g"]),
            node("Flatten", ["g"], ["f"]),
            node("Dropout", ["f", "ratio", "training"], ["d"]),
            node("Gemm", ["d", "fc.weight", "fc.bias"], ["output"], transB=1),
        ],
        [
            *_weights(**{"conv.weight": (4, 1, 3, 3), "conv.bias": (4,)},
                      **{"fc.weight": (3, 4), "fc.bias": (3,)}),
            *(numpy_helper.from_array(v, k) for k, v in normal.items()),
            numpy_helper.from_array(np.float32(0.25), "ratio"),
            numpy_helper.from_array(np.array(True), "training"),
        ],
        ["N", 1, 6, 6],
    )  # fmt: skip


def residual() -> onnx.ModelProto:
    """Two convolutions, BatchNormalization at rest, a sum: float[N, 1, 6, 6] to three classes."""
    node = helper.make_node
    rng = np.random.default_rng(1)
    ones = np.ones(8, np.float32)
    normal = {"bn.weight": ones, "bn.bias": 0 * ones, "bn.mean": 0 * ones, "bn.var": ones}
    normal = {name: (array + 0.1 * rng.random(8)).astype("f4") for name, array in normal.items()}
    return _model(
        [
            node("Conv", ["input", "conv1.weight"], ["c1"], pads=[1, 1, 1, 1]),
            node("BatchNormalization", ["c1", *normal], ["b"]),
            node("Relu", ["b"], ["r"]),
            node("Conv", ["r", "conv2.weight", "conv2.bias"], ["c2"], pads=[1, 1, 1, 1]),
            node("Add", ["c2", "r"], ["s"]),
            node("GlobalAveragePool", ["s"], ["g"]),
            node("Flatten", ["g"], ["f"]),
            node("Gemm", ["f", "fc.weight", "fc.bias"], ["output"], transB=1),
        ],
        [
            *_weights(**{"conv1.weight": (8, 1, 3, 3), "conv2.weight": (8, 8, 3, 3)},
                      **{"conv2.bias": (8,), "fc.weight": (3, 8), "fc.bias": (3,)}),
            *(numpy_helper.from_array(v, k) for k, v in normal.items()),
        ],
        ["N", 1, 6, 6],
    )  # fmt: skip


def write(folder: Path) -> None:
    """Write all of them."""
    common = {
        "loss": artifacts.LossType.CrossEntropyLoss,
        "additional_output_names": ["output"],
    }
    adamw, sgd = artifacts.OptimType.AdamW, onnxblock.optim.SGD(momentum=0.9)
    artifacts.generate_artifacts(
        mlp(), optimizer=adamw, artifact_directory=folder / "mlp", nominal_checkpoint=True, **common
    )
    artifacts.generate_artifacts(
        mlp(), requires_grad=["fc2.*"], frozen_params=["fc1.*"], optimizer=sgd,
        artifact_directory=folder / "head", nominal_checkpoint=True, **common,
    )  # fmt: skip
    artifacts.generate_artifacts(
        cnn(), optimizer=adamw, artifact_directory=folder / "cnn", **common
    )
    few = np.random.default_rng(0).normal(size=(32, 1, 6, 6)).astype(np.float32)
    onnxtrain.prepare(
        residual(), folder / "int8", quantize="int8:momentum=0.1", calibration=[few],
        nominal_checkpoint=True,
    )  # fmt: skip


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
