"""What onnxruntime makes of a model: operators of integers, and products that stayed floats.

Kernels of integers are chosen when a model is loaded, from QuantizeLinear and DequantizeLinear
around operators of floats. So the optimised model is what tells.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import onnx

from onnxtrain.offline.compare.models import OpenModel, open_session, options
from onnxtrain.offline.compare.report import Operators
from onnxtrain.offline.graph.op_facts import CONTROL, CONVERSIONS, COSTLY

# Beginnings of names; those of onnxruntime's own domain are many.
_ON_INTEGERS = ("QLinear", "QGemm", "QAttention", "QMoE", "DynamicQuantize", "MatMulNBits")


def operators_of(model: OpenModel) -> Operators:
    """Return what onnxruntime runs for a model."""
    integers: dict[str, int] = {}
    floats: dict[str, list[str]] = {}
    conversions = total = 0
    for node in _nodes(_optimised(model).graph):
        total += 1
        if node.op_type in CONVERSIONS:
            conversions += 1
        elif _is_on_integers(node.op_type):
            integers[node.op_type] = integers.get(node.op_type, 0) + 1
        elif _is_product(node.op_type):
            floats.setdefault(node.op_type, []).append(node.name or node.output[0])
    by_name = sorted(integers.items(), key=lambda item: (-item[1], item[0]))
    return Operators(dict(by_name), floats, conversions, total)


def _is_on_integers(op: str) -> bool:
    return op.startswith(_ON_INTEGERS) or "Integer" in op or op == "GatherBlockQuantized"


def _is_product(op: str) -> bool:
    """Tell an operator that multiplies matrices, alone or with what onnxruntime fused to it."""
    return op.removeprefix("Fused") in COSTLY - CONTROL or op.endswith("Attention")


def _optimised(model: OpenModel) -> onnx.ModelProto:
    """Return the model as onnxruntime runs it, without its tensors."""
    with tempfile.TemporaryDirectory(prefix="onnxtrain-compare-") as folder:
        file = Path(folder) / "optimised.onnx"
        settings = options()
        settings.optimized_model_filepath = str(file)
        # In a file beside it: a model of more than 2 GB could not be written otherwise.
        name = "session.optimized_model_external_initializers_file_name"
        settings.add_session_config_entry(name, "tensors.data")
        open_session(model.proto if model.path is None else model.path, model.name, settings)
        return onnx.load(file, load_external_data=False)


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield all nodes, with those of subgraphs."""
    waiting = [graph]
    while waiting:
        for node in waiting.pop().node:
            yield node
            for attribute in node.attribute:
                waiting.extend(attribute.graphs)
                if attribute.HasField("g"):
                    waiting.append(attribute.g)
