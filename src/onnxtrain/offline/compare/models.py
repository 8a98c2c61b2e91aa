"""The two models of a comparison: read, checked, and opened in onnxruntime."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from onnxtrain.device.run.graph import value_type
from onnxtrain.errors import ArgumentError, InputError, ModelError, RunError
from onnxtrain.format.element_types import ELEMENT_TYPES
from onnxtrain.format.model.file import ValueType
from onnxtrain.format.model_metadata import ModelMetadata
from onnxtrain.offline.frontend.external_data import tensors_of
from onnxtrain.offline.frontend.load import ModelLike, load, read_model

Array = np.ndarray[Any, Any]
Feeds = Mapping[str, Array]


@dataclass(frozen=True)
class OpenModel:
    """A model that runs."""

    name: str
    proto: onnx.ModelProto  # without external data
    path: Path | None
    bytes: int
    session: ort.InferenceSession
    inputs: tuple[ValueType, ...]
    outputs: tuple[str, ...]

    @property
    def batch(self) -> int | None:
        """The number of samples that the model takes, if it takes no other."""
        first = self.inputs[0].dims if self.inputs else None
        return first[0] if first and isinstance(first[0], int) else None

    @property
    def layout(self) -> dict[str, int]:
        """How the loss that the model was trained with reads labels, as far as it says."""
        properties = {entry.key: entry.value for entry in self.proto.metadata_props}
        try:
            return ModelMetadata.of(properties).labels
        except ValueError:  # of what others wrote
            return {}

    def run(self, names: Sequence[str], feeds: Feeds) -> list[Array]:
        """Return some outputs."""
        return run(self.session, names, feeds, self.name)


def run(session: ort.InferenceSession, names: Sequence[str], feeds: Feeds, of: str) -> list[Array]:
    """Run a model; what onnxruntime says about data that it does not take is an error of ours."""
    try:
        found: list[Array] = session.run(list(names), dict(feeds))
        return found
    except Exception as error:  # onnxruntime's exceptions have no common base class
        raise RunError(f"{of} does not run on these samples: {error}") from None


def open_models(first: ModelLike, second: ModelLike, threads: int) -> tuple[OpenModel, OpenModel]:
    """Open two models, and check that they take the same inputs."""
    one = _opened(first, "the first model", threads)
    other = _opened(second, "the second model", threads)
    _require_same_inputs(one, other)
    return one, other


def _opened(model: ModelLike, what: str, threads: int) -> OpenModel:
    proto, path = read_model(model)
    load(model)  # refuses what is damaged, or names files of others
    name = what if path is None else str(path)
    session = open_session(proto if path is None else path, name, options(threads))
    inputs = tuple(value_type(value) for value in session.get_inputs())
    outputs = tuple(value.name for value in session.get_outputs())
    return OpenModel(name, proto, path, _size(proto, path), session, inputs, outputs)


def options(
    threads: int = 0, level: Any = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
) -> ort.SessionOptions:
    """Return options for a session that does not disturb another one, which runs in turn."""
    made = ort.SessionOptions()
    made.graph_optimization_level = level
    made.log_severity_level = 4  # what it would say is in the error
    made.intra_op_num_threads = threads
    # Threads that wait for the next run would take the processor from the other model.
    made.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return made


def open_session(
    model: onnx.ModelProto | Path, name: str, settings: ort.SessionOptions
) -> ort.InferenceSession:
    """Load a model in onnxruntime."""
    given = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    try:
        return ort.InferenceSession(given, settings, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions have no common base class
        raise ModelError(f"onnxruntime does not load {name}: {error}") from None


def _size(proto: onnx.ModelProto, path: Path | None) -> int:
    """Return the bytes of a model, and of the files that hold its external data."""
    if path is None:
        return int(proto.ByteSize())
    beside = {
        path.parent / entry.value
        for tensor in tensors_of(proto)
        if tensor.data_location == onnx.TensorProto.EXTERNAL
        for entry in tensor.external_data
        if entry.key == "location"
    }
    return sum(os.stat(file).st_size for file in (path, *beside))


def _require_same_inputs(first: OpenModel, second: OpenModel) -> None:
    if not first.inputs:
        raise InputError(f"{first.name} has no inputs: there is nothing to compare on")
    one, other = ({v.name: v for v in model.inputs} for model in (first, second))
    fits = one.keys() == other.keys() and all(_fits(one[name], other[name]) for name in one)
    if not fits:
        raise InputError(
            f"the models take different inputs: {first.name} takes {_described(first.inputs)}, and "
            f"{second.name} takes {_described(second.inputs)}"
        )


def _fits(first: ValueType, second: ValueType) -> bool:
    if first.element_type != second.element_type:
        return False
    if first.dims is None or second.dims is None:
        return True
    return len(first.dims) == len(second.dims) and all(
        a == b
        for a, b in zip(first.dims, second.dims, strict=True)
        if isinstance(a, int) and isinstance(b, int)
    )


def _described(inputs: Sequence[ValueType]) -> str:
    found = []
    for value in inputs:
        element = ELEMENT_TYPES.get(value.element_type)
        dims = ["?" if d is None else str(d) for d in value.dims or ()]
        found.append(f"{value.name} {element.name.lower() if element else '?'}[{', '.join(dims)}]")
    return ", ".join(found)


def paired_outputs(first: OpenModel, second: OpenModel) -> dict[str, str]:
    """Return which output of the second model stands for which of the first."""
    shared = {name: name for name in first.outputs if name in second.outputs}
    if shared:
        return shared
    if len(first.outputs) != len(second.outputs):
        raise ArgumentError(
            f"the models have no output in common: {first.name} has {', '.join(first.outputs)}, "
            f"and {second.name} has {', '.join(second.outputs)}"
        )
    return dict(zip(first.outputs, second.outputs, strict=True))
