"""Forms of torch's newer exporter, without its optimizer, that hide what a node reads.

It writes each number as a CastLike, which reads another value for its type alone, and gives each
convolution a bias: zeros that it expands to as many as the weight has rows. Such readers keep
passes from seeing that a value is read once, that a weight has one layer, that a bound is constant.

Only what was a Constant is taken for a number; an initializer may be a weight that trains.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.graph.initializers import FROM_CONSTANT, replace_by_initializer
from onnxtrain.offline.graph.shapes import constant_array

_MOST = 1024  # elements of a number that is converted beforehand
# To these, numpy converts as onnxruntime does.
_CONVERTED = {ir.DataType[name] for name in "FLOAT DOUBLE FLOAT16 INT32 INT64 BOOL".split()}


def settle_torch_forms(model: ir.Model) -> None:
    """Write these forms plainly, in place."""
    for node in list(model.graph.all_nodes()):
        if node.op_type == "CastLike" and node.domain == "":
            _settle_cast(node, model.graph)
    for node in list(model.graph.all_nodes()):
        if node.op_type in ("Conv", "ConvTranspose") and node.domain == "":
            _drop_zero_bias(node)


def _settle_cast(node: ir.Node, graph: ir.Graph) -> None:
    """Let a CastLike become a Cast or a constant, or go."""
    value, like = node.inputs
    result = node.outputs[0]
    if value is None or like is None or like.dtype is None or value.dtype is None:
        return
    array = _number(value)
    if value.dtype == like.dtype and not result.is_graph_output():
        ir.convenience.replace_all_uses_with(result, value)
        _remove_unread(node)
    elif (
        array is not None
        and array.size <= _MOST
        and like.dtype in _CONVERTED
        and node.graph is graph
        and not result.is_graph_output()
    ):
        with np.errstate(all="ignore"):  # what is too large becomes infinite, as in onnxruntime
            made = array.astype(like.dtype.numpy())
        new = replace_by_initializer(graph, node, ir.tensor(made, dtype=like.dtype))
        new.meta[FROM_CONSTANT] = True
    else:
        node.op_type = "Cast"
        node.resize_inputs(1)
        node.attributes["to"] = ir.AttrInt64("to", int(like.dtype))


def _drop_zero_bias(layer: ir.Node) -> None:
    bias = layer.inputs[2] if len(layer.inputs) > 2 else None
    maker = None if bias is None else bias.producer()
    if maker is None or (maker.domain, maker.op_type) != ("", "Expand"):
        return
    value = _number(maker.inputs[0])
    if value is not None and value.size == 1 and not value.any():
        layer.resize_inputs(2)
        _remove_unread(maker)


def _number(value: ir.Value | None) -> np.ndarray | None:
    return constant_array(value) if value is not None and FROM_CONSTANT in value.meta else None


def _remove_unread(node: ir.Node) -> None:
    """Remove a node that nobody reads, and those that nobody reads then."""
    if any(v.uses() or v.is_graph_output() for v in node.outputs) or node.graph is None:
        return
    makers = {maker for v in node.inputs if v is not None and (maker := v.producer()) is not None}
    node.graph.remove(node, safe=True)
    for maker in makers:
        _remove_unread(maker)
