"""Operators of onnxruntime with quantized weights, which stay in a graph as the model has them.

Their weights are integers and do not train; what flows through them may. Written as plain nodes,
such weights would be expanded to floats when onnxruntime loads the graph, to eight times the memory
of a 4-bit matrix. So the forward pass keeps the operator, and `autodiff/rules/quantized_weights.py`
has its gradient.

onnx knows neither the types nor the shapes of their results: `type_outputs` does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.offline.graph.shapes import Dims, dims_of, is_float, static_dims

MICROSOFT = "com.microsoft"
_LARGE = 1 << 14  # elements


@dataclass(frozen=True)
class Form:
    """Where an operator has its quantized weights, what belongs to them, and its bias."""

    weights: int
    scales: tuple[int, ...]  # and zero points
    bias: int | None = None


FORMS = {
    "MatMulNBits": Form(1, (2, 3), bias=5),
    "GatherBlockQuantized": Form(0, (2, 3)),
    "DynamicQuantizeMatMul": Form(1, (2, 3), bias=4),
    "MatMulIntegerToFloat": Form(1, (3, 5), bias=6),
}


def form_of(node: ir.Node) -> Form | None:
    """Return the form of a node that stays as it is: one with constant integers for weights."""
    form = FORMS.get(node.op_type) if node.domain == MICROSOFT else None
    if form is None or not all(
        is_constant(v) for v in (*scales_of(node, form), *_weights(node, form))
    ):
        return None
    return form if node.op_type != "MatMulNBits" or is_plain_product(node) else None


def is_kept(node: ir.Node) -> bool:
    """Tell whether a node stays as it is."""
    return form_of(node) is not None


def is_quantized_product(node: ir.Node) -> bool:
    """Tell whether a node that is kept multiplies by a matrix, as MatMul does."""
    return node.op_type != "GatherBlockQuantized" and is_kept(node)


def scales_of(node: ir.Node, form: Form) -> list[ir.Value]:
    """Return the scales and zero points of the weights of a node."""
    given = (node.inputs[i] for i in form.scales if i < len(node.inputs))
    return [v for v in given if v is not None]


def _weights(node: ir.Node, form: Form) -> list[ir.Value | None]:
    return [node.inputs[form.weights]]


def is_constant(value: ir.Value | None) -> bool:
    """Tell whether a value is an initializer that nobody can feed."""
    return value is not None and value.const_value is not None and not value.is_graph_input()


def is_large_integer(value: ir.Value) -> bool:
    """Tell whether a value holds quantized weights: many constants of a byte or less."""
    if value.dtype in (None, ir.DataType.BOOL, ir.DataType.STRING) or is_float(value):
        return False
    return value.dtype.bitwidth <= 8 and is_constant(value) and is_large(value)


def is_large(value: ir.Value) -> bool:
    """Tell whether it matters if a value is expanded when a graph is loaded."""
    dims = static_dims(value)
    return dims is not None and math.prod(dims) >= _LARGE


def is_plain_product(node: ir.Node) -> bool:
    """Tell whether MatMulNBits has weights in the layout that the gradient unpacks."""
    groups = node.inputs[4] if len(node.inputs) > 4 else None
    prepacked = node.attributes.get_int("weight_prepacked", 0)
    return groups is None and not prepacked and node.attributes.get_int("bits", 4) in (2, 4, 8)


def type_outputs(node: ir.Node, form: Form) -> None:
    """Set type and shape of the result of a node that is kept, where its inputs tell them."""
    dims = _table_dims(node) if node.op_type == "GatherBlockQuantized" else _product_dims(node)
    scales, output = scales_of(node, form)[0], node.outputs[0]
    if scales.dtype is not None:
        output.dtype = scales.dtype
    if dims is not None:
        output.shape = ir.Shape(dims)


def _product_dims(node: ir.Node) -> Dims | None:
    a, b = node.inputs[:2]
    dims, weights = (None if v is None else dims_of(v) for v in (a, b))
    if not dims or not weights:
        return None
    columns = node.attributes.get_int("N") if node.op_type == "MatMulNBits" else weights[-1]
    return None if columns is None else (*dims[:-1], columns)


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
