"""Subgraphs (the bodies of If, Loop and Scan), and the edges between nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import onnx_ir as ir


def subgraphs_of(node: ir.Node) -> list[ir.Graph]:
    """Return the subgraphs that a node holds directly."""
    found: list[ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            found.append(attribute.value)
        elif attribute.type == ir.AttributeType.GRAPHS:
            found.extend(attribute.value)
    return found


def captured_values(node: ir.Node) -> Iterator[ir.Value]:
    """Yield the values of outer graphs that the subgraphs of a node use, each once."""
    graphs = subgraphs_of(node)
    if not graphs:
        return
    inner: dict[ir.Graph, None] = dict.fromkeys(graphs)
    for graph in graphs:
        inner.update(dict.fromkeys(graph.subgraphs()))
    seen: set[ir.Value] = set()
    for graph in inner:
        used = [v for n in graph for v in n.inputs if v is not None]
        for value in (*used, *graph.outputs):
            if value.graph not in inner and value not in seen:
                seen.add(value)
                yield value


def sources(node: ir.Node) -> Iterator[ir.Node]:
    """Yield the nodes that compute what a node, or a subgraph of it, reads."""
    for value in (*node.inputs, *captured_values(node)):
        producer = None if value is None else value.producer()
        if producer is not None:
            yield producer


def ancestors(nodes: Iterable[ir.Node]) -> set[ir.Node]:
    """Return the nodes and all that they depend on."""
    waiting = list(nodes)
    found = set(waiting)
    while waiting:
        for source in sources(waiting.pop()):
            if source not in found:
                found.add(source)
                waiting.append(source)
    return found


def values_of(graph: ir.Graph) -> Iterator[ir.Value]:
    """Yield the values that a graph defines, its subgraphs not included."""
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def take_out(graph: ir.Graph) -> tuple[list[ir.Value], list[ir.Node]]:
    """Empty a graph; return its outputs and its nodes, which can then be added to another one."""
    outputs, nodes = list(graph.outputs), list(graph)
    graph.outputs.clear()
    graph.remove(nodes)
    return outputs, nodes


def replace_node(node: ir.Node, made: Sequence[ir.Value], last: ir.Node) -> None:
    """Put the nodes that were written after `last`, at the end of the graph, in a node's place.

    The values that they made take over the names, types and shapes of the outputs of the node.
    """
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    for old, new in zip(node.outputs, made, strict=False):
        name = old.name
        new.type, new.shape = old.type, old.shape
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        old.name, new.name = f"{name}_before", name
    written = []
    while graph[-1] is not last:
        written.append(graph[-1])
        graph.remove(graph[-1])
    node.prepend(reversed(written))
    graph.remove(node, safe=True)


def release(node: ir.Node) -> None:
    """Disconnect a node, and the nodes in its subgraphs, from the values that they read."""
    for index in range(len(node.inputs)):
        node.replace_input_with(index, None)
    for body in subgraphs_of(node):
        for inner in body:
            release(inner)


def maker_read_once(value: ir.Value, op_type: str) -> ir.Node | None:
    """Return the node of a kind that makes a value, if one place alone reads the value."""
    node = value.producer()
    if node is None or (node.domain, node.op_type) != ("", op_type):
        return None
    return node if len(value.uses()) == 1 and not value.is_graph_output() else None
