"""The bytes of an ONNX file and of its external data, and initializers of existing files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np

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
    GraphField,
    ModelField,
    ModelFile,
    ValueType,
    graph_of,
    read_name,
)
from onnxtrain.format.model.tensor import (
    EXTERNAL,
    ExternalTensor,
    TensorField,
    inline_data,
    read_initializer,
    read_tensor_type,
)
from onnxtrain.format.model.wire import Reader, bytes_field, header, number_field, text_field
from onnxtrain.format.names import FUNCTION_DOMAIN

Buffer = bytes | memoryview
Dims = tuple[int | str | None, ...]

# Protobuf, and with it onnxruntime, takes no larger message.
MAX_FILE_SIZE = (1 << 31) - 1
# As in checkpoints: smaller tensors stay in the file itself.
EXTERNAL_TENSOR_SIZE = 64
# Large tensors begin at a page of memory, so that a runtime can map them.
_PAGE, _LARGE, _ALIGNMENT = 4096, 1 << 20, 64


class Chunks:
    """A sequence of bytes in pieces, none of which is copied until it is written."""

    def __init__(self, buffers: Iterable[Buffer] = ()) -> None:
        self.buffers: list[Buffer] = list(buffers)
        self.size = sum(map(len, self.buffers))

    def add(self, buffer: Buffer) -> None:
        """Append a piece."""
        self.buffers.append(buffer)
        self.size += len(buffer)

    def add_message(self, number: int, content: Chunks) -> None:
        """Append a field that is a message in pieces."""
        self.add(header(number, content.size))
        self.buffers += content.buffers
        self.size += content.size

    def write(self, file: BinaryIO) -> None:
        """Write all pieces."""
        for buffer in self.buffers:
            file.write(buffer)

    def join(self) -> bytes:
        """Return all pieces as one."""
        return b"".join(self.buffers)


@dataclass(frozen=True)
class StoredTensor:
    """An initializer to be written: its bytes, or the elements of a tensor of strings."""

    name: str
    code: int
    dims: tuple[int, ...]
    data: memoryview
    strings: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, name: str, value: Tensor, code: int, dims: Dims | None) -> StoredTensor:
        """Return the value of a parameter, which must be of the type that the model wants."""
        given_code, given_dims = tensor_code(value, name), tensor_dims(value, name)
        if isinstance(value, RawTensor) and value.data.nbytes != data_size(given_code, given_dims):
            raise StateError(
                f"the parameter {name!r} has no value. Please load the model parameters first: the "
                "checkpoint is nominal"
            )
        fits = dims is None or len(dims) == len(given_dims)
        sizes = zip(given_dims, dims or (), strict=False)
        if given_code != code or not fits or any(isinstance(w, int) and w != n for n, w in sizes):
            raise CheckpointError(
                f"the parameter {name!r} is {_described(given_code, given_dims)} and the model "
                f"wants {_described(code, dims)}: the values are of another model"
            )
        if given_code == STRING:
            texts = tuple(str(text).encode("utf-8") for text in np.asarray(value).flat)
            return cls(name, code, given_dims, memoryview(b""), texts)
        return cls(name, code, given_dims, tensor_bytes(value))

    def _head(self) -> Chunks:
        chunks = Chunks(number_field(TensorField.DIMS, dim) for dim in self.dims)
        chunks.add(number_field(TensorField.DATA_TYPE, self.code))
        chunks.add(text_field(TensorField.NAME, self.name))
        return chunks

    def inside(self) -> Chunks:
        """The tensor with its elements."""
        chunks = self._head()
        for text in self.strings:
            chunks.add(bytes_field(TensorField.STRING_DATA, text))
        if self.code != STRING:
            chunks.add(header(TensorField.RAW_DATA, len(self.data)))
            chunks.add(self.data)
        return chunks

    def outside(self, location: str, offset: int) -> Chunks:
        """The tensor with a reference to its elements in another file."""
        chunks = self._head()
        entries = {"location": location, "offset": str(offset), "length": str(len(self.data))}
        for key, value in entries.items():
            entry = text_field(1, key) + text_field(2, value)
            chunks.add(bytes_field(TensorField.EXTERNAL_DATA, entry))
        chunks.add(number_field(TensorField.DATA_LOCATION, EXTERNAL))
        return chunks

    def is_large(self) -> bool:
        """Whether the tensor leaves the file when the file gets too large."""
        return len(self.data) >= EXTERNAL_TENSOR_SIZE


@dataclass
class ModelLayout:
    """All of a model that is to be written.

    `head` and `graph_head` are whole fields; the others are messages. `copied` are initializers as
    they were in the file.
    """

    head: Sequence[Buffer]
    opsets: Sequence[Buffer]
    functions: Sequence[Buffer]
    graph_head: Sequence[Buffer]
    nodes: Sequence[Buffer]
    inputs: Sequence[Buffer]
    outputs: Sequence[Buffer]
    value_infos: Sequence[Buffer] = ()
    quantization: Sequence[Buffer] = ()
    copied: Sequence[Buffer] = ()
    sparse: Sequence[Buffer] = ()
    tensors: Sequence[StoredTensor] = field(default_factory=list)

    def tensor_size(self) -> int:
        """Return how many bytes the tensors take."""
        return sum(len(tensor.data) for tensor in self.tensors)

    def file(self, location: str | None = None) -> Chunks:
        """The model; with a location, large tensors are in the file of that name."""
        chunks = Chunks(self.head)
        for opset in self.opsets:
            chunks.add(bytes_field(ModelField.OPSET_IMPORT, opset))
        chunks.add_message(ModelField.GRAPH, self._graph(location))
        for function in self.functions:
            chunks.add_message(ModelField.FUNCTIONS, Chunks([function]))
        if chunks.size > MAX_FILE_SIZE:
            raise ModelError(
                f"the model has {chunks.size:,} bytes and an ONNX file cannot have more than "
                f"{MAX_FILE_SIZE:,}: export it to a file, with external data"
            )
        return chunks

    def _graph(self, location: str | None) -> Chunks:
        chunks = Chunks(self.graph_head)
        for number, messages in (
            (GraphField.NODE, self.nodes),
            (GraphField.INITIALIZER, self.copied),
            (GraphField.SPARSE_INITIALIZER, self.sparse),
            (GraphField.INPUT, self.inputs),
            (GraphField.OUTPUT, self.outputs),
            (GraphField.VALUE_INFO, self.value_infos),
            (GraphField.QUANTIZATION, self.quantization),
        ):
            for message in messages:
                chunks.add_message(number, Chunks([message]))
        offset = 0
        for tensor in self.tensors:
            if location is not None and tensor.is_large():
                offset = _aligned(offset, tensor)
                chunks.add_message(GraphField.INITIALIZER, tensor.outside(location, offset))
                offset += len(tensor.data)
            else:
                chunks.add_message(GraphField.INITIALIZER, tensor.inside())
        return chunks

    def external_data(self) -> Chunks:
        """The file of large tensors."""
        chunks = Chunks()
        for tensor in self.tensors:
            if tensor.is_large():
                chunks.add(bytes(_aligned(chunks.size, tensor) - chunks.size))
                chunks.add(tensor.data)
        return chunks


def _aligned(offset: int, tensor: StoredTensor) -> int:
    unit = _PAGE if len(tensor.data) >= _LARGE else _ALIGNMENT
    return -(-offset // unit) * unit


def _described(code: int, dims: Dims | None) -> str:
    kind = ELEMENT_TYPES[code].name if code in ELEMENT_TYPES else f"of element type {code}"
    shape = "any shape" if dims is None else f"shape ({', '.join(map(str, dims))})"
    return f"{kind} of {shape}"


def value_info(name: str, code: int, dims: Iterable[int | str | None] | None) -> bytes:
    """Write the type of a value that is a tensor."""
    return text_field(1, name) + bytes_field(2, tensor_type(code, dims))


def tensor_type(code: int, dims: Iterable[int | str | None] | None) -> bytes:
    """Write the type of a tensor; without dimensions if they are not known."""
    tensor = number_field(1, code)
    if dims is not None:
        tensor += bytes_field(2, b"".join(bytes_field(1, _dim(dim)) for dim in dims))
    return bytes_field(1, tensor)


def _dim(dim: int | str | None) -> bytes:
    if isinstance(dim, int):
        return number_field(1, dim)
    return text_field(2, dim) if dim else b""


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
    chunks, data = Chunks(), model.data
    for part in reader.fields(data, "model"):
        if part.number == ModelField.GRAPH:
            chunks.add_message(part.number, _graph(reader, part.data, values))
        else:
            chunks.add(data[part.start : part.end])
    return chunks.join()


def with_outputs(model: bytes, outputs: Iterable[ValueType]) -> bytes:
    """Return a model with more of its values as outputs.

    A message that occurs twice is one with the entries of both, by the rules of protobuf.
    """
    added = b"".join(
        bytes_field(GraphField.OUTPUT, value_info(v.name, v.element_type, v.dims)) for v in outputs
    )
    return model + bytes_field(ModelField.GRAPH, added) if added else model


def without_functions(model: bytes, names: Sequence[str], source_name: str) -> bytes:
    """Return a model without the bodies of some of our functions, which kernels stand in for."""
    if not names:
        return model
    reader, replaced = Reader(source_name), frozenset(names)
    chunks, data = Chunks(), memoryview(model)
    for part in reader.fields(data, "model"):
        if part.number == ModelField.FUNCTIONS:
            name, domain = (read_name(reader, part.data, number, "function") for number in (1, 10))
            if domain == FUNCTION_DOMAIN and name in replaced:
                continue
        chunks.add(data[part.start : part.end])
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
