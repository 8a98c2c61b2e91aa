"""What the device needs to know of a graph file: interface, metadata, external tensors.

The file is read once, and parsed at the level of the graph; nodes and weights are skipped. Only
`export` parses more.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from onnxtrain.errors import ModelError
from onnxtrain.format.metadata import METADATA_KEY, GraphMetadata
from onnxtrain.format.model.source import ModelBytes
from onnxtrain.format.model.tensor import ExternalTensor as ExternalTensor
from onnxtrain.format.model.tensor import read_entry, read_initializer
from onnxtrain.format.model.wire import MAX_PARSED, MAX_RANK, Field, Reader

_ORT_IDENTIFIER = b"ORTM"


class ModelField:
    """Numbers of the fields of ONNX's ModelProto."""

    IR_VERSION, PRODUCER_NAME, GRAPH, OPSET_IMPORT, METADATA, FUNCTIONS = 1, 2, 7, 8, 14, 25


class GraphField:
    """Numbers of the fields of ONNX's GraphProto."""

    NODE, NAME, INITIALIZER, INPUT, OUTPUT, VALUE_INFO = 1, 2, 5, 11, 12, 13
    QUANTIZATION, SPARSE_INITIALIZER = 14, 15


# What is read here.
_PARTS_OF_MODEL = (
    ModelField.GRAPH, ModelField.IR_VERSION, ModelField.OPSET_IMPORT, ModelField.METADATA,
)  # fmt: skip
_PARTS_OF_GRAPH = (
    GraphField.NODE, GraphField.INITIALIZER, GraphField.INPUT, GraphField.OUTPUT,
)  # fmt: skip


@dataclass(frozen=True)
class ValueType:
    """The type of an input or output.

    `element_type` is ONNX's number, 0 if it is not a tensor. A dimension is a number, the name of
    a symbolic one, or None; `dims` is None for an unknown shape.
    """

    name: str
    element_type: int
    dims: tuple[int | str | None, ...] | None


@dataclass(eq=False)
class ModelFile:
    """A graph file, or its bytes. `read` makes one.

    A file in the ORT format has `is_ort` set, default metadata, and empty lists: its interface is
    known to the session that onnxruntime makes of it.
    """

    source_name: str
    content: ModelBytes
    path: Path | None = None
    is_ort: bool = False
    ir_version: int = 0
    metadata: GraphMetadata = field(default_factory=GraphMetadata)
    inputs: tuple[ValueType, ...] = ()
    outputs: tuple[ValueType, ...] = ()
    external: dict[str, ExternalTensor] = field(default_factory=dict)
    initializer_names: tuple[str, ...] = ()
    node_count: int = 0
    opsets: dict[str, int] = field(default_factory=dict)
    properties: dict[str, str] = field(default_factory=dict)  # of the model, beside `metadata`
    base: Path | None = None  # the file of the base, if the graph takes tensors from one

    @property
    def in_base(self) -> frozenset[str]:
        """The initializers that are in the file of the base, and not in the checkpoint."""
        name = self.metadata.base or (self.base.name if self.base else "")
        return frozenset(n for n, t in self.external.items() if name and t.location == name)

    def output_dims(self, name: str) -> tuple[int | str | None, ...] | None:
        """Return the declared shape of an output, if there is one."""
        return next((value.dims for value in self.outputs if value.name == name), None)

    @classmethod
    def read(cls, source: str | os.PathLike[str] | bytes | bytearray | memoryview) -> ModelFile:
        """Read a model from a path, or from memory."""
        path = None
        if isinstance(source, bytes | bytearray | memoryview):
            name, view = "model in memory", memoryview(source)
            # The bytes must not change while the model is in use.
            is_fixed = view.readonly and view.contiguous
            content = ModelBytes(view.cast("B") if is_fixed else memoryview(bytes(view)))
        elif isinstance(source, str | os.PathLike):
            path = Path(os.fsdecode(source))
            name, content = str(path), ModelBytes(path)
        else:
            raise ModelError(
                f"a model is a path or the bytes of a file, not {type(source).__name__}"
            )
        data = content.data()
        if _has_ort_identifier(data):
            return cls(name, content, path, is_ort=True)
        return _read_model(cls(name, content, path), data)

    @property
    def data(self) -> memoryview:
        """The bytes of the file, which must not be kept: they may be many."""
        return self.content.data()


