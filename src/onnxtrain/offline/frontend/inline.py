"""Calls of model-local functions, replaced by what they stand for.

Values keep their names where those are free; what a call returns has the name that the caller gave
it. A result that is just handed through gets a node of its own, so that inputs keep their names.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onnxtrain.errors import ModelError
from onnxtrain.offline.graph.initializers import rename_initializer
from onnxtrain.offline.graph.names import Names, label_of
from onnxtrain.offline.graph.subgraphs import subgraphs_of, take_out


def inline_functions(model: ir.Model) -> None:
    """Replace every call of a model-local function by its body, in place."""
    if not model.functions:
        return
    names = Names.of(model.graph)
    waiting = [n for n in model.graph.all_nodes() if n.op_identifier() in model.functions]
    while waiting:
        node = waiting.pop()
        function = model.functions[node.op_identifier()]
        for domain, version in function.opset_imports.items():
            # Where it has another, the operators are the same in both: the checker has seen to it.
            model.opset_imports.setdefault(domain, version)
        written = _write_body(node, function, names)
        waiting.extend(n for n in written if n.op_identifier() in model.functions)
    model.functions.clear()


def _write_body(node: ir.Node, function: ir.Function, names: Names) -> list[ir.Node]:
    """Put the body of a function in the place of a call; return all its nodes, in subgraphs too."""
    call = f"node {label_of(node)!r} calls the function {function.name!r}"
    for given, taken, kind in (
        (node.inputs, function.inputs, "inputs"),
        (node.outputs, function.outputs, "outputs"),
    ):
        if len(given) > len(taken):
            raise ModelError(
                f"{call} of the domain {function.domain!r} with {len(given)} {kind}; it has "
                f"{len(taken)}"
            )
    graph, body = node.graph, function.clone().graph
    assert graph is not None
    attributes = {
        name: attribute
        for name, attribute in (*function.attributes.items(), *node.attributes.items())
        if attribute.value is not None
    }
    for inner in body:
        _adopt(inner, attributes, names)
    results, nodes = take_out(body)
    missing = [None] * (len(body.inputs) - len(node.inputs))
    inputs = dict(zip(body.inputs, (*node.inputs, *missing), strict=True))
    for parameter, value in inputs.items():
        if value is not None:
            ir.convenience.replace_all_uses_with(parameter, value, replace_graph_outputs=True)
        for user, index in list(parameter.uses()):
            user.replace_input_with(index, None)
    graph.insert_before(node, nodes)
    made = {value for inner in nodes for value in inner.outputs}
    for old, result in zip(node.outputs, results, strict=False):
        if not old.name:
            continue
        new = inputs.get(result, result)
        if new is None:
            raise ModelError(f"{call} and uses an output of it that is an input it leaves out")
        if new not in made:  # handed through, or an output already
            identity = ir.node("Identity", [new])
            graph.insert_before(node, [identity])
            new = identity.outputs[0]
        made.discard(new)
        new.name, new.type, new.shape = old.name, new.type or old.type, new.shape or old.shape
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    bodies = [body for inner in nodes for body in subgraphs_of(inner)]
    return [*nodes, *(inner for body in bodies for inner in body.all_nodes())]


def _adopt(node: ir.Node, attributes: Mapping[str, ir.Attr], names: Names) -> None:
    """Give a copied node, and what it makes, new names, and the attributes of the call."""
    for name, attribute in list(node.attributes.items()):
        found = attributes.get(attribute.ref_attr_name or "")
        if attribute.is_ref() and found is None:
            del node.attributes[name]
        elif found is not None:
            node.attributes[name] = ir.Attr(name, found.type, found.value)
    for body in subgraphs_of(node):
        for value in [*body.inputs, *body.initializers.values()]:
            rename_initializer(value, names.fresh(value.name or ""))
        for inner in body:
            _adopt(inner, attributes, names)
    node.metadata_props.clear()
    node.name = names.fresh(node.name) if node.name else None
    for value in node.outputs:
        value.name = names.fresh(value.name) if value.name else value.name
