"""Cut an evaluation model down to what some outputs need, and fill in the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from onnxtrain.device.export.layout import Buffer, ModelLayout, StoredTensor, value_info
from onnxtrain.device.export.model_parts import ModelParts, find_needed
from onnxtrain.device.export.runtime import Inferred, infer
from onnxtrain.errors import CheckpointError, ModelError, StateError
from onnxtrain.format.checkpoint.content import (
    RawTensor,
    Tensor,
    tensor_bytes,
    tensor_code,
    tensor_dims,
)
from onnxtrain.format.element_types import ELEMENT_TYPES, STRING, data_size
from onnxtrain.format.model.file import (
    ExternalTensor,
    ModelFile,
    has_shape,
    has_type,
    map_file,
    read_value_type,
)
from onnxtrain.format.model.tensor import TensorType, read_tensor_type
from onnxtrain.format.model.wire import Reader, text_field

Values = Mapping[str, Tensor]
Dims = tuple[int | str | None, ...]

_NO_BYTES = memoryview(b"")


class Cut:
    """One cut through a model; `layout` is the result."""

    def __init__(
        self, model: ModelFile, parts: ModelParts, outputs: Sequence[str], values: Values
    ) -> None:
        self._model = model
        self._parts = parts
        self._outputs = outputs
        self._values = values
        self._reader = Reader(model.source_name)
        self._files: dict[str, memoryview] = {}
        self._needed = find_needed(parts, outputs)
        self._require_makers()
        self._parameters = [name for name in parts.inputs if self._is_parameter(name)]

    def layout(self) -> ModelLayout:
        """The exported model."""
        replaced = set(self._parameters)
        inputs = [data for name, data in self._kept(self._parts.inputs) if name not in replaced]
        tensors = [self._parameter(name) for name in self._parameters]
        copied: list[Buffer] = []
        for name, data in self._kept(self._parts.initializers):
            if name in replaced:
                continue
            if name in self._values:
                wanted = read_tensor_type(self._reader, data, name)
                tensors.append(
                    stored_tensor(name, self._values[name], wanted.element_type, wanted.dims)
                )
            elif name in self._model.external:
                tensors.append(self._from_file(self._model.external[name]))
            else:
                copied.append(data)
        return self._assemble(inputs, self._output_types(), copied, tensors)

    def _assemble(
        self,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer],
        copied: Sequence[Buffer],
        tensors: Sequence[StoredTensor],
    ) -> ModelLayout:
        parts, needed = self._parts, self._needed
        given_out = set(self._outputs)
        made = {name for node in needed.nodes for name in node.outputs} - given_out
        return ModelLayout(
            head=parts.head,
            opsets=[data for domain, data in parts.opsets if domain in needed.domains],
            functions=needed.functions,
            graph_head=parts.graph_head,
            nodes=[node.data for node in needed.nodes],
            inputs=inputs,
            outputs=outputs,
            value_infos=[data for name, data in parts.value_infos.items() if name in made],
            quantization=[data for _, data in self._kept(parts.quantization)],
            copied=copied,
            sparse=[data for _, data in self._kept(parts.sparse_initializers)],
            tensors=tensors,
        )

    def _kept(self, pieces: Mapping[str, memoryview]) -> list[tuple[str, memoryview]]:
        return [(name, data) for name, data in pieces.items() if name in self._needed.values]

    def _require_makers(self) -> None:
        lost = sorted(self._needed.values - self._parts.value_names())
        if lost:
            raise ModelError(
                f"{self._model.source_name}: nothing in the graph makes "
                f"{', '.join(map(repr, lost[:8]))}, which it reads"
            )

    # ---- tensors -----------------------------------------------------------------------------

    def _is_parameter(self, name: str) -> bool:
        if name not in self._needed.values:
            return False
        metadata = self._model.metadata
        return any(name in ns for ns in (self._values, metadata.trainable, metadata.statistics))

    def _parameter(self, name: str) -> StoredTensor:
        if name not in self._values:
            raise CheckpointError(
                f"there is no value for the parameter {name!r} of {self._model.source_name}: load "
                "the checkpoint that belongs to the model"
            )
        wanted = read_value_type(self._reader, self._parts.inputs[name], "input")
        return stored_tensor(name, self._values[name], wanted.element_type, wanted.dims)

    def _from_file(self, tensor: ExternalTensor) -> StoredTensor:
        """Read an external tensor that is no parameter from the file that the model names."""
        where = f"{self._model.source_name}: initializer {tensor.name!r}"
        if self._model.path is None:
            raise ModelError(
                f"{where} is in the file {tensor.location!r}, which a model in memory has not: "
                "give its value, or read the model from its path"
            )
        if tensor.location not in self._files:
            file = self._model.path.parent / tensor.location
            self._files[tensor.location] = map_file(file)
        data = self._files[tensor.location]
        end = tensor.offset + tensor.length
        if end > len(data):
            raise ModelError(f"{where} ends at byte {end} of {tensor.location}, which is shorter")
        return StoredTensor(
            tensor.name, tensor.element_type, tensor.dims, data[tensor.offset : end]
        )

    # ---- types -------------------------------------------------------------------------------

    def _output_types(self) -> list[Buffer]:
        """The types of the outputs: as the model states them, else as onnxruntime infers them."""
        stated = {name: self._stated_type(name) for name in self._outputs}
        unsure = [
            name
            for name, data in stated.items()
            if data is None or not has_shape(self._reader, data)
        ]
        try:
            inferred = self._infer(unsure)
        except ModelError:
            if None in stated.values():
                raise
            inferred = {}  # a type without a shape will do
        for name, found in inferred.items():
            if stated[name] is None or found.dims is not None:
                stated[name] = found.value_info(name, self._model.source_name)
        return [data for data in stated.values() if data is not None]

    def _stated_type(self, name: str) -> Buffer | None:
        """The type of a value as the model states it, or None."""
        parts = self._parts
        for pieces in (parts.outputs, parts.value_infos, parts.inputs):
            if name in pieces and has_type(self._reader, pieces[name]):
                return pieces[name]
        if name in parts.initializers:
            return self._initializer_type(name)
        return None

    def _initializer_type(self, name: str) -> bytes:
        stored: TensorType = read_tensor_type(self._reader, self._parts.initializers[name], name)
        return value_info(name, stored.element_type, stored.dims)

    def _infer(self, names: Sequence[str]) -> dict[str, Inferred]:
        """Let onnxruntime find types; parameters stay inputs, so that no data are needed."""
        if not names:
            return {}
        inputs: list[Buffer] = [data for _, data in self._kept(self._parts.inputs)]
        copied: list[Buffer] = []
        for name, data in self._kept(self._parts.initializers):
            if name not in self._model.external:
                copied.append(data)
            elif name not in self._parts.inputs:
                inputs.append(self._initializer_type(name))

        def model(nodes: Sequence[bytes], outputs: Sequence[str]) -> bytes:
            untyped = [text_field(1, name) for name in outputs]
            layout = self._assemble(inputs, untyped, copied, [])
            layout.nodes = [*layout.nodes, *nodes]
            return layout.file().join()

        return infer(model, names, self._model.source_name)


def stored_tensor(name: str, value: Tensor, code: int, dims: Dims | None) -> StoredTensor:
    """The value of a parameter, which must be of the type that the model wants."""
    given_code, given_dims = tensor_code(value, name), tensor_dims(value, name)
    if isinstance(value, RawTensor) and value.data.nbytes != data_size(given_code, given_dims):
        raise StateError(
            f"the parameter {name!r} has no value. Please load the model parameters first: the "
            "checkpoint is nominal"
        )
    if given_code != code or not _fits(given_dims, dims):
        raise CheckpointError(
            f"the parameter {name!r} is {_described(given_code, given_dims)} and the model wants "
            f"{_described(code, dims)}: the values are of another model"
        )
    if given_code == STRING:
        texts = tuple(str(text).encode("utf-8") for text in np.asarray(value).flat)
        return StoredTensor(name, code, given_dims, _NO_BYTES, texts)
    return StoredTensor(name, code, given_dims, tensor_bytes(value))


def _fits(given: tuple[int, ...], wanted: Dims | None) -> bool:
    if wanted is None:
        return True
    return len(given) == len(wanted) and all(
        size == want for size, want in zip(given, wanted, strict=True) if isinstance(want, int)
    )


def _described(code: int, dims: Dims | None) -> str:
    kind = ELEMENT_TYPES[code].name if code in ELEMENT_TYPES else f"of element type {code}"
    shape = "any shape" if dims is None else f"shape ({', '.join(map(str, dims))})"
    return f"{kind} of {shape}"