def graph_of(model: ModelFile, reader: Reader) -> memoryview:
    """Return the bytes of the main graph."""
    parts = reader.pick(model.data, "model", ModelField.GRAPH)[ModelField.GRAPH]
    return _one_graph(reader, reader.messages(parts, "model"))


def _one_graph(reader: Reader, found: list[memoryview]) -> memoryview:
    if len(found) != 1:
        count = "several" if found else "no"
        reader.fail(f"there are {count} graphs instead of one: it is no ONNX model", "model")
    return found[0]


# ---- bytes ---------------------------------------------------------------------------------------


def _has_ort_identifier(data: memoryview) -> bool:
    """Whether the file is FlatBuffers with the identifier of the ORT format.

    A producer's name in an ONNX file may hold the same four letters; there the first four bytes
    are not an offset into the file.
    """
    if len(data) < 8 or bytes(data[4:8]) != _ORT_IDENTIFIER:
        return False
    return 8 <= int.from_bytes(data[:4], "little") <= len(data) - 4


# ---- messages ------------------------------------------------------------------------------------


def _read_model(model: ModelFile, data: memoryview) -> ModelFile:
    reader = Reader(model.source_name)
    if len(data) == 0:
        reader.fail("the file is empty", "model")
    graphs: list[memoryview] = []
    for part in reader.counted(data, "model", _PARTS_OF_MODEL):
        if part.number == ModelField.GRAPH:
            graphs = [*graphs[:1], reader.message(part, "model")]
        elif part.number == ModelField.IR_VERSION:
            model.ir_version = reader.int64(part, "model")
        elif part.number == ModelField.OPSET_IMPORT:
            domain, version = read_opset(reader, reader.message(part, "opset_import"))
            model.opsets[domain] = version
        elif part.number == ModelField.METADATA:
            key, value = read_entry(reader, reader.message(part, "metadata_props"))
            model.properties[key] = value
    graph = _one_graph(reader, graphs)
    metadata = model.properties.pop(METADATA_KEY, None)
    if metadata is not None:
        model.metadata = read_metadata(reader, metadata)
    if model.path is not None and model.metadata.base:
        model.base = model.path.parent / model.metadata.base
    _read_graph(model, reader, graph)
    return model


def _read_graph(model: ModelFile, reader: Reader, graph: memoryview) -> None:
    initializers: list[tuple[str, ExternalTensor | None]] = []
    values: dict[int, list[ValueType]] = {GraphField.INPUT: [], GraphField.OUTPUT: []}
    parsed = 0
    for part in reader.fields(graph, "graph", _PARTS_OF_GRAPH):
        if part.number == GraphField.NODE:
            reader.message(part, "graph.node")
            model.node_count += 1
            continue
        parsed += 1
        if parsed > MAX_PARSED:
            reader.fail("it has more inputs and initializers than any real model has", "graph")
        if part.number == GraphField.INITIALIZER:
            message = reader.message(part, "graph.initializer")
            initializers.append(read_initializer(reader, message))
            if not initializers[-1][0]:
                reader.fail("it has no name", "graph.initializer")
        elif part.number in values:
            what = "input" if part.number == GraphField.INPUT else "output"
            message = reader.message(part, f"graph.{what}")
            values[part.number].append(read_value_type(reader, message, what))
    model.inputs, model.outputs = map(tuple, values.values())
    model.initializer_names = tuple(name for name, _ in initializers)
    model.external = {name: external for name, external in initializers if external is not None}
    for what, names in (
        ("input", [value.name for value in model.inputs]),
        ("output", [value.name for value in model.outputs]),
        ("initializer", model.initializer_names),
    ):
        twice = [name for name, count in Counter(names).items() if count > 1]
        if not all(names):
            reader.fail("it has no name", f"graph.{what}")
        if twice:
            reader.fail(f"the name {twice[0]!r} occurs twice", f"graph.{what}")


