"""Biases as 32-bit integers, as products of 8-bit integers add them; for evaluation and export.

Their scale is that of the product: input times weight. Rounding to it changes a bias by less than
what the product can tell apart, so training goes without.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.passes.quantize.bounds import drop_bounds
from onnxtrain.offline.passes.quantize.insert import QUANTIZER
from onnxtrain.offline.passes.quantize.places import before_dropout, bias_of
from onnxtrain.offline.passes.quantize.shared_weights import separate_weights

_LARGEST = 2.0**31 - 128  # that float32 has, below the largest integer


def quantize_biases(model: ir.Model) -> list[str]:
    """Quantize the bias of each product whose inputs are quantized; return what export folds."""
    graph = model.graph
    op = Ops(graph, model.opset_imports[""])
    op.scope = "quantization/bias"
    is_changed = drop_bounds(op, graph)
    folded = separate_weights(op, graph)
    for node in list(graph):
        bias = bias_of(node) if node.domain == "" else None
        scales = [_scale_of(v) for v in node.inputs[:2]] if bias is not None else []
        if bias is None or len(scales) != 2 or scales[0] is None or scales[1] is None:
            continue
        scale = op.Mul(scales[0], scales[1])
        levels = op.Clip(op.Round(op.Div(bias, scale)), -_LARGEST, _LARGEST)
        q = op.Cast(levels, to=ir.DataType.INT32)
        for value, label in ((scale, "scale"), (q, "quantized")):
            value.name = op.names.fresh(f"{bias.name}_{label}")
            folded.append(value.name)
        (y,) = op.call("DequantizeLinear", q, scale, like=bias, axis=0)
        node.replace_input_with(2, y)
    if folded or is_changed:
        graph.sort()
    return folded


def _scale_of(value: ir.Value | None) -> ir.Value | None:
    node = None if value is None else before_dropout(value).producer()
    return node.inputs[1] if node is not None and QUANTIZER in node.metadata_props else None
