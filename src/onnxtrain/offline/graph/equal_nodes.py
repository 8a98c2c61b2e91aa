"""Nodes that compute the same from the same values: one of them is enough.

An operator that is written out in each layer of a network brings the same arithmetic with shapes
and positions each time. onnxruntime would find that out too, after it has read all of it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable

import onnx_ir as ir

from onnxtrain.offline.graph.op_facts import RANDOM

_PLAIN = frozenset(
    {
        ir.AttributeType.INT,
        ir.AttributeType.INTS,
        ir.AttributeType.FLOAT,
        ir.AttributeType.FLOATS,
        ir.AttributeType.STRING,
    }
)


def merge_equal_nodes(graph: ir.Graph, candidates: Collection[ir.Node]) -> None:
    """Let the first of equal nodes stand for all, in place; the names of the others are lost."""
    first: dict[Hashable, ir.Node] = {}
    for node in [n for n in graph if n in candidates]:
        key = _key(node)
        if key is None or any(v.is_graph_output() for v in node.outputs):
            continue
        kept = first.setdefault(key, node)
        if kept is not node:
            ir.convenience.replace_all_uses_with(node.outputs, kept.outputs)
            graph.remove(node, safe=True)


def _key(node: ir.Node) -> Hashable:
    """Return what equal nodes have in common; None for a node that is never equal to another."""
    attributes = node.attributes.values()
    if node.op_type in RANDOM or any(a.type not in _PLAIN for a in attributes):
        return None
    given = ((a.name, a.type, _hashable(a.value)) for a in attributes)
    return node.domain, node.op_type, len(node.outputs), tuple(node.inputs), frozenset(given)


def _hashable(value: object) -> Hashable:
    return tuple(value) if isinstance(value, list | tuple) else value
