"""Dead code: what no output of a graph needs."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import onnx_ir as ir

from onnxtrain.offline.graph.kernels import read_by_kernel_alone
from onnxtrain.offline.graph.subgraphs import release, subgraphs_of


def sweep(graph: ir.Graph, keep: Collection[ir.Value] = ()) -> None:
    """Remove nodes and initializers that no output, and no value to keep, needs; in subgraphs too.

    Graph inputs and outputs stay, used or not: they are the interface of the model, or of a body.
    The graph is in topological order, so one pass from its end meets every use before its value.
    What only native kernels read stays as long as the nodes that they stand in for.
    """
    _sweep(graph, set(keep), set())


def _sweep(graph: ir.Graph, kept: Collection[ir.Value], named: set[str]) -> None:
    def is_needed(value: ir.Value) -> bool:
        used = bool(value.uses()) or value.is_graph_output()
        return used or value in kept or value.name in named

    dead = []
    for node in reversed(graph):
        if any(map(is_needed, node.outputs)):
            named.update(read_by_kernel_alone(node))
            for body in subgraphs_of(node):
                _sweep(body, (), named)
        else:
            release(node)
            dead.append(node)
    graph.remove(dead)
    for name, value in list(graph.initializers.items()):
        if not (is_needed(value) or value.is_graph_input()):
            del graph.initializers[name]


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the garbage collector from walking through graphs, which are many linked objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
