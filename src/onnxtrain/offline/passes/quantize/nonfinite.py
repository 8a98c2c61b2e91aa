"""Numbers that are infinite or NaN, which rounding to integers would hide.

QuantizeLinear makes an integer of any number, so the loss of such a batch would be finite, and the
step would count. In training it is not: the loss is NaN if the data are not finite, or what an
operator such as Log or Div makes of them, and the batch is skipped and told of as with a model of
floats. What products make of integers is finite.
"""

from __future__ import annotations

import math
from functools import reduce

import onnx_ir as ir

from onnxtrain.offline.graph.op_facts import COSTLY, KEEPS_FINITE
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import is_float

_QUANTIZE = "QuantizeLinear"


def keep_nonfinite(model: ir.Model) -> None:
    """Let the loss, the first output, be NaN where what is quantized is not finite."""
    graph = model.graph
    doubtful = _first_read(graph)
    if not doubtful:
        return
    op = Ops(graph, model.opset_imports[""])
    op.scope = "quantization/finite"
    loss = graph.outputs[0]
    with op.arithmetic():
        sums = [op.Mul(op.ReduceSum(value, keepdims=0), 0.0) for value in doubtful]
        # No gradient goes through a condition.
        is_nan = op.IsNaN(reduce(op.Add, sums))
        total = op.type_as(op.Add(loss, op.Where(is_nan, math.nan, 0.0)), loss)
    name = loss.name
    loss.name = op.names.fresh(f"{name}_of_integers")
    total.name = name
    graph.outputs[0] = total


def _first_read(graph: ir.Graph) -> list[ir.Value]:
    """Return what may not be finite, where a product or quantizer reads it.

    That is what comes from the inputs, or from an operator that divides or the like, without a
    product or quantizer in between. Masks, which may be infinite, are not among it. If no
    activation is quantized, nothing is.
    """
    doubtful = {v for v in graph.inputs if not v.is_initializer()}
    dependent, found, quantizes = set(doubtful), dict[ir.Value, None](), False
    for node in graph:
        read = [v for v in node.inputs if v is not None]
        if dependent.isdisjoint(read):
            continue
        dependent.update(node.outputs)
        if node.op_type == _QUANTIZE or node.op_type in COSTLY:
            found |= dict.fromkeys(v for v in read if v in doubtful and is_float(v))
            quantizes |= node.op_type == _QUANTIZE
        elif not doubtful.isdisjoint(read) or node.op_type not in KEEPS_FINITE:
            doubtful.update(node.outputs)
    return list(found) if quantizes else []
