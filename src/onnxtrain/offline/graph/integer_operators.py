"""Operators that compute with quantized numbers: what each operand is, and which floats they mean.

A model in onnxruntime's operator form quantizes its input once and computes with integers from then
on: QLinearConv, QLinearAdd, a MaxPool of bytes. Each such integer q *means* the float (q - z) s,
for a scale s and a zero point z that the operator which made it has as inputs. A gradient with
respect to that float flows along the integers; see `autodiff/rules/integers.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxtrain.offline.graph.op_facts import TAKES_PARTS, VIEWS
from onnxtrain.offline.graph.quantized_operators import MICROSOFT
from onnxtrain.offline.graph.shapes import is_float
from onnxtrain.offline.graph.writer import attributes_of


@dataclass(frozen=True)
class Quantized:
    """Where an operator has integers, their scale and their zero point, or the latter two alone."""

    integer: int
    scale: int
    zero_point: int


@dataclass(frozen=True)
class IntegerForm:
    """The operator of floats that an operator of integers stands for, and its operands."""

    float_op: str
    operands: tuple[Quantized, ...]
    result: tuple[int, int]  # scale and zero point

    @property
    def scales(self) -> list[int]:
        """The positions of all scales."""
        return [self.result[0], *(each.scale for each in self.operands)]


_ONE, _TWO = Quantized(0, 1, 2), Quantized(3, 4, 5)
_UNARY = ("AveragePool", "GlobalAveragePool", "LeakyRelu", "ReduceMean", "Sigmoid", "Softmax")
INTEGER_FORMS: dict[tuple[str, str], IntegerForm] = {
    ("", "QLinearConv"): IntegerForm("Conv", (_ONE, _TWO), (6, 7)),
    ("", "QLinearMatMul"): IntegerForm("MatMul", (_ONE, _TWO), (6, 7)),
    (MICROSOFT, "QLinearConv"): IntegerForm("Conv", (_ONE, _TWO), (6, 7)),
    (MICROSOFT, "QLinearAdd"): IntegerForm("Add", (_ONE, _TWO), (6, 7)),
    (MICROSOFT, "QLinearMul"): IntegerForm("Mul", (_ONE, _TWO), (6, 7)),
    (MICROSOFT, "QGemm"): IntegerForm("Gemm", (_ONE, _TWO), (7, 8)),
    **{(MICROSOFT, f"QLinear{op}"): IntegerForm(op, (_ONE,), (3, 4)) for op in _UNARY},
    (MICROSOFT, "QLinearConcat"): IntegerForm("Concat", (), (0, 1)),
}
# They take integers as they are, and their results mean floats of the same scale.
_PASSES_ON = VIEWS | TAKES_PARTS | {"Concat", "MaxPool", "Transpose"}


def integer_form(node: ir.Node) -> IntegerForm | None:
    """Return the form of an operator of integers, if a gradient can pass it."""
    form = INTEGER_FORMS.get((node.domain, node.op_type))
    if form is None or bool(node.attributes.get_int("channels_last", 0)):
        return None
    if node.op_type == "QLinearSoftmax" and node.attributes.get_int("opset", 13) < 13:
        return None
    if node.op_type == "QLinearConcat":
        count = (len(node.inputs) - 2) // 3
        operands = tuple(Quantized(i, i + 1, i + 2) for i in range(2, 2 + 3 * count, 3))
        return IntegerForm(form.float_op, operands, form.result)
    return form


def float_attributes(node: ir.Node) -> dict[str, Any]:
    """Return the attributes of the operator of floats that a node stands for."""
    own = ("channels_last", "opset")
    return {k: v for k, v in attributes_of(node).items() if k not in own}


def means_floats(value: ir.Value) -> bool:
    """Tell whether a gradient flows along a value although it holds integers."""
    return not is_float(value) and meaning_of(value) is not None


def meaning_of(value: ir.Value) -> tuple[ir.Value, ir.Value | None] | None:
    """Return the scale and zero point of integers that were computed on the way, if known."""
    node = value.producer()
    if node is None:
        return None
    form = integer_form(node)
    if form is not None:
        return _pair(node, form.result)
    if node.domain:
        return None
    if node.op_type == "QuantizeLinear":
        return _pair(node, (1, 2)) if any(map(_goes_on, _users(value))) else None
    first = node.inputs[0] if node.inputs else None
    if node.op_type not in _PASSES_ON or first is None or is_float(first):
        return None
    return meaning_of(first)


def _users(value: ir.Value) -> list[ir.Node]:
    return [user for user, _ in value.uses()]


def _goes_on(user: ir.Node) -> bool:
    """Tell whether a node computes with integers, instead of turning them back to floats."""
    return integer_form(user) is not None or (user.domain == "" and user.op_type in _PASSES_ON)


def _pair(node: ir.Node, places: Sequence[int]) -> tuple[ir.Value, ir.Value | None] | None:
    scale, zero = (node.inputs[i] if i < len(node.inputs) else None for i in places)
    return None if scale is None else (scale, zero)
