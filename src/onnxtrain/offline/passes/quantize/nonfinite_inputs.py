"""Data that are infinite or NaN, which rounding to integers would hide.

QuantizeLinear makes an integer of any number, so the loss of such a batch would be finite, and the
step would count. In training it is not: the loss has what is not finite among the data added to it,
times 0, and the batch is skipped and told of as with a model of floats.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.offline.graph.op_facts import COSTLY
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.subgraphs import ancestors
from onnxtrain.offline.passes.quantize.insert import QUANTIZER


def keep_nonfinite_inputs(model: ir.Model) -> None:
    """Let the loss, the first output, be NaN where quantized data are not finite."""
    graph = model.graph
    data = _quantized_data(graph)
    if not data:
        return
    op = Ops(graph, model.opset_imports[""])
    op.scope = "quantization/data"
    loss = graph.outputs[0]
    with op.arithmetic():
        total = loss
        for value in data:
            total = op.type_as(op.Add(total, op.Mul(op.ReduceSum(value, keepdims=0), 0.0)), loss)
    name = loss.name
    loss.name = op.names.fresh(f"{name}_of_integers")
    total.name = name
    graph.outputs[0] = total


def _quantized_data(graph: ir.Graph) -> list[ir.Value]:
    """Return what is quantized before any product: the data, or what they were scaled to."""
    found = dict[ir.Value, None]()
    for node in graph:
        made = node.inputs[0] if QUANTIZER in node.metadata_props else None
        quantizer = None if made is None else made.producer()
        value = None if quantizer is None else quantizer.inputs[0]
        if value is not None and _is_data(value):
            found[value] = None
    return list(found)


def _is_data(value: ir.Value) -> bool:
    """Whether a value comes from the inputs of a model, and no product is between them."""
    maker = value.producer()
    makers = set() if maker is None else ancestors([maker])
    read = [value, *(v for node in makers for v in node.inputs)]
    from_inputs = any(v.is_graph_input() and not v.is_initializer() for v in read if v is not None)
    return from_inputs and not any(node.op_type in COSTLY for node in makers)
