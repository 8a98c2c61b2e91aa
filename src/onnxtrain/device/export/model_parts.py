"""A model taken apart into pieces that stay as they are, and what of it a set of outputs needs.

Nodes, types and weights remain the bytes of the file. Of a node only the names are read: what it
computes, from what, and by which operator. The bodies of If, Loop and Scan are looked through for
values of the graph around them.
"""

from __future__ import annotations

import graphlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from onnxtrain.device.export.layout import StoredTensor
from onnxtrain.errors import ModelError
from onnxtrain.format.metadata import METADATA_KEY
from onnxtrain.format.model.file import (
    GraphField,
    ModelField,
    ModelFile,
    graph_of,
    read_name,
    read_opset,
)
from onnxtrain.format.model.tensor import EXTERNAL, TensorField, read_entry
from onnxtrain.format.model.wire import Reader

# Protobuf itself reads no deeper nesting: a body within a node is three messages down.
MAX_DEPTH = 32
_TRAINING_INFO = 20


class NodeField:
    """Numbers of the fields of ONNX's NodeProto."""

    INPUT, OUTPUT, OP_TYPE, ATTRIBUTE, DOMAIN, OVERLOAD = 1, 2, 4, 5, 7, 8


class AttributeField:
    """Numbers of the fields of ONNX's AttributeProto."""

    TENSOR, GRAPH, TENSORS, GRAPHS = 5, 6, 10, 11


class FunctionField:
    """Numbers of the fields of ONNX's FunctionProto."""

    NAME, NODE, DOMAIN, OVERLOAD = 1, 7, 10, 13


class Operator(NamedTuple):
    """What a node calls: an operator, or a function of the model."""

    domain: str
    name: str
    overload: str = ""


@dataclass(frozen=True)
class Node:
    """A node. `reads` has what its bodies take from outside too, `calls` what they call."""

    data: memoryview
    inputs: tuple[str, ...]  # empty where an optional one is not there
    reads: frozenset[str]
    outputs: tuple[str, ...]
    calls: frozenset[Operator]


@dataclass
class ModelParts:
    """A model in pieces. Pieces in mappings go by the name of the value that they are about."""

    source_name: str
    head: list[memoryview] = field(default_factory=list)  # whole fields of the model
    properties: dict[str, str] = field(default_factory=dict)  # the metadata of the model
    opsets: list[tuple[str, memoryview]] = field(default_factory=list)
    functions: dict[Operator, tuple[memoryview, frozenset[Operator]]] = field(default_factory=dict)
    graph_head: list[memoryview] = field(default_factory=list)  # whole fields of the graph
    nodes: list[Node] = field(default_factory=list)
    inputs: dict[str, memoryview] = field(default_factory=dict)
    outputs: dict[str, memoryview] = field(default_factory=dict)
    value_infos: dict[str, memoryview] = field(default_factory=dict)
    initializers: dict[str, memoryview] = field(default_factory=dict)
    sparse_initializers: dict[str, memoryview] = field(default_factory=dict)
    quantization: dict[str, memoryview] = field(default_factory=dict)
    computed: dict[str, StoredTensor] = field(default_factory=dict)  # once, before export

    def value_names(self) -> set[str]:
        """Return the names of all values of the main graph."""
        made = {name for node in self.nodes for name in node.outputs}
        return made.union(self.inputs, self.initializers, self.sparse_initializers, self.computed)


@dataclass(frozen=True)
class Needed:
    """What some outputs are computed from."""

    nodes: list[Node]
    values: set[str]
    domains: set[str]
    functions: list[memoryview]

    def of(self, pieces: Mapping[str, memoryview]) -> dict[str, memoryview]:
        """Return the pieces about values that are needed."""
        return {name: data for name, data in pieces.items() if name in self.values}


