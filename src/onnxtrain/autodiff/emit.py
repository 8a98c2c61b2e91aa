"""The last step before a model leaves: sweep what nobody needs, stamp the versions.

A model that claims a newer opset or IR version than its content needs is refused by runtimes that
could run it. So the stamp is computed from what the model contains, never from what made it.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

FLOOR_OPSET = 18


def sweep(graph: ir.Graph) -> None:
    """Remove nodes and initializers from which no output can be reached.

    Graph inputs stay, used or not: they are the model's interface.
    """
    for node in reversed(graph):
        if not any(output.uses() or output.is_graph_output() for output in node.outputs):
            for index in range(len(node.inputs)):
                node.replace_input_with(index, None)
            _release_subgraphs(node)
            graph.remove(node)
    for name, value in list(graph.initializers.items()):
        if not (value.uses() or value.is_graph_output() or value.is_graph_input()):
            del graph.initializers[name]


def _release_subgraphs(node: ir.Node) -> None:
    """Give up the uses that the nodes inside a removed node's subgraphs make of outer values."""
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            for inner in attribute.value:
                for index in range(len(inner.inputs)):
                    inner.replace_input_with(index, None)
                _release_subgraphs(inner)


def stamp(model: ir.Model) -> None:
    """Set the lowest opset and IR version that the content permits."""
    model.ir_version = onnx.helper.find_min_ir_version_for(
        [onnx.helper.make_opsetid(d, v) for d, v in model.opset_imports.items()],
        ignore_unknown=True,
    )
