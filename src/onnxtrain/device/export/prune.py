"""Cut an evaluation model down to what some outputs need, and fill in the parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import onnxruntime as ort

from onnxtrain.device.export.layout import (
    Buffer,
    ModelLayout,
    StoredTensor,
    tensor_type,
    value_info,
)
from onnxtrain.device.export.model_parts import ModelParts, Needed, find_needed
from onnxtrain.errors import CheckpointError, ModelError
from onnxtrain.format.checkpoint.content import Tensor
from onnxtrain.format.element_types import ELEMENT_TYPES
from onnxtrain.format.model.file import (
    ExternalTensor,
    ModelField,
    ModelFile,
    has_shape,
    has_type,
    read_value_type,
)
from onnxtrain.format.model.source import ExternalFiles
from onnxtrain.format.model.tensor import read_tensor_type
from onnxtrain.format.model.wire import Reader, bytes_field, text_field

Values = Mapping[str, Tensor]
_CODES = {element.name.lower(): code for code, element in ELEMENT_TYPES.items()}


def layout_of(
    parts: ModelParts,
    needed: Needed,
    inputs: Sequence[Buffer],
    outputs: Mapping[str, Buffer],
    copied: Sequence[Buffer],
    tensors: Sequence[StoredTensor] = (),
) -> ModelLayout:
    """Return a model of what some outputs need."""
    made = {name for node in needed.nodes for name in node.outputs} - outputs.keys()
    return ModelLayout(
        head=[*parts.head, *(_property(*item) for item in parts.properties.items())],
        opsets=[data for domain, data in parts.opsets if domain in needed.domains],
        functions=needed.functions,
        graph_head=parts.graph_head,
        nodes=[node.data for node in needed.nodes],
        inputs=inputs,
        outputs=list(outputs.values()),
        value_infos=[data for name, data in parts.value_infos.items() if name in made],
        quantization=list(needed.of(parts.quantization).values()),
        copied=copied,
        sparse=list(needed.of(parts.sparse_initializers).values()),
        tensors=tensors,
    )


def _property(key: str, value: str) -> bytes:
    return bytes_field(ModelField.METADATA, text_field(1, key) + text_field(2, value))


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
        self._files = None if model.path is None else ExternalFiles(model.path)
        self._needed = find_needed(parts, outputs)
        lost = sorted(self._needed.values - parts.value_names())
        if lost:
            raise ModelError(
                f"{model.source_name}: nothing in the graph makes "
                f"{', '.join(map(repr, lost[:8]))}, which it reads"
            )

    def layout(self, outputs: Mapping[str, Buffer] | None = None) -> ModelLayout:
        """The exported model; its outputs are of the given types, or of those that are found."""
        metadata = self._model.metadata
        known = {*self._values, *metadata.trainable, *metadata.statistics}
        needed_inputs = self._needed.of(self._parts.inputs)
        inputs: list[Buffer] = []
        copied: list[Buffer] = []
        tensors: list[StoredTensor] = []
        for name, data in needed_inputs.items():
            if name not in known:
                inputs.append(data)
                continue
            if name not in self._values:
                raise CheckpointError(
                    f"there is no value for the parameter {name!r} of {self._model.source_name}: "
                    "load the checkpoint that belongs to the model"
                )
            typed = read_value_type(self._reader, data, "input")
            tensors.append(
                StoredTensor.of(name, self._values[name], typed.element_type, typed.dims)
            )
        for name, data in self._needed.of(self._parts.initializers).items():
            if name in needed_inputs and name in known:
                continue  # it is among the tensors already
            if name in self._values:
                wanted = read_tensor_type(self._reader, data, name)
                tensors.append(StoredTensor.of(name, self._values[name], *wanted))
            elif name in self._model.external:
                tensors.append(self._from_file(self._model.external[name]))
            else:
                copied.append(data)
        computed = self._parts.computed
        tensors += [computed[name] for name in computed if name in self._needed.values]
        if outputs is None:
            outputs = self._output_types()
        return layout_of(self._parts, self._needed, inputs, outputs, copied, tensors)

    def open_layout(self) -> ModelLayout:
        """The model in which parameters are inputs still, and frozen tensors where they were."""
        inputs = list(self._needed.of(self._parts.inputs).values())
        constants = list(self._needed.of(self._parts.initializers).values())
        return layout_of(self._parts, self._needed, inputs, self._output_types(), constants)

    def _from_file(self, tensor: ExternalTensor) -> StoredTensor:
        """Read an external tensor that is no parameter from the file that the model names."""
        where = f"{self._model.source_name}: initializer {tensor.name!r}"
        if self._files is None:
            raise ModelError(
                f"{where} is in the file {tensor.location!r}, which a model in memory has not: "
                "give its value, or read the model from its path"
            )
        data = self._files.read(tensor)
        return StoredTensor(tensor.name, tensor.element_type, tensor.dims, data)

    def _output_types(self) -> dict[str, Buffer]:
        """The types of the outputs: as the model states them, else as onnxruntime infers them."""
        stated = {name: self._stated_type(name) for name in self._outputs}
        unsure = [n for n, data in stated.items() if not data or not has_shape(self._reader, data)]
        try:
            inferred = self._infer(unsure) if unsure else {}
        except ModelError:
            if None in stated.values():
                raise
            inferred = {}  # a type without a shape will do
        for name, found in inferred.items():
            if stated[name] is None or found.dims is not None:
                stated[name] = found.value_info(name, self._model.source_name)
        return {name: data for name, data in stated.items() if data is not None}

    def _stated_type(self, name: str) -> Buffer | None:
        """The type of a value as the model states it, or None."""
        parts = self._parts
        for pieces in (parts.outputs, parts.value_infos, parts.inputs):
            if name in pieces and has_type(self._reader, pieces[name]):
                return pieces[name]
        if name in parts.computed:
            return self._computed_type(name)
        return self._initializer_type(name) if name in parts.initializers else None

    def _computed_type(self, name: str) -> bytes:
        tensor = self._parts.computed[name]
        return value_info(name, tensor.code, tensor.dims)

    def _initializer_type(self, name: str) -> bytes:
        stored = read_tensor_type(self._reader, self._parts.initializers[name], name)
        return value_info(name, *stored)

    def _infer(self, names: Sequence[str]) -> dict[str, _Inferred]:
        """Let onnxruntime find types; parameters stay inputs, so that no data are needed."""
        inputs: list[Buffer] = list(self._needed.of(self._parts.inputs).values())
        copied: list[Buffer] = []
        for name, data in self._needed.of(self._parts.initializers).items():
            if name not in self._model.external:
                copied.append(data)
            elif name not in self._parts.inputs:
                inputs.append(self._initializer_type(name))
        computed = self._needed.values.intersection(self._parts.computed)
        inputs += [self._computed_type(name) for name in sorted(computed)]

        def model(nodes: Sequence[bytes], outputs: Sequence[str]) -> bytes:
            untyped = {name: text_field(1, name) for name in outputs}
            layout = layout_of(self._parts, self._needed, inputs, untyped, copied)
            layout.nodes = [*layout.nodes, *nodes]
            return layout.file().join()

        return _infer(model, names, self._model.source_name)


class _Inferred(NamedTuple):
    """What onnxruntime knows of an output: its kind, and its dimensions or None."""

    kind: str
    dims: list[int | str | None] | None

    def value_info(self, name: str, source: str) -> bytes:
        """Write it as a ValueInfoProto."""
        element = self.kind.removeprefix("seq(").removeprefix("tensor(").rstrip(")")
        if element not in _CODES:
            raise ModelError(f"{source}: {name!r} is a {self.kind}, which cannot be exported")
        typed = tensor_type(_CODES[element], self.dims)
        if self.kind.startswith("seq("):
            typed = bytes_field(4, bytes_field(1, typed))
        return text_field(1, name) + bytes_field(2, typed)


def _infer(
    model: Callable[[Sequence[bytes], Sequence[str]], bytes], names: Sequence[str], source: str
) -> dict[str, _Inferred]:
    """Ask onnxruntime for the types of values.

    `model` makes a model with additional nodes and outputs of unknown type.
    """
    found = _outputs(model([], names), names, source)
    # A scalar and an unknown shape look alike. Of Shape's result, the shape says which it is.
    flat = [n for n in names if not found[n].shape and found[n].type.startswith("tensor(")]
    ranks = {name: f"rank of {name}" for name in flat}
    nodes = [
        text_field(1, name) + text_field(2, rank) + text_field(4, "Shape")
        for name, rank in ranks.items()
    ]
    asked = _outputs(model(nodes, list(ranks.values())), flat, source) if flat else {}
    scalars = {name for name in flat if list(asked[ranks[name]].shape) == [0]}
    return {
        name: _Inferred(
            output.type, list(output.shape) if output.shape or name in scalars else None
        )
        for name, output in found.items()
    }


def _outputs(model: bytes, names: Sequence[str], source: str) -> dict[str, Any]:
    options = quiet_options(ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
    try:
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has many kinds of errors and no common one
        raise ModelError(
            f"{source} does not say of which type {', '.join(map(repr, names))} is, and "
            f"onnxruntime cannot tell: {error}"
        ) from None
    return {output.name: output for output in session.get_outputs()}


def quiet_options(level: Any) -> ort.SessionOptions:
    """Return options for a session that only reads a model."""
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.log_severity_level = 4  # fatal errors alone
    return options
