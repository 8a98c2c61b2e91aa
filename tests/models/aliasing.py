"""Proves on a graph that outputs may be written into the memory of inputs, in any order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx

UPDATED, BUFFER, ACCUMULATED = ".updated", "_grad.accumulation.buffer", "_grad.accumulation.out"
# What a runtime may compute without copying: its output is the memory of its input.
VIEWS = {"Dropout", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"}
# What writes an element after it has read that element, and reads no other one for it.
ELEMENTWISE = {"Add", "Cast", "Div", "Identity", "Max", "Min", "Mul", "Neg", "Sub", "Sum", "Where"}
ELEMENTWISE |= {"Reshape"}  # where it copies to an output of the graph
KERNELS = {"AccumulateGradients", "AdamW", "Adam", "SGD", "RMSprop", "Adagrad", "Lion"}


def pairs(graph: onnx.GraphProto) -> Iterator[tuple[str, str]]:
    """The inputs of a graph of artifacts, with the outputs that take their place."""
    inputs = {value.name for value in graph.input}
    for value in graph.output:
        for end, begin in ((UPDATED, ""), (ACCUMULATED, BUFFER)):
            name = value.name.removesuffix(end) + begin
            if value.name.endswith(end) and name in inputs:
                yield name, value.name


def read_by(node: onnx.NodeProto) -> set[str]:
    """The names that a node reads, also in its bodies."""
    names = set(node.input)
    for attribute in node.attribute:
        for body in (attribute.g, *attribute.graphs):
            for inner in body.node:
                names |= read_by(inner)
            names |= {output.name for output in body.output}
    return names - {""}


class Walk:
    """Which nodes of a graph come before which."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.nodes = list(graph.node)
        self.reads = [read_by(node) for node in self.nodes]
        self.producer = {name: i for i, node in enumerate(self.nodes) for name in node.output}
        self.readers: dict[str, list[int]] = {}
        for i, names in enumerate(self.reads):
            for name in names:
                self.readers.setdefault(name, []).append(i)

    def those_before(self, writers: Iterable[int], marked: Iterable[int]) -> dict[int, set[int]]:
        """Tell for each writer which of the marked nodes have run when it runs, or are it."""
        places = {index: place for place, index in enumerate(sorted(set(marked)))}
        bits: list[int] = []
        for index, names in enumerate(self.reads):  # the nodes of a file are in a possible order
            own = 1 << places[index] if index in places else 0
            for name in names:
                source = self.producer.get(name)
                if source is not None:
                    own |= bits[source]
            bits.append(own)
        return {
            writer: {index for index, place in places.items() if bits[writer] >> place & 1}
            for writer in writers
        }

    def names_of_memory(self, name: str) -> set[str]:
        """The name and those of all views of the same memory."""
        found, waiting = {name}, [name]
        while waiting:
            for index in self.readers.get(waiting.pop(), ()):
                node = self.nodes[index]
                if node.op_type in VIEWS and node.output[0] not in found:
                    found.add(node.output[0])
                    waiting.append(node.output[0])
        return found


def unsafe(graph: onnx.GraphProto, wanted: Iterable[tuple[str, str]] | None = None) -> list[str]:
    """What speaks against writing each output over its input; nothing, if it is empty."""
    walk = Walk(graph)
    found = list(pairs(graph) if wanted is None else wanted)
    memory = {name: walk.names_of_memory(name) for name, _ in found}
    readers = {
        name: {index for view in views for index in walk.readers.get(view, ())}
        for name, views in memory.items()
    }
    writers = {updated: walk.producer[updated] for _, updated in found}
    before = walk.those_before(writers.values(), set().union(*readers.values()))
    problems = []
    for name, updated in found:
        writer = writers[updated]
        for index in readers[name] - before[writer]:
            node = walk.nodes[index]
            problems.append(f"{node.op_type} {node.name!r} reads {name} after {updated}")
        node = walk.nodes[writer]
        if writer in readers[name] and not writes_what_it_has_read(node, memory[name], updated):
            problems.append(f"{updated} is written by {node.domain}.{node.op_type}, which reads it")
    return problems


def writes_what_it_has_read(node: onnx.NodeProto, memory: set[str], updated: str) -> bool:
    """Whether a node that reads an element does so before it writes over it."""
    if node.op_type == "Scan" and node.domain == "":
        return scans_in_place(node, memory, updated)
    if node.op_type == "If" and node.domain == "":
        return all(branches_in_place(node, memory, updated))
    if node.domain == "ai.onnxtrain":
        return node.op_type.partition("_")[0] in KERNELS
    return node.op_type in ELEMENTWISE and node.domain == ""


def branches_in_place(node: onnx.NodeProto, memory: set[str], updated: str) -> Iterator[bool]:
    """Tell for each branch of an If whether it writes over what it has read.

    It reads the memory under one name at most.
    """
    place = list(node.output).index(updated)
    for attribute in node.attribute:
        body = attribute.g
        names = {n for inner in body.node for n in read_by(inner)}.intersection(memory)
        yield len(names) <= 1 and not any(
            unsafe(body, [(n, body.output[place].name)]) for n in names
        )


def scans_in_place(node: onnx.NodeProto, memory: set[str], updated: str) -> bool:
    """Whether a Scan takes pieces of the memory in turn and writes each over itself."""
    attributes = {a.name: a for a in node.attribute}
    body = attributes["body"].g
    states = len(node.input) - attributes["num_scan_inputs"].i
    settings = attributes.keys() - {"body", "num_scan_inputs"}
    if any(any(attributes[name].ints) for name in settings):  # another axis or direction
        return False
    at = [i for i, name in enumerate(node.input) if name in memory]
    place = list(node.output).index(updated)
    if len(at) != 1 or at[0] < states or place < states:
        return False
    return not unsafe(body, [(body.input[at[0]].name, body.output[place].name)])
