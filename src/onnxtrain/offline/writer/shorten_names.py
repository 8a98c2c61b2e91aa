"""Smaller graph files: short names for what only the graph itself refers to.

A gradient graph has ten nodes for each one of the model, and a name is written where a value is
made, where it is read and where its shape is stated. That was three quarters of a training graph.
What a user may ask for by name keeps its name: inputs, outputs, parameters and every value of the
forward pass. Nodes keep their names too, which is what errors and profiles of a runtime show.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import onnx
import onnx_ir as ir

from onnxtrain.format.names import FUNCTION_DOMAIN
from onnxtrain.offline.blocks.values import all_graphs, defined_names, rename
from onnxtrain.offline.graph.subgraphs import values_of

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def names_in(graph: ir.Graph) -> set[str]:
    """Return the names of all values of a graph and its subgraphs."""
    graphs = (graph, *graph.subgraphs())
    return {str(value.name) for each in graphs for value in values_of(each)}


def shorten_names(model: onnx.ModelProto, forward: Collection[str]) -> None:
    """Shorten the names of values that the forward pass does not have, and state no shape of them.

    A runtime infers shapes from what is left; it cannot see through native kernels, so that their
    results keep their shapes. Without, memory that they and others let go is not used again.
    """
    kept = set(forward)
    kept |= {value.name for value in (*model.graph.input, *model.graph.output)}
    kept |= {t.name for t in model.graph.initializer if t.external_data}
    taken = kept | {name for graph in all_graphs(model.graph) for name in defined_names(graph)}
    fresh = (name for name in _short_names() if name not in taken)
    shorter: dict[str, str] = {"": ""}
    for graph in list(all_graphs(model.graph)):
        calls = {
            name for node in graph.node if node.domain == FUNCTION_DOMAIN for name in node.output
        }
        stated = [value for value in graph.value_info if value.name in kept or value.name in calls]
        del graph.value_info[:]
        graph.value_info.extend(stated)
        for name in defined_names(graph):
            if name not in kept and name not in shorter and len(name) > 4:
                shorter[name] = next(fresh)
    for graph in all_graphs(model.graph):
        rename(graph, shorter)


def _short_names() -> Iterator[str]:
    number = 0
    while True:
        digits, rest = "", number
        while rest or not digits:
            digits, rest = _DIGITS[rest % 36] + digits, rest // 36
        yield f"_{digits}"
        number += 1
