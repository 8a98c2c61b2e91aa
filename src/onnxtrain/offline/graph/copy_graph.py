"""Copies of the nodes of a graph, for a gradient that computes them again."""

from __future__ import annotations

from collections.abc import MutableMapping

import onnx_ir as ir

from onnxtrain.offline.graph.names import Names


def copy_graph(
    source: ir.Graph, target: ir.Graph, copies: MutableMapping[ir.Value, ir.Value], names: Names
) -> None:
    """Append copies of the nodes and initializers of a graph to another, under new names.

    `copies` is extended by what became of each value. Values from outside stay the same, and so do
    initializers that `copies` has already.
    """
    for value in [v for v in source.initializers.values() if v not in copies]:
        tensor = value.const_value
        assert tensor is not None
        copies[value] = _copy_value(value, ir.Value(), names)
        # A tensor of its own on the same memory: naming a value renames the tensor it holds.
        copies[value].const_value = ir.Tensor(
            tensor.numpy(), dtype=tensor.dtype, name=copies[value].name
        )
        target.register_initializer(copies[value])
    for node in source:
        target.append(copy_node(node, copies, names))


def copy_node(node: ir.Node, copies: MutableMapping[ir.Value, ir.Value], names: Names) -> ir.Node:
    """Return a copy of a node that reads what became of its inputs; `copies` is extended."""
    inputs = [None if v is None else copies.get(v, v) for v in node.inputs]
    attributes = [_copy_attribute(a, copies, names) for a in node.attributes.values()]
    copy = ir.Node(
        node.domain, node.op_type, inputs, attributes, num_outputs=len(node.outputs),
        overload=node.overload, version=node.version,
        name=names.fresh(f"{node.name}_again") if node.name else None,
    )  # fmt: skip
    for old, new in zip(node.outputs, copy.outputs, strict=True):
        copies[old] = _copy_value(old, new, names)
    return copy


def _copy_value(old: ir.Value, new: ir.Value, names: Names) -> ir.Value:
    new.name = names.fresh(f"{old.name}_again") if old.name else old.name
    new.type, new.shape = old.type, None if old.shape is None else old.shape.copy()
    return new


def _copy_attribute(
    attribute: ir.Attr, copies: MutableMapping[ir.Value, ir.Value], names: Names
) -> ir.Attr:
    if attribute.is_ref() or attribute.type != ir.AttributeType.GRAPH:
        return attribute
    source = attribute.as_graph()
    inputs = [_copy_value(v, ir.Value(), names) for v in source.inputs]
    copies.update(zip(source.inputs, inputs, strict=True))
    graph = ir.Graph(inputs, [], nodes=[], name=names.fresh(f"{source.name}_again"))
    copy_graph(source, graph, copies, names)
    graph.outputs.extend(copies.get(v, v) for v in source.outputs)
    return ir.AttrGraph(attribute.name, graph)