def read_metadata(reader: Reader, text: str) -> GraphMetadata:
    """Read the metadata of an untrusted graph file."""
    try:
        return GraphMetadata.from_json(text)
    except ValueError as error:
        reader.fail(str(error), "metadata_props")


def read_opset(reader: Reader, message: memoryview) -> tuple[str, int]:
    """Read an opset import; the domain `ai.onnx` is ""."""
    parts = reader.pick(message, "opset_import", 1, 2)
    domain = reader.last_text(parts[1], "opset_import.domain")
    version = reader.last_int64(parts[2], "opset_import.version")
    return "" if domain == "ai.onnx" else domain, version


# ---- types ---------------------------------------------------------------------------------------


def read_name(reader: Reader, message: memoryview, number: int, where: str) -> str:
    """Read the name of a message; "" if there is none."""
    return reader.last_text(reader.pick(message, where, number)[number], f"{where}.name")


def _only(reader: Reader, message: memoryview, number: int, where: str) -> memoryview | None:
    """Return the message in a field, or None. Two are an error; protobuf would merge them."""
    return _single(reader, reader.pick(message, where, number)[number], where)


def _single(reader: Reader, found: list[Field], where: str) -> memoryview | None:
    if len(found) > 1:
        reader.fail(f"field {found[1].number} is there twice", where, found[1].start)
    return reader.message(found[0], where) if found else None


def read_value_type(reader: Reader, message: memoryview, where: str) -> ValueType:
    """Read a ValueInfoProto. A graph has many values of a few types: each is read once."""
    found = reader.pick(message, where, 1, 2)
    name = reader.last_text(found[1], f"{where}.name")
    where = f"{where} {name!r}"
    declared = _single(reader, found[2], where)
    if declared is None:
        return ValueType(name, 0, None)
    known = bytes(declared)
    if known not in reader.types:
        reader.types[known] = _read_type(reader, declared, where)
    return ValueType(name, *reader.types[known])


def _read_type(
    reader: Reader, declared: memoryview, where: str
) -> tuple[int, tuple[int | str | None, ...] | None]:
    """Read a TypeProto: the element type, and the dimensions."""
    tensor = _only(reader, declared, 1, where)
    if tensor is None:
        return 0, None
    element_type = reader.last_int64(reader.pick(tensor, where, 1)[1], where)
    shape = _only(reader, tensor, 2, where)
    if shape is None:
        return element_type, None
    dims = reader.messages(reader.pick(shape, where, 1)[1], where)
    if len(dims) > MAX_RANK:
        reader.fail(f"there are more than {MAX_RANK} dimensions", where)
    return element_type, tuple(_dim(reader, dim, where) for dim in dims)


def has_type(reader: Reader, message: memoryview) -> bool:
    """Whether a ValueInfoProto has a type; the shape may be missing."""
    declared = _only(reader, message, 2, "value")
    if not declared:
        return False
    is_tensor = _only(reader, declared, 1, "value") is not None
    return not is_tensor or read_value_type(reader, message, "value").element_type != 0


def has_shape(reader: Reader, message: bytes | memoryview) -> bool:
    """Whether a ValueInfoProto has a shape, or a type that is not a tensor."""
    view = memoryview(message)
    declared = _only(reader, view, 2, "value")
    if declared is None or _only(reader, declared, 1, "value") is None:
        return declared is not None
    return read_value_type(reader, view, "value").dims is not None


def _dim(reader: Reader, message: memoryview, where: str) -> int | str | None:
    dim: int | str | None = None
    for part in reader.fields(message, where):
        if part.number == 1:
            # Exporters write a negative number for an unknown size.
            size = reader.int64(part, where)
            dim = None if size < 0 else size
        elif part.number == 2:
            dim = reader.text(part, where) or None
    return dim
