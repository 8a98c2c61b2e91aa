"""What depends on parameters alone, computed once before a model is exported.

Evaluation graphs of models that train for integers quantize their weights in each run; the exported
model has the integers instead, and no floats. onnxruntime computes them, so that they are those of
evaluation to the bit.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence

import onnxruntime as ort

from onnxtrain.device.export.layout import MAX_FILE_SIZE, ModelLayout, StoredTensor
from onnxtrain.device.export.model_parts import ModelParts, find_needed
from onnxtrain.device.export.prune import Cut, Values, quiet_options
from onnxtrain.errors import ModelError, OnnxTrainError
from onnxtrain.format.element_types import ELEMENT_TYPES, data_size
from onnxtrain.format.model.file import ModelFile
from onnxtrain.format.model.wire import text_field

# onnxruntime holds what it computes from twice, so large models are not computed all at once.
_PART = 1 << 26


def fold(model: ModelFile, parts: ModelParts, outputs: Sequence[str], values: Values) -> None:
    """Compute the values that the metadata of an evaluation graph list, if the outputs need them.

    They take the place of the nodes that make them.
    """
    names = _listed(model, parts, outputs)
    if not names:
        return
    _require_parameters_alone(model, parts, names, values)

    def layout(some: Sequence[str]) -> ModelLayout:
        return Cut(model, parts, some, values).layout({n: text_field(1, n) for n in some})

    # All layouts are of the graph as it was: what is computed is put into it afterwards.
    computed = [tensor for some in _in_parts(names, layout) for tensor in _compute(some, layout)]
    parts.computed |= {tensor.name: tensor for tensor in computed}
    made = set(names)
    parts.nodes = [node for node in parts.nodes if not made.intersection(node.outputs)]


def _listed(model: ModelFile, parts: ModelParts, outputs: Sequence[str]) -> list[str]:
    """Return what the nodes make that make any of the listed values, in the order of the graph."""
    listed = set(model.metadata.folded)
    lost = sorted(listed - parts.value_names())
    if lost:
        raise ModelError(
            f"{model.source_name} lists {lost[0]!r} among what to compute before export "
            "('folded' in its metadata), and has no such value: prepare the model anew"
        )
    nodes = find_needed(parts, outputs).nodes if listed else []
    return [n for node in nodes if listed.intersection(node.outputs) for n in node.outputs]


def _require_parameters_alone(
    model: ModelFile, parts: ModelParts, names: Sequence[str], values: Values
) -> None:
    """Refuse to compute what differs from input to input."""
    about = model.metadata
    known = {*values, *about.trainable, *about.statistics}
    free = parts.inputs.keys() - known
    if not free & find_needed(parts, names).values:
        return
    for name in names:
        read = sorted(free & find_needed(parts, [name]).values)
        if read:
            raise ModelError(
                f"{model.source_name} lists {name!r} among what depends on parameters alone "
                f"('folded' in its metadata), and it depends on the input {read[0]!r}: prepare the "
                "model anew"
            )


def _in_parts(
    names: Sequence[str], layout: Callable[[Sequence[str]], ModelLayout]
) -> Iterator[list[str]]:
    """Divide values so that each part is computed from a limited number of bytes."""
    if layout(names).tensor_size() <= _PART:
        yield list(names)
        return
    part, size = list[str](), 0
    for name in names:
        own = layout([name]).tensor_size()
        if part and size + own > _PART:
            yield part
            part, size = [], 0
        part.append(name)
        size += own
    yield part


def _compute(
    names: Sequence[str], layout: Callable[[Sequence[str]], ModelLayout]
) -> list[StoredTensor]:
    whole = layout(names)
    if whole.tensor_size() > MAX_FILE_SIZE:
        raise OnnxTrainError(
            f"{names[0]!r} is computed from {whole.tensor_size():,} bytes: layers of more than "
            f"{MAX_FILE_SIZE:,} cannot be exported as integers"
        )
    options = quiet_options(ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
    try:
        session = ort.InferenceSession(
            whole.file().join(), options, providers=["CPUExecutionProvider"]
        )
        found = session.run_with_ort_values(names, {})
    except Exception as error:  # onnxruntime has many kinds of errors and no common one
        raise OnnxTrainError(f"onnxruntime could not quantize the parameters: {error}") from None
    return [_stored(name, value) for name, value in zip(names, found, strict=True)]


def _stored(name: str, value: ort.OrtValue) -> StoredTensor:
    """Copy the elements of a tensor of any type, also of those that numpy has not."""
    code, dims = value.element_type(), tuple(value.shape())
    size = data_size(code, dims)
    data = bytearray(ctypes.string_at(value.data_ptr(), size) if size else b"")
    used = math.prod(dims) * ELEMENT_TYPES[code].bits % 8
    if used:  # onnxruntime leaves what is behind the last narrow element as it was
        data[-1] &= (1 << used) - 1
    return StoredTensor(name, code, dims, memoryview(data))
