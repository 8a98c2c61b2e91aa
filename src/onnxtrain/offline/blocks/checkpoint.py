"""Checkpoints of the parameters of a TrainingBlock: save them, and load them into a model."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import CheckpointError
from onnxtrain.format.checkpoint.content import (
    CheckpointContent,
    RawTensor,
    Tensor,
    tensor_bytes,
    tensor_code,
    tensor_dims,
)
from onnxtrain.format.checkpoint.file import read_checkpoint, write_checkpoint
from onnxtrain.format.element_types import ELEMENT_TYPES, STRING

Parameters = tuple[Sequence[onnx.TensorProto], Sequence[onnx.TensorProto]]
_DATA_FIELDS = (
    "raw_data float_data int32_data string_data int64_data double_data uint64_data external_data"
).split()


def save_checkpoint(
    parameters: Parameters | None,
    path: str | os.PathLike[str],
    nominal_checkpoint: bool = False,
) -> None:
    """Write trainable and frozen parameters, as `TrainingBlock.parameters()` returns them.

    A nominal checkpoint has names and types, and no data.
    """
    if parameters is None:
        raise CheckpointError(
            "there are no parameters to save: pass what TrainingBlock.parameters() returns"
        )
    trainable, frozen = parameters
    counts = Counter(tensor.name for tensor in (*trainable, *frozen))
    repeated = [name for name, count in counts.items() if count > 1]
    if repeated:
        raise CheckpointError(
            f"a checkpoint has each name once, but these are given twice: {', '.join(repeated)}"
        )
    stored = [{t.name: ir.serde.deserialize_tensor(t) for t in kind} for kind in parameters]
    write_checkpoint(path, content_of(*stored, nominal=nominal_checkpoint), sort=False)


def content_of(
    trainable: Mapping[str, ir.TensorProtocol],
    frozen: Mapping[str, ir.TensorProtocol],
    *,
    nominal: bool = False,
) -> CheckpointContent:
    """Return what a checkpoint of these parameters holds; names and types alone if nominal."""
    kinds = [{n: _stored(t, nominal) for n, t in kind.items()} for kind in (trainable, frozen)]
    return CheckpointContent(trainable=kinds[0], frozen=kinds[1], nominal=nominal)


def load_checkpoint_to_model(path: str | os.PathLike[str], model: onnx.ModelProto) -> None:
    """Overwrite those initializers of a model that a checkpoint has."""
    content = read_checkpoint(path)
    if content.nominal:
        raise CheckpointError(f"the checkpoint {str(path)!r} is nominal: it has no data to load")
    stored = {**content.trainable, **content.frozen}
    for initializer in model.graph.initializer:
        if initializer.name in stored:
            _overwrite(initializer, stored[initializer.name])


def _stored(tensor: ir.TensorProtocol, nominal: bool) -> Tensor:
    code, dims = int(tensor.dtype), tuple(tensor.shape.numpy())
    if nominal:
        return RawTensor(code, (), np.empty(0, dtype=np.uint8))
    if code == STRING:
        texts = [text.decode("utf-8") for text in tensor.numpy().flat]
        return np.array(texts, dtype=object).reshape(dims)
    if ELEMENT_TYPES[code].dtype is not None:
        return tensor.numpy()
    return RawTensor(code, dims, np.frombuffer(tensor.tobytes(), dtype=np.uint8))


def _overwrite(initializer: onnx.TensorProto, tensor: Tensor) -> None:
    name = initializer.name
    code, dims = tensor_code(tensor, name), tensor_dims(tensor, name)
    if code != initializer.data_type or dims != tuple(initializer.dims):
        expected = ELEMENT_TYPES[initializer.data_type].name
        raise CheckpointError(
            f"the initializer {name!r} is {expected}{list(initializer.dims)} in the model and "
            f"{ELEMENT_TYPES[code].name}{list(dims)} in the checkpoint: they are not of one model"
        )
    for field in _DATA_FIELDS:
        initializer.ClearField(field)
    initializer.data_location = onnx.TensorProto.DEFAULT
    if code == STRING:
        assert not isinstance(tensor, RawTensor)
        initializer.string_data.extend(str(text).encode("utf-8") for text in tensor.flat)
    else:
        initializer.raw_data = bytes(tensor_bytes(tensor))
