"""Gelu, as an operator and as the five nodes that exporters write for it.

onnxruntime fuses the five into one kernel, if nothing else reads what lies between them. So their
gradient is written at once and from x alone: nothing between has to be kept, and the forward pass
has one pass over memory instead of five.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import Cotangents, rule
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import constant_array, is_half


@rule("Gelu", notes="both approximations, each with its own derivative")
def gelu(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """d x Φ(x) = (Φ(x) + x φ(x)) dx, and the derivative of the tanh form for that."""
    x = node.inputs[0]
    if node.attributes.get_string("approximate", "none") == "tanh":
        return (dy * _tanh_gelu_slope(op, x),)
    return (gelu_cotangent(op, x, dy),)


def gelu_cotangent(op: Ops, x: ir.Value | None, dy: ir.Value) -> ir.Value:
    """With a = -x/√2: dx = dy (1 - (erf(a) + a exp(-a²) 2/√π)) / 2.

    Divided by exp(a²), which takes a pass less and is right where that is infinite. The sign is for
    onnxruntime, which would share x/√2 with the forward pass, and then neither fuse nor free it.
    """
    a = op.Mul(x, -math.sqrt(0.5))
    bell = op.Div(a, op.Exp(op.Mul(a, a)))
    slope = 1.0 - (op.Erf(a) + bell * (2.0 / math.sqrt(math.pi)))
    return op.Mul(dy * slope, 0.5)


def _tanh_gelu_slope(op: Ops, x: ir.Value | None) -> ir.Value:
    """With u = k (x + c x³), t = tanh(u): y = x (1 + t)/2, y' = (1 + t + x (1 - t²) u')/2."""
    k, c = math.sqrt(2.0 / math.pi), 0.044715
    square = op.Mul(x, x)
    t = op.Tanh(op.Mul(x, square * (k * c) + k))
    inner = op.Mul(x, square * (3.0 * k * c) + k)
    return op.Mul(t + 1.0 + inner * (1.0 - t * t), 0.5)


# ---- the five nodes ------------------------------------------------------------------------------


def argument_of_gelu(op: Ops, last: ir.Node) -> ir.Value | None:
    """Return x if a Mul is the last node of x/2 (1 + erf(x/√2)), in any order of the factors.

    Not if something between has another reader, or is asked for: then it has to be computed anyway.
    """
    factors = list(_factors(op, last))
    halves = [f for f in factors if _is_number(op, f, 0.5)]
    sums = [(f, x) for f in factors if (x := _argument_of_sum(op, f)) is not None]
    if len(factors) != 3 or len(halves) != 1 or len(sums) != 1:
        return None
    (summed, x), half = sums[0], halves[0]
    if [f for f in factors if f not in (summed, half)] != [x]:
        return None
    _order_for_fusion(last, x, summed, half)
    return x


def _order_for_fusion(last: ir.Node, x: ir.Value, summed: ir.Value, half: ir.Value) -> None:
    """Write x (sum / 2) as (x sum) / 2, which is the same number and what onnxruntime looks for."""
    for inner in last.inputs:
        producer = None if inner is None else inner.producer()
        if producer is not None and {*producer.inputs} == {summed, half}:
            for node, operands in ((producer, (x, summed)), (last, (inner, half))):
                for index, operand in enumerate(operands):
                    node.replace_input_with(index, operand)
            return


def _factors(op: Ops, product: ir.Node, depth: int = 0) -> Iterator[ir.Value]:
    for value in product.inputs:
        assert value is not None
        inner = _between(op, value, "Mul")
        if inner is not None and depth < 2:
            yield from _factors(op, inner, depth + 1)
        else:
            yield value


def _argument_of_sum(op: Ops, value: ir.Value) -> ir.Value | None:
    """Return x of 1 + erf(x/√2)."""
    for erf in _other_operand(op, _between(op, value, "Add"), 1.0):
        node = _between(op, erf, "Erf")
        scaled = None if node is None else node.inputs[0]
        if scaled is None:
            continue
        divided = _between(op, scaled, "Div")
        if divided is not None and _is_number(op, divided.inputs[1], math.sqrt(2.0)):
            return divided.inputs[0]
        return next(_other_operand(op, _between(op, scaled, "Mul"), math.sqrt(0.5)), None)
    return None


def _other_operand(op: Ops, node: ir.Node | None, number: float) -> Iterator[ir.Value]:
    """Yield the operand beside a number."""
    if node is not None:
        first, second = node.inputs
        for value, other in ((first, second), (second, first)):
            if value is not None and _is_number(op, other, number):
                yield value


def _between(op: Ops, value: ir.Value, op_type: str) -> ir.Node | None:
    """Return the node of a kind that makes a value, if the value is read once and not asked for."""
    node = value.producer()
    if node is None or node.op_type != op_type or node.domain != "":
        return None
    read_once = len(value.uses()) == 1 and not value.is_graph_output()
    if op.path is None or not read_once or op.path.is_asked_for(value):
        return None
    return node


def _is_number(op: Ops, value: ir.Value | None, number: float) -> bool:
    if value is None or (op.path is not None and value in op.path.depends):  # it is trained
        return False
    array = constant_array(value)
    if array is None or array.size != 1:
        return False
    return math.isclose(array.item(), number, rel_tol=1e-3 if is_half(value) else 1e-6)
