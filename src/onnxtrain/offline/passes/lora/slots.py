"""The model for inference: that of the user, node by node, with slots for an adapter."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain.offline.frontend.canonicalize import DEFAULTS_AS_INPUTS_UNTIL
from onnxtrain.offline.frontend.external_data import read_external_tensor, tensors_of
from onnxtrain.offline.writer.base_data import BaseData, Place, fingerprint, is_stored


@dataclass(frozen=True)
class SlotModel:
    """A model whose large tensors are elsewhere: in the proto, or the file, that it was made of."""

    proto: onnx.ModelProto
    sources: Mapping[str, onnx.TensorProto]
    path: Path | None
    base: str  # the fingerprint of all tensors

    @staticmethod
    def of(proto: onnx.ModelProto, path: Path | None) -> SlotModel:
        """Return a copy of a model that shares its large tensors."""
        made = onnx.ModelProto()
        _copy(proto, made, "graph")
        _copy(proto.graph, made.graph, "initializer")
        for tensor in tensors_of(made):
            if path is not None:
                read_external_tensor(tensor, path)
        sources, known = {}, {}
        for tensor in proto.graph.initializer:
            data = _bytes_of(tensor, path)
            dims = tuple(tensor.dims)
            known[tensor.name] = tensor.data_type, dims, hashlib.sha256(data).digest()
            dtype = ir.DataType(tensor.data_type)
            if is_stored(dtype, len(data)):
                sources[tensor.name] = tensor
                made.graph.initializer.add(name=tensor.name, data_type=dtype.value, dims=dims)
            else:
                made.graph.initializer.add().CopyFrom(_inside(tensor, path))
        _take_defaults_out_of_inputs(made)
        return SlotModel(made, sources, path, fingerprint(known))

    def write(
        self, file: Path, data: BaseData, properties: Mapping[str, str], more: Iterable[str] = ()
    ) -> None:
        """Write the model, with its large tensors in the file of the base.

        What of the base trains too (`more`) is made a slot with its own name, whose default is the
        value in the base.
        """
        inputs = {value.name for value in self.proto.graph.input}
        wanted, taken = set(more) - inputs, set[Place]()
        for tensor in self.proto.graph.initializer:
            if tensor.name in wanted:
                info = onnx.helper.make_tensor_value_info(
                    tensor.name, tensor.data_type, tensor.dims
                )
                self.proto.graph.input.append(info)
            source = self.sources.get(tensor.name)
            if source is not None:
                data.point(tensor, _bytes_of(source, self.path), taken)
        known = {entry.key: entry.value for entry in self.proto.metadata_props}
        onnx.helper.set_model_props(self.proto, {**known, **properties})
        file.write_bytes(self.proto.SerializeToString(deterministic=True))


def _copy(given: Any, made: Any, left_out: str) -> None:
    """Copy all fields of a message but one."""
    for field, value in given.ListFields():
        if field.name == left_out:
            continue
        if hasattr(value, "extend"):
            getattr(made, field.name).extend(value)
        elif hasattr(value, "ListFields"):
            getattr(made, field.name).CopyFrom(value)
        else:
            setattr(made, field.name, value)


def _inside(tensor: onnx.TensorProto, path: Path | None) -> onnx.TensorProto:
    """Return a tensor with its elements, which may be in a file beside the model."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL or path is None:
        return tensor
    made = onnx.TensorProto()
    made.CopyFrom(tensor)
    read_external_tensor(made, path)
    return made


def _bytes_of(tensor: onnx.TensorProto, path: Path | None) -> bytes:
    found = _inside(tensor, path)
    if found.data_type == onnx.TensorProto.STRING:
        return repr(list(found.string_data)).encode()
    return found.raw_data or ir.serde.deserialize_tensor(found).tobytes()


def _take_defaults_out_of_inputs(model: onnx.ModelProto) -> None:
    """Bring a model to a version in which an initializer that is no input is a constant.

    Before, all of them had to be inputs, and none could be fed.
    """
    if model.ir_version > DEFAULTS_AS_INPUTS_UNTIL - 1:
        return
    stored = {tensor.name for tensor in model.graph.initializer}
    kept = [value for value in model.graph.input if value.name not in stored]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    model.ir_version = DEFAULTS_AS_INPUTS_UNTIL
