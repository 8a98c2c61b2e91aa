"""Read and change the values of initializers in a graph file; all else stays byte for byte."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from onnxtrain.device.export.layout import Chunks, StoredTensor
from onnxtrain.format.checkpoint.content import Tensor
from onnxtrain.format.model.file import GraphField, ModelField, ModelFile, graph_of
from onnxtrain.format.model.tensor import (
    ExternalTensor,
    inline_data,
    read_initializer,
    read_tensor_type,
)
from onnxtrain.format.model.wire import Reader


def stored_data(model: ModelFile, names: Iterable[str]) -> dict[str, memoryview]:
    """Return the elements of those of the named initializers that are in the file itself.

    They are as in a checkpoint: row by row, little-endian. Strings are left out.
    """
    reader = Reader(model.source_name)
    found = {
        name: inline_data(reader, message)
        for name, external, message in _initializers(model, reader, names)
        if not external
    }
    return {name: data for name, data in found.items() if data is not None}


def stored_shapes(model: ModelFile, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of those of the names that are initializers, inside or external."""
    reader = Reader(model.source_name)
    found = _initializers(model, reader, names)
    return {name: read_tensor_type(reader, message, name).dims for name, _, message in found}


def _initializers(
    model: ModelFile, reader: Reader, names: Iterable[str]
) -> Iterator[tuple[str, ExternalTensor | None, memoryview]]:
    wanted = set(names)
    if wanted and not model.is_ort:
        for part in reader.fields(graph_of(model, reader), "graph"):
            if part.number == GraphField.INITIALIZER:
                name, external = read_initializer(reader, part.data)
                if name in wanted:
                    yield name, external, part.data


def with_initializers(model: ModelFile, values: Mapping[str, Tensor]) -> bytes:
    """Return the model with other values for some initializers, inside or external so far.

    The values have to be of the type and shape that they replace. Names that are no initializers
    are passed over.
    """
    reader = Reader(model.source_name)
    chunks = Chunks()
    for part in reader.fields(model.data, "model"):
        if part.number == ModelField.GRAPH:
            chunks.add_message(part.number, _graph(reader, part.data, values))
        else:
            chunks.add(model.data[part.start : part.end])
    return chunks.join()


def _graph(reader: Reader, graph: memoryview, values: Mapping[str, Tensor]) -> Chunks:
    chunks = Chunks()
    for part in reader.fields(graph, "graph"):
        name = ""
        if part.number == GraphField.INITIALIZER:
            name, _ = read_initializer(reader, part.data)
        if name in values:
            wanted = read_tensor_type(reader, part.data, name)
            tensor = StoredTensor.of(name, values[name], *wanted)
            chunks.add_message(part.number, tensor.inside())
        else:
            chunks.add(graph[part.start : part.end])
    return chunks
