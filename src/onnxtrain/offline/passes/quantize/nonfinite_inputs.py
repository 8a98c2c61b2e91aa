"""Data that are infinite or NaN, which rounding to integers would hide.

QuantizeLinear makes an integer of any number, so the loss of such a batch would be finite, and the
step would count. In training it is not: the loss has the sum of the data added to it, times 0, and
the batch is skipped and told of as with a model of floats.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.offline.graph.op_facts import COSTLY
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import is_float

_QUANTIZE = "QuantizeLinear"


def keep_nonfinite_inputs(model: ir.Model) -> None:
    """Let the loss, the first output, be NaN where quantized data are not finite."""
    graph = model.graph
    data = _first_read(graph)
    if not data:
        return
    op = Ops(graph, model.opset_imports[""])
    op.scope = "quantization/data"
    loss = total = graph.outputs[0]
    with op.arithmetic():
        for value in data:
            total = op.type_as(op.Add(total, op.Mul(op.ReduceSum(value, keepdims=0), 0.0)), loss)
    name = loss.name
    loss.name = op.names.fresh(f"{name}_of_integers")
    total.name = name
    graph.outputs[0] = total


def _first_read(graph: ir.Graph) -> list[ir.Value]:
    """Return what comes from the inputs to a product or quantizer without another one before it.

    Masks, which may be infinite, are not among it. If no activation is quantized, nothing is.
    """
    data = {v for v in graph.inputs if not v.is_initializer()}
    dependent, found, quantizes = set(data), dict[ir.Value, None](), False
    for node in graph:
        read = [v for v in node.inputs if v is not None]
        if dependent.isdisjoint(read):
            continue
        dependent.update(node.outputs)
        if node.op_type == _QUANTIZE or node.op_type in COSTLY:
            found |= dict.fromkeys(v for v in read if v in data and is_float(v))
            quantizes |= node.op_type == _QUANTIZE
        elif not data.isdisjoint(read):
            data.update(node.outputs)
    return list(found) if quantizes else []
