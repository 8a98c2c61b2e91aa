"""What onnxruntime makes of a graph when it loads it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx
import onnxruntime as ort


def load_optimized(path: Path, seen: Path) -> tuple[onnx.ModelProto, list[onnx.NodeProto]]:
    """Load a graph with the optimizations that are on by default; return what they left."""
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(seen)
    options.log_severity_level = 3
    ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    model = onnx.load(seen, load_external_data=False)
    return model, list(model.graph.node)


def inputs_behind(node: onnx.NodeProto, makers: Mapping[str, onnx.NodeProto]) -> set[str]:
    """Return the names of all values that a node depends on."""
    found: set[str] = set()
    waiting = [*node.input]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += makers[name].input if name in makers else []
    return found
