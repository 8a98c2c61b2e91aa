"""Operators without a rule, expanded by the function body that the ONNX standard gives them.

Many operators are defined by others: Mish is x tanh(softplus(x)), Attention a dozen nodes. Where no
rule is registered for such an operator and a gradient has to pass it, it is replaced by its
definition, which has rules or definitions in turn: the one in `definitions.py`, if there is one,
else the body that onnx writes when its inliner is given a model of that one node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnx
import onnx_ir as ir
from onnx import inliner

from onnxtrain.autodiff.definitions import definition_of, splice, write_definition
from onnxtrain.autodiff.engine import ActivePath, bodies_of
from onnxtrain.autodiff.folding import fold_constants
from onnxtrain.autodiff.infer import SMALL, infer_shapes
from onnxtrain.autodiff.ops import Names, Ops
from onnxtrain.autodiff.registry import refusal


def expand_by_definition(model: ir.Model, path: Callable[[], ActivePath]) -> None:
    """Expand the active nodes that have no rule but a definition, until none is left.

    The values that the nodes made stay the same objects, with the same names.
    """
    opset = model.opset_imports[""]
    while found := list(_candidates(path(), opset)):
        op = Ops(model.graph, opset)
        with op.arithmetic():
            expanded = [_expand(op, node, model.ir_version) for node in found]
        if not any(expanded):
            return
        infer_shapes(model)


def _candidates(path: ActivePath, opset: int) -> Iterator[ir.Node]:
    """Yield the active nodes without a rule that have a definition, those in branches included."""
    for node in path.without_rule():
        if node.domain == "" and refusal(node.op_type) is None and not bodies_of(node):
            if definition_of(node) is not None or _has_function_body(node, opset):
                yield node
    for node in path.nodes:
        if node.op_type == "If" and node.domain == "":
            for branch in path.inside(node):
                yield from _candidates(branch, opset)


def _has_function_body(node: ir.Node, opset: int) -> bool:
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return False
    return bool(schema.has_function or schema.has_context_dependent_function)


def _expand(op: Ops, node: ir.Node, ir_version: int) -> bool:
    own = definition_of(node)
    if own is not None and own.is_ready(node) and write_definition(op, node, own) is not None:
        return True
    body = function_body(node, op.opset, ir_version)
    if body is None:
        return False
    nodes, results = _as_nodes(node, body, op.names)
    splice(node, nodes, results)
    return True


def function_body(node: ir.Node, opset: int, ir_version: int) -> onnx.GraphProto | None:
    """Return the body that the standard gives a node, in the names of its inputs and outputs.

    Some bodies depend on the types of the inputs, or on constants among them. None means that onnx
    cannot tell the body, as a type is not known.
    """
    given = {v.name: v for v in node.inputs if v is not None and v.name}
    if any(v.dtype is None for v in given.values()):
        return None
    constants = [v for v in given.values() if _is_small_constant(v)]
    proto = ir.serde.serialize_node(node)
    _state_defaults(proto, opset)
    graph = onnx.helper.make_graph(
        [proto],
        "definition",
        [ir.serde.serialize_value(v) for v in given.values() if v not in constants],
        [onnx.helper.make_empty_tensor_value_info(v.name) for v in node.outputs if v.name],
        [_as_tensor(v) for v in constants],
    )
    whole = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=ir_version
    )
    inlined = inliner.inline_selected_functions(
        whole, [("", node.op_type)], inline_schema_functions=True
    )
    if any(n.op_type == node.op_type and n.domain == "" for n in inlined.graph.node):
        return None
    return fold_constants(inlined).graph


def _state_defaults(node: onnx.NodeProto, opset: int) -> None:
    """Write out attributes that have a default: the inliner leaves references to absent ones."""
    present = {a.name for a in node.attribute}
    for name, attribute in onnx.defs.get_schema(node.op_type, opset, "").attributes.items():
        default = attribute.default_value
        if name not in present and default.type != onnx.AttributeProto.UNDEFINED:
            node.attribute.append(default)


def _is_small_constant(value: ir.Value) -> bool:
    tensor = value.const_value
    return tensor is not None and not value.is_graph_input() and tensor.nbytes <= SMALL


def _as_tensor(value: ir.Value) -> onnx.TensorProto:
    assert value.const_value is not None
    proto: onnx.TensorProto = ir.serde.serialize_tensor(value.const_value)
    proto.name = value.name or ""
    return proto


def _as_nodes(
    node: ir.Node, body: onnx.GraphProto, names: Names
) -> tuple[list[ir.Node], dict[ir.Value, ir.Value]]:
    """Turn the nodes of a body into nodes of the graph, and say what stands for which output."""
    label = node.name or node.outputs[0].name or node.op_type
    values = {v.name: v for v in node.inputs if v is not None and v.name}
    nodes = []
    for proto in body.node:
        outputs = [ir.Value(name="") for _ in proto.output]
        for name, value in zip(proto.output, outputs, strict=True):
            if name:
                value.name = names.fresh(f"{label}/{name.split('__')[0]}")
                values[name] = value
        nodes.append(
            ir.Node(
                proto.domain,
                proto.op_type,
                [values[name] if name else None for name in proto.input],
                [ir.serde.deserialize_attribute(a) for a in proto.attribute],
                outputs=outputs,
                name=names.fresh(f"{label}/{proto.op_type}"),
            )  # fmt: skip
        )
    return nodes, {v: values[v.name] for v in node.outputs if v.name and v.name in values}
