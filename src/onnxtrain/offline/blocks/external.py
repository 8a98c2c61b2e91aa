"""Weights in files beside the model: named by their full path while a model is built."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import onnx
import onnx_ir as ir

from onnxtrain.errors import ModelError
from onnxtrain.offline.blocks.values import all_graphs
from onnxtrain.offline.frontend.external_data import settle_tensors


def locate(model: onnx.ModelProto, path: str | os.PathLike[str]) -> dict[str, str]:
    """Replace the locations of external tensors by full paths; return the old ones by the new.

    A file that is missing, too short, or outside of the folder of the model is an error.
    """
    if not any(True for _ in _external(model)):
        return {}
    file = Path(path).absolute()
    loaded = ir.from_proto(model)
    for graph in (loaded.graph, *loaded.graph.subgraphs()):
        ir.external_data.set_base_dir(graph, file.parent)
    settle_tensors(loaded, repr(str(path)), "put it beside the model", file)
    settled = {
        name: value.const_value
        for graph in (loaded.graph, *loaded.graph.subgraphs())
        for name, value in graph.initializers.items()
    }
    declared = {}
    for tensor in list(_external(model)):
        found = settled[tensor.name]
        if isinstance(found, ir.ExternalTensor):
            full = os.path.abspath(found.path)
            declared[full] = _entry(tensor).value
            _entry(tensor).value = full
        elif found is not None:  # a small one, which has been read
            tensor.CopyFrom(ir.to_proto(found))
    return declared


def name_as_before(models: Iterable[onnx.ModelProto], declared: Mapping[str, str]) -> None:
    """Undo `locate` in models that were made from that model."""
    for model in models:
        for tensor in _external(model):
            entry = _entry(tensor)
            entry.value = declared.get(entry.value, entry.value)


def _external(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    for graph in all_graphs(model.graph):
        for tensor in graph.initializer:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                yield tensor


def _entry(tensor: onnx.TensorProto) -> onnx.StringStringEntryProto:
    entry: onnx.StringStringEntryProto
    for entry in tensor.external_data:
        if entry.key == "location":
            return entry
    raise ModelError(f"the external tensor {tensor.name!r} does not name its file")
