"""64-bit floats, computed in 32 bits: WebGPU has no others.

Optimizers compute the numbers of a step (rate, bias correction) in float64 because 1 − 0.999^t of a
small t has three good digits in float32. Here 1 − b^t is written as −expm1(t·log b) instead, with a
series where that is small, and the rest follows in float32 with as many digits as tensors have.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import constant_array
from onnxtrain.offline.graph.subgraphs import replace_node, subgraphs_of

_FLOAT, _DOUBLE = ir.DataType.FLOAT, ir.DataType.DOUBLE
_TERMS = 9  # of the series: at 0.5 the tenth is below 1e-9


def without_doubles(op: Ops, graph: ir.Graph) -> None:
    """Compute in float32 what a graph computes in float64 between its inputs and outputs.

    A graph with doubles among its inputs, outputs or weights stays as it is.
    """
    stored = (v for v in graph.initializers.values() if v.uses() and not _is_small(v))
    if any(v.dtype == _DOUBLE for v in (*graph.inputs, *graph.outputs, *stored)):
        return
    _fold(op, graph)
    _write_corrections(op, graph)
    for node in graph.all_nodes():
        _narrow(op, node)


def _is_small(value: ir.Value) -> bool:
    return value.const_value is not None and value.const_value.size <= 64


def _fold(op: Ops, graph: ir.Graph) -> None:
    """Compute what follows from constants with all their digits, before there are fewer."""
    for node in list(graph):
        compute = _FOLDED.get(node.op_type)
        output = node.outputs[0]
        reads = [constant_array(v) for v in node.inputs if v is not None]
        if compute is None or output.is_graph_output() or any(a is None for a in reads):
            continue
        if not any(a is not None and a.dtype == np.float64 for a in reads):
            continue
        made = np.asarray(compute(*reads))
        if node.op_type == "Cast":
            made = made.astype(ir.DataType(node.attributes.get_int("to", 0)).numpy())
        ir.convenience.replace_all_uses_with(output, op.const(made))
        graph.remove(node, safe=True)


_FOLDED: dict[str, Callable[..., Any]] = {
    "Add": np.add, "Cast": np.asarray, "Div": np.divide, "Floor": np.floor, "Max": np.maximum,
    "Min": np.minimum, "Mul": np.multiply, "Pow": np.power, "Sqrt": np.sqrt, "Sub": np.subtract,
}  # fmt: skip


def _write_corrections(op: Ops, graph: ir.Graph) -> None:
    """Replace 1 − base^step."""
    for node in list(graph):
        if node.op_type != "Sub" or node.outputs[0].dtype != _DOUBLE:
            continue
        one, power = constant_array(node.inputs[0]), node.inputs[1]
        before = None if power is None else power.producer()
        if one is None or one.size != 1 or float(one.reshape(-1)[0]) != 1.0 or before is None:
            continue
        base = constant_array(before.inputs[0]) if before.op_type == "Pow" else None
        step = before.inputs[1]
        if base is None or base.size != 1 or step is None or not 0 < float(base) < 1:
            continue
        writer = Ops(graph, op.opset, op.names)
        writer.scope = f"webgpu/{node.name}"
        last = graph[-1]
        made = writer.Cast(_one_minus_power(writer, float(base), step), to=_DOUBLE)
        replace_node(node, [made], last)


def _one_minus_power(op: Ops, base: float, step: ir.Value) -> ir.Value:
    """Return 1 − base^step: x − x²/2 + x³/6 − … for small x = −step·log(base)."""
    x = op.Mul(op.Cast(step, to=_FLOAT), -math.log(base))
    small = op.Min(x, op.const(0.5, _FLOAT))
    series = op.const(1.0, _FLOAT)
    for k in range(_TERMS, 1, -1):
        series = op.Sub(op.const(1.0, _FLOAT), op.Mul(op.Mul(small, 1.0 / k), series))
    exact = op.Sub(op.const(1.0, _FLOAT), op.Exp(op.Neg(x)))
    return op.Where(op.Less(x, op.const(0.5, _FLOAT)), op.Mul(small, series), exact)


def _narrow(op: Ops, node: ir.Node) -> None:
    """Let a node compute in float32 where it computed in float64."""
    for index, value in enumerate(node.inputs):
        if value is None or value.dtype != _DOUBLE or value.const_value is None:
            continue
        array = value.const_value.numpy().astype(np.float32)
        node.replace_input_with(index, op.const(array))
    if node.op_type == "Cast" and ir.DataType(node.attributes.get_int("to", 0)) == _DOUBLE:
        node.attributes["to"] = ir.AttrInt64("to", int(_FLOAT))
    for output in node.outputs:
        if output.dtype == _DOUBLE:
            output.dtype = _FLOAT
    for body in subgraphs_of(node):
        for value in body.inputs:
            if value.dtype == _DOUBLE:
                value.dtype = _FLOAT
