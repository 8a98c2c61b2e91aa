"""Models prepared for integers, trained a little, exported, and seen as onnxruntime runs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

import onnxtrain

Array = np.ndarray[Any, Any]
VIEWS = ("Flatten", "Reshape", "Squeeze", "Unsqueeze")  # cost nothing
MOVES = (
    "Concat", "Gather", "MaxPool", "NhwcMaxPool", "Pad", "Resize", "Slice", "Split", "Transpose",
)  # fmt: skip


def outputs_of(model: onnx.ModelProto | Path, feeds: Mapping[str, Array]) -> list[Array]:
    given = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    session = ort.InferenceSession(given, quiet(), providers=["CPUExecutionProvider"])
    return session.run(None, dict(feeds))


def quiet(optimise: bool = True) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    # On x86, onnxruntime computes with signed activations only if it is asked to.
    options.add_session_config_entry("session.qdqisint8allowed", "1")
    # By default, floats are rounded to 8 bits before they are multiplied by 4-bit weights.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    if not optimise:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return options


def deploy(
    model: onnx.ModelProto,
    folder: Path,
    feeds: Mapping[str, Array],
    quantize: Any = "int8",
    steps: int = 2,
    calibrated: bool = True,
    **options: Any,
) -> Path:
    """Prepare, train for some steps, and export; return the path of the exported model."""
    expected = outputs_of(model, feeds)
    names = [output.name for output in model.graph.output]
    calibration = [dict(feeds)] if calibrated else None
    folder.mkdir(parents=True, exist_ok=True)
    artifacts = onnxtrain.prepare(
        model, folder / "artifacts", loss="mse", of=names[0], quantize=quantize,
        optimizer="sgd", calibration=calibration, **options,
    )  # fmt: skip
    (folder / "notes.txt").write_text("\n".join(artifacts.notes))
    session = onnxtrain.TrainingSession.from_folder(folder / "artifacts")
    session.set_learning_rate(1e-3)
    target = expected[0] + np.random.default_rng(1).normal(size=expected[0].shape) * 0.1
    for _ in range(steps):
        session.step(*feeds.values(), target.astype(np.float32))
    path = folder / "integers.onnx"
    session.export_model_for_inferencing(path, names)
    return path


def optimised(path: Path) -> onnx.ModelProto:
    """Return the graph that onnxruntime makes of a model."""
    options, target = quiet(), path.with_suffix(".optimised.onnx")
    options.optimized_model_filepath = str(target)
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return onnx.load(target)


def kernels(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in optimised(path).graph.node)


def float_operators(path: Path) -> Counter[str]:
    """Return the operators of the optimised graph that compute with floats."""
    graph = optimised(path).graph
    floats = {v.name for v in graph.input if v.type.tensor_type.elem_type == onnx.TensorProto.FLOAT}
    left = []
    for node in graph.node:
        if node.op_type == "Shape":
            continue
        if makes_floats(node) or (node.op_type in (*VIEWS, *MOVES) and node.input[0] in floats):
            floats.update(node.output)
        elif node.op_type in (*VIEWS, *MOVES) or node.op_type.startswith("Q"):
            continue
        else:
            floats.update(node.output)
            left.append(node.op_type)
            continue
        if node.op_type in MOVES:
            left.append(node.op_type)
    return Counter(left)


def makes_floats(node: onnx.NodeProto) -> bool:
    """Whether a kernel of integers returns floats."""
    if node.op_type == "QGemm":
        return len(node.input) < 8
    return node.op_type in ("DequantizeLinear", "MatMulIntegerToFloat", "MatMulNBits")


def with_integers_returned(path: Path) -> tuple[onnx.ModelProto, list[str]]:
    """Let an exported model return the integers of each activation too."""
    model = onnx.load(path)
    constants = {t.name for t in model.graph.initializer}
    found = [
        node.output[0]
        for node in model.graph.node
        if node.op_type == "QuantizeLinear" and node.input[0] not in constants
    ]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in found)
    return model, found


def compare_with_trained(path: Path, feeds: Mapping[str, Array]) -> dict[str, float]:
    """Return, for each activation, the part of its elements that is more than a step off.

    The graph as it was trained is the exported one without any optimisation: floats throughout.
    """
    model, names = with_integers_returned(path)
    proto = model.SerializeToString()
    runs = [
        ort.InferenceSession(proto, quiet(on), providers=["CPUExecutionProvider"]).run(
            None, dict(feeds)
        )
        for on in (False, True)
    ]
    outputs = len(model.graph.output) - len(names)
    away = {}
    for name, a, b in zip(names, runs[0][outputs:], runs[1][outputs:], strict=True):
        away[name] = float((np.abs(a.astype(np.int32) - b.astype(np.int32)) > 1).mean())
    for output, a, b in zip(model.graph.output, runs[0][:outputs], runs[1][:outputs], strict=False):
        step = max(float(np.ptp(a)), 1e-6) / 255
        away[output.name] = float((np.abs(a - b) > step * 1.01).mean())
    return away
