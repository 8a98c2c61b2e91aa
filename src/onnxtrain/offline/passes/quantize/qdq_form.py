"""Models of integer operators (QLinearConv, QLinearAdd) in QDQ form.

Each operator becomes that of floats between DequantizeLinear and QuantizeLinear, and so does what
moves integers (MaxPool, Reshape).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import ArgumentError
from onnxtrain.offline.graph.integer_operators import (
    IntegerForm,
    float_attributes,
    integer_form,
    meaning_of,
)
from onnxtrain.offline.graph.names import label_of
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import constant_array
from onnxtrain.offline.graph.subgraphs import replace_node
from onnxtrain.offline.passes.quantize.bounds import keeps_range

_BIAS = {"Conv": 8, "Gemm": 6}  # where the integer operators have it


def write_qdq_form(model: ir.Model) -> None:
    """Write operators of integers as those of floats that they stand for, in place."""
    graph = model.graph
    op = Ops(graph, model.opset_imports[""])
    op.scope = "quantization/lifted"
    for node in list(graph):
        form = integer_form(node)
        if form is not None:
            _operator(op, node, form)
        elif keeps_range(node) and len(node.outputs) == 1:
            x = node.inputs[0]
            meaning = None if x is None else meaning_of(x)
            if x is not None and meaning is not None and x.dtype in _INTEGERS:
                _mover(op, node, x, meaning)


_INTEGERS = (ir.DataType.UINT8, ir.DataType.INT8)


def _operator(op: Ops, node: ir.Node, form: IntegerForm) -> None:
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    last = graph[-1]
    read = [_floats(op, node, *_places(node, form, i)) for i in range(len(form.operands))]
    bias = _bias(op, node, form)
    given = [*read, *([] if bias is None else [bias])]
    (made,) = op.call(form.float_op, *given, **float_attributes(node))
    made.dtype, made.shape = ir.DataType.FLOAT, node.outputs[0].shape
    product = made.producer()
    assert product is not None
    scale, zero = (_input(node, place) for place in form.result)
    if scale is not None:
        (made,) = op.call("QuantizeLinear", made, _scalar(op, scale), _scalar(op, zero))
        _type_as(made, node.outputs[0])
    name = node.name
    replace_node(node, [made], last)
    product.name = name


def _places(node: ir.Node, form: IntegerForm, which: int) -> tuple[int, int, int]:
    operand = form.operands[which]
    return operand.integer, operand.scale, operand.zero_point


def _floats(op: Ops, node: ir.Node, integer: int, scale: int, zero_point: int) -> ir.Value:
    """Dequantize an operand; a matrix with a scale for each column has them along its last axis."""
    q, factor, zero = (_input(node, place) for place in (integer, scale, zero_point))
    assert q is not None and factor is not None
    array = constant_array(factor)
    axis = None
    if array is not None and array.size > 1:
        is_conv, turned = "Conv" in node.op_type, bool(node.attributes.get_int("transB", 0))
        axis = 0 if is_conv or turned else 1
    else:
        factor, zero = _scalar(op, factor), _scalar(op, zero)
    if factor is None:
        raise ArgumentError(f"quantize: the scale of {label_of(node)} is computed")
    (y,) = op.call("DequantizeLinear", q, factor, zero, axis=axis)
    y.dtype, y.shape = ir.DataType.FLOAT, q.shape
    return y


def _bias(op: Ops, node: ir.Node, form: IntegerForm) -> ir.Value | None:
    """Return the bias in floats: its scale is that of the product."""
    place = _BIAS.get(form.float_op)
    bias = None if place is None else _input(node, place)
    scales = [constant_array(_input(node, each.scale)) for each in form.operands]
    if bias is None or len(scales) != 2 or scales[0] is None or scales[1] is None:
        return None
    scale = (scales[0].reshape(()) * scales[1]).astype(np.float32)
    scale = scale if scale.size > 1 else scale.reshape(())
    (y,) = op.call("DequantizeLinear", bias, op.const(scale), axis=0 if scale.ndim else None)
    y.dtype, y.shape = ir.DataType.FLOAT, bias.shape
    return y


def _mover(op: Ops, node: ir.Node, x: ir.Value, meaning: tuple[ir.Value, ir.Value | None]) -> None:
    graph, y = node.graph, node.outputs[0]
    assert isinstance(graph, ir.Graph)
    scale, zero = (_scalar(op, v) for v in meaning)
    before = ir.node("DequantizeLinear", [x, scale, *([] if zero is None else [zero])])
    after = ir.node("QuantizeLinear", [y, scale, *([] if zero is None else [zero])])
    for each in (before, after):
        each.name = op.names.fresh(f"{op.scope}/{each.op_type}")
        each.outputs[0].name = op.names.fresh(f"{each.name}_out")
    moved, q = before.outputs[0], after.outputs[0]
    moved.dtype, moved.shape = ir.DataType.FLOAT, x.shape
    _type_as(q, y)
    q.shape = y.shape
    ir.convenience.replace_all_uses_with(y, q, replace_graph_outputs=True)
    after.replace_input_with(0, y)
    node.replace_input_with(0, moved)
    y.dtype = ir.DataType.FLOAT
    node.prepend(before)
    node.append(after)


def _type_as(value: ir.Value, like: ir.Value) -> None:
    if like.dtype is not None:
        value.dtype = like.dtype


def _scalar(op: Ops, value: ir.Value | None) -> ir.Value | None:
    """Return a constant of one element as a scalar."""
    array = constant_array(value)
    if value is None or array is None or array.size != 1 or not array.ndim:
        return value
    return op.const(array.reshape(()))


def _input(node: ir.Node, place: int) -> ir.Value | None:
    return node.inputs[place] if place < len(node.inputs) else None
