"""Single numbers that a graph computes from constants and from sizes that are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.graph.op_facts import VIEWS
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import constant_array, dims_read, static_dims

_Array = np.ndarray[Any, Any]
_ARITHMETIC: dict[str, Callable[..., _Array]] = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Pow": np.power, "Sqrt": np.sqrt,
    "Neg": np.negative, "Reciprocal": np.reciprocal,
}  # fmt: skip


def known_number(value: ir.Value | None) -> float | None:
    """Return the number that a value of one element has in every run, or None."""
    array = _known(value, depth=16)
    return None if array is None or array.size != 1 else float(array.reshape(()))


def _known(value: ir.Value | None, depth: int) -> _Array | None:
    """Follow a value to constants and sizes; of shapes, the part that is read has to be known."""
    if value is None or depth == 0:
        return None
    constant = constant_array(value)
    if constant is not None:
        return constant if constant.size == 1 else None
    node = value.producer()
    if node is None or node.domain != "":
        return None
    if node.op_type in ("Slice", "Gather"):
        return _size_read(node)
    if node.op_type in ("Shape", "Size"):
        dims = dims_read(node)
        known = dims is not None and len(dims) == 1 and node.op_type == "Shape"
        return np.array(dims, np.int64) if known and dims and isinstance(dims[0], int) else None
    inputs = node.inputs[:1] if node.op_type in VIEWS else node.inputs
    operands = [_known(v, depth - 1) for v in inputs]
    if any(array is None for array in operands) or not operands:
        return None
    if node.op_type in VIEWS:
        return operands[0]
    return _computed(node, [array for array in operands if array is not None])


def _computed(node: ir.Node, operands: list[_Array]) -> _Array | None:
    dtype = node.outputs[0].dtype
    if dtype not in (ir.DataType.FLOAT, ir.DataType.INT64):
        return None
    if node.op_type == "Cast":
        return operands[0].astype(dtype.numpy())
    if node.op_type == "Div" and operands[1].all():
        integers = dtype == ir.DataType.INT64
        return (
            np.trunc(operands[0] / operands[1]).astype(np.int64)
            if integers
            else np.divide(*operands)
        )
    function = _ARITHMETIC.get(node.op_type)
    same_type = all(array.dtype == dtype.numpy() for array in operands)
    return None if function is None or not same_type else function(*operands)


def _size_read(node: ir.Node) -> _Array | None:
    """Return the one size that a node takes from a Shape."""
    source = node.inputs[0]
    shape = None if source is None else source.producer()
    dims = dims_read(shape) if shape is not None and shape.op_type == "Shape" else None
    indices = [constant_array(v) for v in node.inputs[1:] if v is not None]
    if dims is None or any(i is None or i.size != 1 for i in indices):
        return None
    numbers = [int(i.reshape(())) for i in indices if i is not None]
    if node.op_type == "Gather":
        picked = list(dims[numbers[0] :][:1])
    elif numbers[3:] in ([], [1]):
        picked = list(dims[numbers[0] : numbers[1]])
    else:
        return None
    if len(picked) != 1 or not isinstance(picked[0], int):
        return None
    return np.array(picked, np.int64)


# What attention does with scores, queries and keys behind their scale.
_BEHIND_SCALES = frozenset({"MatMul", "Softmax", "Add", "Where", "Transpose"})


def fold_scales(op: Ops, graph: ir.Graph) -> None:
    """Write a scale as a number where it is computed from sizes that are known, as 1/√size is."""
    for node in [n for n in graph if n.op_type in ("Mul", "Div") and n.domain == ""]:
        if not any(reader.op_type in _BEHIND_SCALES for reader, _ in node.outputs[0].uses()):
            continue
        for index, value in enumerate(node.inputs):
            if value is None or value.dtype != ir.DataType.FLOAT or value.producer() is None:
                continue
            number = known_number(value) if constant_array(value) is None else None
            dims = static_dims(value)
            if number is not None and dims is not None:
                array = np.full(dims, number, np.float32)
                node.replace_input_with(index, op.const(array))
                _remove_unread(value)


def _remove_unread(value: ir.Value) -> None:
    """Remove the node that makes a value if nobody reads it, and what it alone reads."""
    pending = [value]
    while pending:
        node = pending.pop().producer()
        if node is None or node.graph is None:
            continue
        if any(v.uses() or v.is_graph_output() for v in node.outputs):
            continue
        pending.extend(v for v in node.inputs if v is not None)
        node.graph.remove(node, safe=True)
