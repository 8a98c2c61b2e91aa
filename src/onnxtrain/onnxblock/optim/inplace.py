"""Whether an output may be written into the memory of an input."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

_VIEWS = frozenset("Flatten Identity Reshape Squeeze Unsqueeze".split())  # share memory


def late_readers(value: ir.Value, updated: ir.Value) -> list[ir.Node]:
    """Return the nodes that may read a value when `updated` has been written over it.

    Those are all its readers, also through views of it, that neither write `updated` nor come
    before the node that does. Where there are none, `updated` may be bound to the memory of `value`
    in whatever order a runtime executes the graph.
    """
    writer = updated.producer()
    assert writer is not None
    before = _ancestors(writer)
    # A body reads while the node that owns it runs.
    owners = {inner: node for node in writer.graph or () for inner in _inside(node)}
    readers = (owners.get(node, node) for node in _readers(value))
    return [node for node in readers if node not in before]


def _readers(value: ir.Value) -> Iterator[ir.Node]:
    for node, _ in value.uses():
        yield node
        if node.op_type in _VIEWS and node.domain == "":
            yield from _readers(node.outputs[0])


def _inside(node: ir.Node) -> Iterator[ir.Node]:
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield from attribute.value.all_nodes()


def _ancestors(node: ir.Node) -> set[ir.Node]:
    found = {node}
    waiting = [node]
    while waiting:
        for source in _sources(waiting.pop()):
            if source not in found:
                found.add(source)
                waiting.append(source)
    return found


def _sources(node: ir.Node) -> Iterator[ir.Node]:
    for value in (*node.inputs, *(v for inner in _inside(node) for v in inner.inputs)):
        producer = None if value is None else value.producer()
        if producer is not None:
            yield producer
