"""What is certain about the sign of a value, whatever the inputs are.

A division by √(variance + ε) is safe, one by a norm is not. The answer is read from the few nodes
that a value is computed from; where they do not tell, it is no.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.graph.op_facts import KEEPS_SIGN, NOT_NEGATIVE
from onnxtrain.offline.graph.shapes import constant_array, is_float

_DEPTH = 12  # nodes to look back


def is_positive(value: ir.Value | None, depth: int = _DEPTH) -> bool:
    """Tell whether all elements are certainly positive, and finite where they are constant."""
    return _at_least(value, 0.0, True, depth)


def is_not_negative(value: ir.Value | None, depth: int = _DEPTH) -> bool:
    """Tell whether all elements are certainly zero or more."""
    return _at_least(value, 0.0, False, depth)


def _at_least(value: ir.Value | None, bound: float, strict: bool, depth: int) -> bool:
    if value is None or depth == 0:
        return False
    known = constant_array(value)
    if known is not None:
        return bool(
            np.isfinite(known).all() and (known > bound if strict else known >= bound).all()
        )
    node = value.producer()
    if node is None or node.domain != "":
        return False
    return _result_is(node, strict, depth - 1)


def _result_is(node: ir.Node, strict: bool, depth: int) -> bool:
    inputs, op_type = node.inputs, node.op_type
    if op_type in KEEPS_SIGN:
        return _at_least(inputs[0], 0.0, strict, depth)
    if op_type == "Cast":  # to an integer, a fraction becomes zero
        source = inputs[0]
        truncates = source is not None and is_float(source) and not is_float(node.outputs[0])
        return _at_least(source, 0.0, strict, depth) and not (strict and truncates)
    if op_type in ("Shape", "Size"):  # where a size is zero, there is nothing to compute with it
        return True
    if op_type in ("Sqrt", "Reciprocal") and is_positive(inputs[0], depth):
        return True
    if op_type in ("Mul", "Div") and all(is_positive(v, depth) for v in inputs):
        return True
    if op_type == "Pow" and is_positive(inputs[0], depth):  # √d as exporters write it
        return True
    if op_type in ("Add", "Sum"):
        certain = all(is_not_negative(v, depth) for v in inputs)
        return certain and (not strict or any(is_positive(v, depth) for v in inputs))
    if op_type == "Max":
        return any(_at_least(v, 0.0, strict, depth) for v in inputs)
    if op_type == "Clip":
        return len(inputs) > 1 and _at_least(inputs[1], 0.0, strict, depth)
    if op_type == "Where":
        return all(_at_least(v, 0.0, strict, depth) for v in inputs[1:])
    if strict:
        return False
    if op_type in ("Mul", "Div"):
        same = op_type == "Mul" and inputs[0] is inputs[1]
        return same or all(is_not_negative(v, depth) for v in inputs)
    if op_type == "Pow":
        exponent = constant_array(inputs[1])
        even = exponent is not None and bool((exponent % 2 == 0).all())
        return even or is_not_negative(inputs[0], depth)
    if op_type == "ReduceSum":
        return is_not_negative(inputs[0], depth)
    return op_type in NOT_NEGATIVE
