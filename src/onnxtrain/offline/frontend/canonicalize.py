"""Models that runtimes tolerate, brought into the form that the standard asks for."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from onnxtrain.errors import ModelError
from onnxtrain.offline.graph.subgraphs import subgraphs_of


def sort_nodes(model: ir.Model) -> None:
    """Sort nodes topologically; a cycle is an error.

    The standard asks for that order, but onnxruntime does not.
    """
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        try:
            graph.sort()
        except ValueError:
            raise ModelError(
                f"the graph {graph.name!r} has a cycle: there is no order in which its nodes can "
                f"be computed ({_in_cycle(graph)})"
            ) from None


def _in_cycle(graph: ir.Graph) -> str:
    """Name some nodes that wait for each other."""
    stuck: list[ir.Node] = []
    for body in (graph, *graph.subgraphs()):
        waiting = {node: _needed(node) for node in body}
        while ready := [
            node for node, needed in waiting.items() if waiting.keys().isdisjoint(needed)
        ]:
            for node in ready:
                del waiting[node]
        stuck.extend(waiting)
    names = [repr(node.name or node.op_type) for node in stuck]
    return f"{', '.join(names[:8])}{' …' if len(names) > 8 else ''}"


def _needed(node: ir.Node) -> set[ir.Node | None]:
    """Return the nodes that make what a node uses, itself or in its subgraphs."""
    inner = [n for body in subgraphs_of(node) for n in body.all_nodes()]
    return {v.producer() for n in (node, *inner) for v in n.inputs if v is not None}


def trim(model: ir.Model) -> None:
    """Drop the empty names after the last input or output of each node.

    Nodes without any output go too: nothing can depend on them. An operator that takes any number
    of outputs counts the empty ones, as Split does.
    """
    opset = model.opset_imports.get("", 1)
    for graph in (model.graph, *model.graph.subgraphs()):
        for node in list(graph):
            schema = _schema(node, opset)
            needed, allowed = (
                (0, len(node.outputs)) if schema is None else (schema.min_input, schema.max_output)
            )
            inputs = len(node.inputs)
            while inputs > needed and node.inputs[inputs - 1] is None:
                inputs -= 1
            if inputs < len(node.inputs):
                node.resize_inputs(inputs)
            outputs = len(node.outputs)
            while outputs > allowed and not node.outputs[outputs - 1].name:
                outputs -= 1
            if outputs < len(node.outputs):
                node.resize_outputs(outputs)
            if not node.outputs:
                graph.remove(node, safe=True)


def _schema(node: ir.Node, opset: int) -> onnx.defs.OpSchema | None:
    if node.domain != "" or not onnx.defs.has(node.op_type, opset, ""):
        return None
    return onnx.defs.get_schema(node.op_type, opset, "")
