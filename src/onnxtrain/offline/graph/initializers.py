"""Initializers: made, renamed, and put in the place of nodes.

onnx_ir names a tensor as soon as a value holds it. The tensor may belong to the caller, so a value
gets one of its own, on the same data.
"""

from __future__ import annotations

import onnx_ir as ir

# In the meta of an initializer: what looks it up; that a definition wrote it; where it was before.
FIXED_TABLE, WRITTEN, FROM_CONSTANT = "fixed table", "written", "from a Constant node"


def replace_by_initializer(graph: ir.Graph, node: ir.Node, tensor: ir.TensorProtocol) -> ir.Value:
    """Put a constant in the place of a node, under the name of its output."""
    old = node.outputs[0]
    new = initializer(old.name or "", tensor)
    ir.convenience.replace_all_uses_with(old, new)
    graph.remove(node, safe=True)
    graph.register_initializer(new)
    return new


def initializer(name: str, tensor: ir.TensorProtocol) -> ir.Value:
    """Return a value that holds the same data under a name of its own."""
    value = ir.Value(name=name, const_value=_renamed(tensor, name))
    value.dtype, value.shape = tensor.dtype, ir.Shape(tensor.shape.numpy())
    return value


def rename_initializer(value: ir.Value, name: str) -> None:
    """Give an initializer another name; onnx_ir alone would rename the tensor of the caller too."""
    if value.const_value is not None:
        value.const_value = _renamed(value.const_value, name)
    value.name = name


def _renamed(tensor: ir.TensorProtocol, name: str | None) -> ir.TensorProtocol:
    """Return the same data under another name; the given tensor may belong to the caller."""
    if isinstance(tensor, ir.ExternalTensor):
        external = ir.ExternalTensor(
            tensor.location, tensor.offset, tensor.length, tensor.dtype,
            shape=tensor.shape, name=name or "", base_dir=tensor.base_dir,
        )  # fmt: skip
        external.meta.update(tensor.meta)
        return external
    if tensor.dtype == ir.DataType.STRING:
        return ir.StringTensor(tensor.numpy(), shape=ir.Shape(tensor.shape.numpy()), name=name)
    return ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=name)


def remove_node(graph: ir.Graph, node: ir.Node) -> None:
    """Remove a node whose outputs nothing reads, and the initializers that it alone read."""
    given = [v for v in node.inputs if v is not None]
    graph.remove(node, safe=True)
    for value in given:
        if value.is_initializer() and not value.uses() and not value.is_graph_output():
            graph.initializers.pop(str(value.name), None)
