"""Proves on a graph that outputs may be written into the memory of inputs, in any order."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

UPDATED, BUFFER, ACCUMULATED = ".updated", "_grad.accumulation.buffer", "_grad.accumulation.out"
# What a runtime may compute without copying: its output is the memory of its input.
VIEWS = {"Dropout", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"}
# What writes an element after it has read that element, and reads no other one for it.
ELEMENTWISE = {"Add", "Cast", "Div", "Identity", "Max", "Min", "Mul", "Neg", "Sub", "Sum", "Where"}


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

    def up_to(self, index: int) -> set[int]:
        """The node and all that has run when it runs."""
        found, waiting = {index}, [index]
        while waiting:
            for name in self.reads[waiting.pop()]:
                source = self.producer.get(name)
                if source is not None and source not in found:
                    found.add(source)
                    waiting.append(source)
        return found

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


def unsafe(model: onnx.ModelProto) -> list[str]:
    """What speaks against writing each output over its input; nothing, if it is empty."""
    walk = Walk(model.graph)
    problems = []
    for name, updated in pairs(model.graph):
        writer = walk.producer.get(updated)
        if writer is None:
            problems.append(f"{updated} is not computed")
            continue
        before = walk.up_to(writer)
        memory = walk.names_of_memory(name)
        for view in memory:
            for index in walk.readers.get(view, ()):
                if index not in before:
                    node = walk.nodes[index]
                    problems.append(f"{node.op_type} {node.name!r} reads {name} after {updated}")
        node = walk.nodes[writer]
        if memory & walk.reads[writer] and (node.op_type not in ELEMENTWISE or node.domain):
            problems.append(f"{updated} is written by {node.domain}.{node.op_type}, which reads it")
    return problems
