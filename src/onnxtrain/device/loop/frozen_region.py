"""Where to cut a training graph: the part that depends on samples and constants alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from onnxtrain.device.export.model_parts import (
    ModelParts,
    Node,
    NodeField,
    Operator,
    all_calls,
    find_needed,
    take_apart,
)
from onnxtrain.device.export.prune import layout_of
from onnxtrain.format.model.file import ModelFile
from onnxtrain.format.model.tensor import TensorField
from onnxtrain.format.model.wire import Reader, text_field
from onnxtrain.format.names import BUFFER, RANDOM_SEED, RANGES

_COSTLY = frozenset(
    "Attention Conv ConvTranspose Einsum GRU Gemm LSTM MatMul QLinearConv QLinearMatMul "
    "ConvInteger MatMulInteger RNN".split()
)
_SHAPES = frozenset({"Shape", "Size"})
# What a node computes, apart from names.
_CONTENT = (NodeField.OP_TYPE, NodeField.ATTRIBUTE, NodeField.DOMAIN, NodeField.OVERLOAD)


class FrozenRegion:
    """The nodes of a training graph that depend on samples and constants alone.

    `heavy` has those that a costly operator comes before, or is; of the others only shapes may
    depend on it. `made_by` has the node of each value.
    """

    def __init__(self, model: ModelFile, samples: frozenset[str]) -> None:
        self.parts = parts = take_apart(model)
        self._external = model.external.keys()
        self.samples = samples
        self.made_by = {name: i for i, node in enumerate(parts.nodes) for name in node.outputs}
        known = samples.union(parts.initializers, parts.sparse_initializers)
        of_samples, of_costly = set(samples), set[str]()
        self.inside: set[int] = set()
        self.heavy: set[int] = set()
        for index, node in enumerate(parts.nodes):
            if not node.reads <= known:
                continue
            self.inside.add(index)
            known = known.union(node.outputs)
            names = self._calls(node)
            if names <= _SHAPES or not node.reads & of_samples:
                continue
            of_samples.update(node.outputs)
            if names & _COSTLY or node.reads & of_costly:
                of_costly.update(node.outputs)
                self.heavy.add(index)

    def _calls(self, node: Node) -> set[str]:
        return {call.name for call in all_calls(self.parts, [node])}

    def heavy_values(self) -> list[str]:
        """The values that a cache could hold."""
        return [n for index in sorted(self.heavy) for n in self.parts.nodes[index].outputs]

    def keys(self) -> dict[str, bytes]:
        """Return what tells values by how they are computed, since names differ from file to file.

        Two values of the same key are equal, in one graph or in two.
        """
        parts, reader = self.parts, Reader(self.parts.source_name)
        keys = {name: name.encode() for name in self.samples}
        for name, data in parts.initializers.items():
            keys[name] = _digest(
                bytes(data[part.start : part.end])
                for part in reader.fields(data, "initializer")
                if part.number != TensorField.NAME
            )
        # What comes from the checkpoint does so by its name.
        keys |= {name: b"constant " + name.encode() for name in self._external}
        for index in sorted(self.inside):
            node = parts.nodes[index]
            read = [keys.get(name, b"?" + name.encode()) for name in node.inputs]
            captured = sorted(node.reads - {*node.inputs})
            content = [
                bytes(node.data[part.start : part.end])
                for part in reader.fields(node.data, "node")
                if part.number in _CONTENT
            ]
            bodies = [
                bytes(parts.functions[c][0]) for c in sorted(node.calls & parts.functions.keys())
            ]
            outer = [item for n in captured for item in (n.encode(), keys.get(n, n.encode()))]
            made = _digest([*content, *read, *bodies, *outer])
            keys |= {n: made + b"%d" % place for place, n in enumerate(node.outputs)}
        return keys

    def cut(self, cached: frozenset[str]) -> tuple[list[str], set[int]]:
        """Return which of the values go from one part to the other, and the nodes of the second.

        What the second part needs beside them, it computes again: of values that follow from each
        other without costly operators, only the first is kept.
        """
        wanted, _ = self._walk(cached)
        first, available = set[str](), set[str]()
        for index in sorted(self.heavy):
            node = self.parts.nodes[index]
            heavy = {n for n in node.reads if self.made_by.get(n) in self.heavy}
            if heavy <= available and not self._calls(node) & _COSTLY:
                available.update(node.outputs)
            first.update(wanted.intersection(node.outputs) - available)
            available |= first
        crossing, second = self._walk(frozenset(first))
        return [name for name in self.heavy_values() if name in crossing], second

    def _walk(self, cached: frozenset[str]) -> tuple[set[str], set[int]]:
        """Go back from what trains to cached values; return those met and the nodes on the way."""
        parts = self.parts
        second = set(range(len(parts.nodes))) - self.inside
        waiting = list(parts.outputs.keys() | {n for i in second for n in parts.nodes[i].reads})
        seen = set(waiting)
        met = set()
        while waiting:
            name = waiting.pop()
            index = self.made_by.get(name)
            if index is None or index not in self.inside:
                continue
            if name in cached and name not in parts.outputs:
                met.add(name)
                continue
            second.add(index)
            fresh = parts.nodes[index].reads - seen
            seen |= fresh
            waiting += fresh
        return met, second

    def gains(self, second: set[int]) -> bool:
        """Whether a costly operator is in the first part."""
        first = (self.parts.nodes[index] for index in self.heavy - second)
        return any(self._calls(node) & _COSTLY for node in first)

    def why_nothing(self, trained: frozenset[str]) -> str:
        """Say what keeps frozen layers from being computed once."""
        parts = self.parts
        if self.heavy:
            return (
                "the frozen layers compute with all samples of a batch together, as "
                "BatchNormalization with batch statistics does (prepare with bn='frozen')"
            )
        causes = dict.fromkeys(trained, "")
        causes |= {name: "" for name in parts.inputs if name.endswith(BUFFER)}
        others = parts.inputs.keys() - causes.keys() - self.samples - {RANDOM_SEED}
        causes |= dict.fromkeys(
            others, "a BatchNormalization in the frozen layers changes its running statistics"
        )
        causes[RANGES] = (
            "the ranges of integers in the frozen layers follow training (prepare with "
            "quantize='int8:scales=fixed')"
        )
        causes[RANDOM_SEED] = "a Dropout in the frozen layers draws new numbers in each step"
        for node in parts.nodes:
            found = {causes[name] for name in node.reads if name in causes}
            if found:
                cause = "" if "" in found else found.pop()
                causes.update(dict.fromkeys(node.outputs, cause))
                if cause and self._calls(node) & _COSTLY:
                    return cause
        return "no frozen Conv, MatMul or recurrent layer comes before what trains"

    def first_part(self, values: Sequence[str]) -> bytes:
        """Return the model that computes some values from samples."""
        own = {n: data for n, data in self.parts.inputs.items() if n in self.samples}
        # Without a type where the file has none: onnxruntime finds it out.
        untyped = {n: memoryview(text_field(1, n)) for n in values}
        outputs = {n: self.parts.value_infos.get(n, untyped[n]) for n in values}
        return _part(replace(self.parts, inputs=own), outputs)

    def second_part(
        self,
        nodes: set[int],
        features: Mapping[str, memoryview],
        values: Mapping[str, str],
        dropped: frozenset[str],
    ) -> bytes:
        """Return the model that trains, with features for some values and without some samples."""
        parts = self.parts
        batch_of = dict.fromkeys(dropped, next(iter(features)))
        given = [_identity(feature, value) for feature, value in values.items()]
        kept = [_with_batch_of(parts.nodes[i], batch_of, parts.source_name) for i in sorted(nodes)]
        others = {name: data for name, data in parts.inputs.items() if name not in dropped}
        made = replace(parts, nodes=[*given, *kept], inputs={**features, **others})
        return _part(made, parts.outputs)

    def reads(self, nodes: set[int]) -> frozenset[str]:
        """Which samples some nodes read, other than to know how many there are."""
        batch_of = dict.fromkeys(self.samples, "")
        found = (
            _with_batch_of(self.parts.nodes[i], batch_of, self.parts.source_name) for i in nodes
        )
        used = frozenset().union(*(node.reads for node in found))
        return self.samples & (used | self.parts.outputs.keys())


def _identity(read: str, made: str) -> Node:
    data = text_field(NodeField.INPUT, read) + text_field(NodeField.OUTPUT, made)
    data += text_field(NodeField.OP_TYPE, "Identity")
    calls = frozenset({Operator("", "Identity")})
    return Node(memoryview(data), (read,), frozenset({read}), (made,), calls)


def _digest(pieces: Iterable[bytes]) -> bytes:
    made = hashlib.sha256()
    for piece in pieces:
        made.update(len(piece).to_bytes(8, "little") + piece)
    return made.digest()


def _part(parts: ModelParts, outputs: Mapping[str, memoryview]) -> bytes:
    """Return the model of some outputs; it keeps all inputs."""
    needed = find_needed(parts, list(outputs))
    constants = list(needed.of(parts.initializers).values())
    return layout_of(parts, needed, list(parts.inputs.values()), outputs, constants).file().join()


def _with_batch_of(node: Node, batch_of: Mapping[str, str], source: str) -> Node:
    """Let a node that only asks for the size of the batch ask another value."""
    asked = [name for name in node.reads if name in batch_of]
    reader = Reader(source)
    if not asked or {c.name for c in node.calls} != {"Shape"} or not _is_batch(reader, node):
        return node
    pieces = [
        text_field(NodeField.INPUT, batch_of[asked[0]])
        if part.number == NodeField.INPUT
        else bytes(node.data[part.start : part.end])
        for part in reader.fields(node.data, "node")
    ]
    return replace(node, data=memoryview(b"".join(pieces)), reads=frozenset({batch_of[asked[0]]}))


def _is_batch(reader: Reader, shape: Node) -> bool:
    """Whether a Shape node returns the first dimension alone."""
    bounds = {"start": 0, "end": -1}
    for part in reader.fields(shape.data, "node"):
        if part.number == NodeField.ATTRIBUTE:
            name, number = "", 0
            for field in reader.fields(reader.message(part, "attribute"), "attribute"):
                if field.number == 1:
                    name = reader.text(field, "attribute.name")
                elif field.number == 3:
                    number = reader.int64(field, "attribute.i")
            bounds[name] = number
    return bounds == {"start": 0, "end": 1}