def take_apart(model: ModelFile) -> ModelParts:
    """Read the pieces of a model."""
    reader = Reader(model.source_name)
    parts = ModelParts(model.source_name)
    data = model.data
    for part in reader.fields(data, "model"):
        if part.number == ModelField.OPSET_IMPORT:
            message = reader.message(part, "opset_import")
            parts.opsets.append((read_opset(reader, message)[0], message))
        elif part.number == ModelField.FUNCTIONS:
            _read_function(reader, reader.message(part, "function"), parts)
        elif part.number == ModelField.METADATA:
            key, value = read_entry(reader, reader.message(part, "metadata_props"))
            if key != METADATA_KEY:  # which is about the files that a device trains from
                parts.properties[key] = value
        elif part.number not in (ModelField.GRAPH, _TRAINING_INFO):
            parts.head.append(data[part.start : part.end])
    _read_graph(reader, graph_of(model, reader), parts, 0)
    return parts


def find_needed(parts: ModelParts, outputs: Sequence[str]) -> Needed:
    """Find what the outputs are computed from; nodes keep their order."""
    producers = _producers(parts)
    values, waiting = set(outputs), list(outputs)
    kept: set[int] = set()
    while waiting:
        index = producers.get(waiting.pop())
        if index is None or index in kept:
            continue
        kept.add(index)
        fresh = parts.nodes[index].reads - values
        values |= fresh
        waiting += fresh
    nodes = [parts.nodes[index] for index in _in_order(parts, kept, producers)]
    calls = all_calls(parts, nodes)
    return Needed(
        nodes,
        values.union(*(node.outputs for node in nodes)),
        {call.domain for call in calls} | {""},
        [data for operator, (data, _) in parts.functions.items() if operator in calls],
    )


def _in_order(parts: ModelParts, kept: set[int], producers: Mapping[str, int]) -> list[int]:
    """Put each node behind those that it reads from, which onnxruntime does not insist on."""
    before = {
        index: {producers[name] for name in parts.nodes[index].reads if name in producers}
        for index in sorted(kept)
    }
    if all(index > max(others, default=-1) for index, others in before.items()):
        return list(before)
    try:
        return list(graphlib.TopologicalSorter(before).static_order())
    except graphlib.CycleError:
        raise ModelError(f"{parts.source_name}: the graph has a cycle") from None


def _producers(parts: ModelParts) -> dict[str, int]:
    producers: dict[str, int] = {}
    for index, node in enumerate(parts.nodes):
        for name in node.outputs:
            if name in producers or name in parts.inputs or name in parts.initializers:
                raise ModelError(f"{parts.source_name}: {name!r} is made in two places")
            producers[name] = index
    return producers


def all_calls(parts: ModelParts, nodes: list[Node]) -> set[Operator]:
    """What nodes call, and what the functions among that call in turn."""
    calls: set[Operator] = set()
    waiting = {call for node in nodes for call in node.calls}
    while waiting:
        call = waiting.pop()
        calls.add(call)
        if call in parts.functions:
            waiting |= parts.functions[call][1] - calls
    return calls


def _read_graph(reader: Reader, graph: memoryview, parts: ModelParts, depth: int) -> None:
    # What a piece is called, where its name is, and where it goes.
    lists = {
        GraphField.INITIALIZER: ("initializer", TensorField.NAME, parts.initializers),
        GraphField.INPUT: ("input", 1, parts.inputs),
        GraphField.OUTPUT: ("output", 1, parts.outputs),
        GraphField.VALUE_INFO: ("value_info", 1, parts.value_infos),
        GraphField.QUANTIZATION: ("quantization_annotation", 1, parts.quantization),
    }
    for part in reader.fields(graph, "graph"):
        if part.number == GraphField.NODE:
            parts.nodes.append(_read_node(reader, reader.message(part, "node"), depth))
        elif part.number == GraphField.SPARSE_INITIALIZER:
            message = reader.message(part, "sparse_initializer")
            parts.sparse_initializers[_sparse_name(reader, message)] = message
        elif part.number in lists:
            where, name_field, pieces = lists[part.number]
            message = reader.message(part, where)
            pieces[read_name(reader, message, name_field, where)] = message
        else:
            parts.graph_head.append(graph[part.start : part.end])


