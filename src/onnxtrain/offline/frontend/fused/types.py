"""Type and rank of one node's outputs, without a pass over the whole model.

While fused operators are expanded in order, each plain node between them gets its types as soon as
its inputs have theirs. Inference of the whole model after each expansion would say the same, at a
cost that grows with the square of the depth.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

from onnxtrain.offline.graph.shapes import constant_array
from onnxtrain.offline.graph.subgraphs import subgraphs_of

_LARGE = 64  # elements; axes and shapes are shorter


def infer_node(node: ir.Node, opset: int) -> None:
    """Infer the outputs of a plain node where their type or rank is still unknown."""
    unknown = [v for v in node.outputs if v.name and (v.dtype is None or v.shape is None)]
    if not unknown or node.domain != "":
        return
    if node.op_type == "If":
        _take_from_branch(node)
        return
    given = [v for v in node.inputs if v is not None]
    if any(v.type is None for v in given) or subgraphs_of(node):
        return
    found = _infer(node, given, opset)
    for value in unknown:
        proto = found.get(value.name or "")
        if proto is not None:
            value.type = value.type or ir.serde.deserialize_type_proto_for_type(proto)
            value.shape = value.shape or ir.serde.deserialize_type_proto_for_shape(proto)


def _infer(node: ir.Node, given: list[ir.Value], opset: int) -> dict[str, onnx.TypeProto]:
    types = {v.name: ir.serde.serialize_value(v).type for v in given if v.name}
    data = {}
    for value in given:
        array = constant_array(value) if _is_small(value) else None
        if array is not None and value.name:
            data[value.name] = onnx.numpy_helper.from_array(array, value.name)
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
        return onnx.shape_inference.infer_node_outputs(
            schema, ir.serde.serialize_node(node), types, data,
            opset_imports=[onnx.helper.make_opsetid("", opset)],
        )  # fmt: skip
    except Exception:  # kinds differ with what is wrong
        return {}  # the strict inference of the whole model, which follows, tells what is wrong


def _is_small(value: ir.Value) -> bool:
    tensor = value.const_value
    return tensor is not None and tensor.size <= _LARGE


def _take_from_branch(node: ir.Node) -> None:
    inner = node.attributes["then_branch"].value.outputs
    other = node.attributes["else_branch"].value.outputs
    for value, a, b in zip(node.outputs, inner, other, strict=True):
        value.type = value.type or a.type
        same_rank = a.shape is not None and b.shape is not None and len(a.shape) == len(b.shape)
        if value.shape is None and same_rank:
            value.shape = ir.Shape([None] * len(a.shape))
