"""Operators without a rule, expanded by the function body that the ONNX standard gives them.

Mish is x tanh(softplus(x)), Attention a dozen nodes. Where a gradient has to pass such an operator
and it has no rule, it is replaced by its definition, whose operators have rules or definitions in
turn: the one in `definitions.py`, if there is one, else the one of the standard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx
import onnx_ir as ir
from onnx import inliner

from onnxtrain.offline.autodiff.definitions import definition_of, splice, write_definition
from onnxtrain.offline.autodiff.engine import ActivePath
from onnxtrain.offline.autodiff.registry import refusal
from onnxtrain.offline.graph.folding import fold_constants
from onnxtrain.offline.graph.infer import SMALL, infer_shapes
from onnxtrain.offline.graph.names import Names, label_of
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.subgraphs import subgraphs_of, take_out


def expand_by_definition(model: ir.Model, path: Callable[[], ActivePath]) -> None:
    """Expand the active nodes that have no rule but a definition, until none is left.

    The values that the nodes made stay the same objects, with the same names.
    """
    opset = model.opset_imports[""]
    while found := [n for n in path().without_rule() if _has_definition(n, opset)]:
        op = Ops(model.graph, opset)
        with op.arithmetic():
            expanded = [_expand(op, node, model.ir_version) for node in found]
        if not any(expanded):
            return
        infer_shapes(model)


def _has_definition(node: ir.Node, opset: int) -> bool:
    if node.domain != "" or refusal(node.op_type) is not None:
        return False
    if definition_of(node) is not None:
        return True
    if subgraphs_of(node):
        return False
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return False
    return has_function_body(schema)


def has_function_body(schema: Any) -> bool:
    """Tell whether the standard defines an operator by other operators."""
    return bool(schema.has_function or schema.has_context_dependent_function)


def _expand(op: Ops, node: ir.Node, ir_version: int) -> bool:
    own = definition_of(node)
    if own is not None and own.is_ready(node) and write_definition(op, node, own) is not None:
        return True
    body = function_body(node, op.opset, ir_version)
    if body is None:
        return False
    _insert(node, ir.serde.deserialize_graph(body), op.names)
    return True


def function_body(node: ir.Node, opset: int, ir_version: int) -> onnx.GraphProto | None:
    """Return the body that the standard gives a node, in the names of its inputs and outputs.

    Some bodies depend on the types and shapes of the inputs; None where these are not known.
    """
    given = {v.name: v for v in node.inputs if v is not None and v.name}
    if any(v.dtype is None for v in given.values()):
        return None
    constants = {
        name: ir.serde.serialize_tensor(v.const_value)
        for name, v in given.items()
        if v.const_value is not None and not v.is_graph_input() and v.const_value.nbytes <= SMALL
    }
    for name, tensor in constants.items():
        tensor.name = name
    call = ir.serde.serialize_node(node)
    _state_defaults(call, opset)
    types = {name: ir.serde.serialize_value(v).type for name, v in given.items()}
    function = _function(call, [types.get(name, onnx.TypeProto()) for name in call.input], opset)
    if not function.node:
        return None
    call.domain = function.domain
    graph = onnx.helper.make_graph(
        [call],
        "definition",
        [ir.serde.serialize_value(v) for name, v in given.items() if name not in constants],
        [onnx.helper.make_empty_tensor_value_info(v.name) for v in node.outputs if v.name],
        list(constants.values()),
    )
    imports = [onnx.helper.make_opsetid("", opset), onnx.helper.make_opsetid(function.domain, 1)]
    whole = onnx.helper.make_model(
        graph, opset_imports=imports, functions=[function], ir_version=ir_version
    )
    return fold_constants(inliner.inline_local_functions(whole)).graph


def _function(
    call: onnx.NodeProto, types: Sequence[onnx.TypeProto], opset: int
) -> onnx.FunctionProto:
    """Return the newest body that is valid at an opset, as a function of a domain of its own."""
    schema: Any = onnx.defs.get_schema(call.op_type, opset, "")
    if schema.has_function:
        version = max(v for v in schema.function_opset_versions if v <= opset)
        data = schema.get_function_with_opset_version(version)
    else:
        versions = schema.context_dependent_function_opset_versions
        data = schema.get_context_dependent_function_with_opset_version(
            max(v for v in versions if v <= opset),
            call.SerializeToString(),
            [t.SerializeToString() for t in types],
        )
    function: onnx.FunctionProto = onnx.FunctionProto.FromString(data)
    function.domain = "definition"
    for opset_import in function.opset_import:
        opset_import.version = opset
    return function


def _state_defaults(node: onnx.NodeProto, opset: int) -> None:
    """Write out the defaults of attributes, which bodies refer to."""
    present = {a.name for a in node.attribute}
    for name, attribute in onnx.defs.get_schema(node.op_type, opset, "").attributes.items():
        default = attribute.default_value
        if name not in present and default.type != onnx.AttributeProto.UNDEFINED:
            node.attribute.append(default)


def _insert(node: ir.Node, body: ir.Graph, names: Names) -> None:
    """Put the nodes of a body, under new names, in the place of a node."""
    outer = {v.name: v for v in node.inputs if v is not None}
    results = dict(zip((v for v in node.outputs if v.name), body.outputs, strict=True))
    for inner in (*body.inputs, *body.initializers.values()):
        ir.convenience.replace_all_uses_with(inner, outer[inner.name])
    label = label_of(node)
    for graph in (body, *body.subgraphs()):
        made = [v for n in graph for v in n.outputs]
        for value in made if graph is body else (*graph.inputs, *made):
            if value.name:
                value.name = names.fresh(f"{label}/{value.name.split('__')[0]}")
        for each in graph:
            each.name = names.fresh(f"{label}/{each.op_type}")
    splice(node, take_out(body)[1], results)