def _sparse_name(reader: Reader, message: memoryview) -> str:
    for part in reader.fields(message, "sparse_initializer"):
        if part.number == 1:
            values = reader.message(part, "sparse_initializer.values")
            return read_name(reader, values, TensorField.NAME, "sparse_initializer")
    return reader.fail("it has no values", "sparse_initializer")


def _read_node(reader: Reader, message: memoryview, depth: int) -> Node:
    reads: set[str] = set()
    inputs: list[str] = []
    outputs: list[str] = []
    calls: set[Operator] = set()
    texts = {NodeField.DOMAIN: "", NodeField.OP_TYPE: "", NodeField.OVERLOAD: ""}
    for part in reader.fields(message, "node"):
        if part.number == NodeField.INPUT:
            inputs.append(reader.text(part, "node.input"))
        elif part.number == NodeField.OUTPUT:
            outputs.append(reader.text(part, "node.output"))
        elif part.number in texts:
            texts[part.number] = reader.text(part, "node")
        elif part.number == NodeField.ATTRIBUTE:
            _read_attribute(reader, reader.message(part, "node.attribute"), depth, reads, calls)
    calls.add(_operator(*texts.values()))
    # An empty name stands for an optional input or output that is not there.
    return Node(
        message,
        tuple(inputs),
        frozenset({*inputs, *reads} - {""}),
        tuple(name for name in outputs if name),
        frozenset(calls),
    )


def _operator(domain: str, name: str, overload: str) -> Operator:
    return Operator("" if domain == "ai.onnx" else domain, name, overload)


def _read_attribute(
    reader: Reader, message: memoryview, depth: int, reads: set[str], calls: set[Operator]
) -> None:
    for part in reader.fields(message, "attribute"):
        if part.number in (AttributeField.GRAPH, AttributeField.GRAPHS):
            body = reader.message(part, "attribute.graph")
            outer, inner_calls = _read_body(reader, body, depth + 1)
            reads |= outer
            calls |= inner_calls
        elif part.number in (AttributeField.TENSOR, AttributeField.TENSORS):
            _require_inside(reader, reader.message(part, "attribute.tensor"), "attribute.tensor")


def _read_body(
    reader: Reader, graph: memoryview, depth: int
) -> tuple[set[str], frozenset[Operator]]:
    """What a body takes from the graphs around it, and what it calls."""
    if depth > MAX_DEPTH:
        reader.fail(f"bodies of nodes are nested more than {MAX_DEPTH} deep", "node")
    body = ModelParts(reader.source)
    _read_graph(reader, graph, body, depth)
    for tensor in body.initializers.values():
        _require_inside(reader, tensor, "body.initializer")
    reads = set(body.outputs).union(*(node.reads for node in body.nodes))
    return reads - body.value_names(), frozenset().union(*(node.calls for node in body.nodes))


def _require_inside(reader: Reader, tensor: memoryview, where: str) -> None:
    """Refuse external data where pieces are copied as they are: the reference would dangle."""
    for part in reader.fields(tensor, where):
        if part.number == TensorField.DATA_LOCATION and part.value == EXTERNAL:
            reader.fail("the tensor is in another file; only initializers may be", where)


def _read_function(reader: Reader, message: memoryview, parts: ModelParts) -> None:
    texts = {FunctionField.DOMAIN: "", FunctionField.NAME: "", FunctionField.OVERLOAD: ""}
    calls: set[Operator] = set()
    for part in reader.fields(message, "function"):
        if part.number in texts:
            texts[part.number] = reader.text(part, "function")
        elif part.number == FunctionField.NODE:
            calls |= _read_node(reader, reader.message(part, "function.node"), 0).calls
    parts.functions[_operator(*texts.values())] = (message, frozenset(calls))
