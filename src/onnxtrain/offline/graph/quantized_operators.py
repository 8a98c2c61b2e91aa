"""Operators of onnxruntime with quantized weights, which stay in a graph as the model has them.

Their weights are integers and do not train; what flows through them may. Written as plain nodes,
such weights would be expanded to floats when onnxruntime loads the graph, to eight times the memory
of a 4-bit matrix. So the forward pass keeps the operator, and `autodiff/rules/quantized_weights.py`
has its gradient.

onnx knows neither the types nor the shapes of their results: `type_outputs` does.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnxtrain.offline.graph.shapes import Dims, dims_of

MICROSOFT = "com.microsoft"
# Inputs of MatMulNBits, and of GatherBlockQuantized as far as it has them.
_A, _B, _SCALES, _ZERO_POINTS, _GROUPS, BIAS = range(6)


def is_kept(node: ir.Node) -> bool:
    """Tell whether a node stays as it is: one with constant integers for weights."""
    found = _FORMS.get(node.op_type) if node.domain == MICROSOFT else None
    return found is not None and found(node)


def is_quantized_product(node: ir.Node) -> bool:
    """Tell whether a node that is kept multiplies by a matrix, as MatMul does."""
    return node.op_type == "MatMulNBits" and is_kept(node)


def scales_of(node: ir.Node) -> list[ir.Value]:
    """Return the scales and zero points of a node that is kept."""
    return [v for v in node.inputs[_SCALES : _ZERO_POINTS + 1] if v is not None]


def is_constant(value: ir.Value | None) -> bool:
    """Tell whether a value is an initializer that nobody can feed."""
    return value is not None and value.const_value is not None and not value.is_graph_input()


def _is_plain_product(node: ir.Node) -> bool:
    """Tell whether MatMulNBits has weights in the layout that the gradient unpacks."""
    given = [*node.inputs, *[None] * 6]
    return (
        is_constant(given[_B])
        and all(map(is_constant, scales_of(node)))
        and given[_GROUPS] is None
        and not node.attributes.get_int("weight_prepacked", 0)
        and node.attributes.get_int("bits", 4) in (2, 4, 8)
    )


_FORMS: dict[str, Callable[[ir.Node], bool]] = {
    "MatMulNBits": _is_plain_product,
    "GatherBlockQuantized": lambda node: is_constant(node.inputs[0]),
}


def type_outputs(node: ir.Node) -> None:
    """Set type and shape of the result of a node that is kept, where its inputs tell them."""
    dims = _table_dims(node) if node.op_type == "GatherBlockQuantized" else _product_dims(node)
    scales, output = node.inputs[_SCALES], node.outputs[0]
    if scales is not None and scales.dtype is not None:
        output.dtype = scales.dtype
    if dims is not None:
        output.shape = ir.Shape(dims)


def _product_dims(node: ir.Node) -> Dims | None:
    a = node.inputs[_A]
    dims = None if a is None else dims_of(a)
    return None if not dims else (*dims[:-1], node.attributes["N"].as_int())


def _table_dims(node: ir.Node) -> Dims | None:
    table, indices = node.inputs[:2]
    dims = None if table is None else dims_of(table)
    places = None if indices is None else dims_of(indices)
    if table is None or dims is None or places is None:
        return None
    if table.dtype == ir.DataType.UINT8 and isinstance(dims[-1], int):  # several to a byte
        dims = (*dims[:-1], dims[-1] * 8 // node.attributes.get_int("bits", 4))
    axis = node.attributes.get_int("gather_axis", 0) % len(dims)
    return (*dims[:axis], *places, *dims[axis + 1 :])
