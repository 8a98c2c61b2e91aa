"""Weights of 4 bits that several layers read, once for each layer; for evaluation and export.

onnxruntime makes one operator of a product and of the integers that it alone reads.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.writer import attributes_of
from onnxtrain.offline.passes.quantize.insert import QUANTIZER


def separate_weights(op: Ops, graph: ir.Graph) -> list[str]:
    """Quantize what layers share once for each; return the names of integers and scales."""
    made = []
    for node in list(graph):
        q = node.inputs[0] if QUANTIZER in node.metadata_props else None
        quantizer = None if q is None or q.dtype != ir.DataType.INT4 else q.producer()
        if q is None or quantizer is None:
            continue
        _, scale, *zeros = node.inputs
        assert scale is not None
        for user, index in list(node.outputs[0].uses())[1:]:
            (own,) = op.call("QuantizeLinear", *quantizer.inputs, **attributes_of(quantizer))
            own.dtype = ir.DataType.INT4
            op.shape_as(own, q)
            step = op.type_as(op.Identity(scale), scale)
            for value, like in ((own, q), (step, scale)):
                value.name = op.names.fresh(str(like.name))
                made.append(value.name)
            how = attributes_of(node)
            (y,) = op.call("DequantizeLinear", own, step, *zeros, like=node.outputs[0], **how)
            user.replace_input_with(index, y)
    return made
