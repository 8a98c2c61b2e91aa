"""What depends on parameters alone, computed once before a model is exported.

Evaluation graphs of models that train for integers quantize their weights in each run; the exported
model has the integers instead, and no floats. onnxruntime computes them, so that they are those of
evaluation to the bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import onnxruntime as ort

from onnxtrain.device.export.layout import MAX_FILE_SIZE, StoredTensor
from onnxtrain.device.export.model_parts import ModelParts, find_needed
from onnxtrain.device.export.prune import Cut, Values, quiet_options
from onnxtrain.errors import OnnxTrainError
from onnxtrain.format.element_types import data_size
from onnxtrain.format.model.file import ModelFile


def fold(model: ModelFile, parts: ModelParts, outputs: Sequence[str], values: Values) -> None:
    """Compute the values that the metadata of an evaluation graph list, if the outputs need them.

    They take the place of the nodes that make them.
    """
    needed = find_needed(parts, outputs).values
    names = [n for n in model.metadata.folded if n in needed and n not in outputs]
    if not names:
        return
    layout = Cut(model, parts, names, values).layout()
    if layout.tensor_size() > MAX_FILE_SIZE:
        raise OnnxTrainError(
            f"the parameters have {layout.tensor_size():,} bytes: models of more than "
            f"{MAX_FILE_SIZE:,} cannot be exported as integers"
        )
    options = quiet_options(ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
    try:
        session = ort.InferenceSession(
            layout.file().join(), options, providers=["CPUExecutionProvider"]
        )
        found = session.run_with_ort_values(names, {})
    except Exception as error:  # onnxruntime has many kinds of errors and no common one
        raise OnnxTrainError(f"onnxruntime could not quantize the parameters: {error}") from None
    for name, value in zip(names, found, strict=True):
        parts.computed[name] = _stored(name, value)
    made = parts.computed.keys()
    parts.nodes = [node for node in parts.nodes if not made & set(node.outputs)]


def _stored(name: str, value: ort.OrtValue) -> StoredTensor:
    """Copy the elements of a tensor of any type, also of those that numpy has not."""
    code, dims = value.element_type(), tuple(value.shape())
    size = data_size(code, dims)
    data = ctypes.string_at(value.data_ptr(), size) if size else b""
    return StoredTensor(name, code, dims, memoryview(data))
