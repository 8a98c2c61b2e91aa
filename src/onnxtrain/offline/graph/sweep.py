"""Dead code: what no output of a graph needs."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import onnx_ir as ir

from onnxtrain.offline.graph.subgraphs import release, subgraphs_of


def sweep(graph: ir.Graph, keep: Collection[ir.Value] = ()) -> None:
    """Remove nodes and initializers that no output, and no value to keep, needs; in subgraphs too.

    Graph inputs and outputs stay, used or not: they are the interface of the model, or of a body.
    The graph is in topological order, so one pass from its end meets every use before its value.
    """
    dead, kept = [], set(keep)
    for node in reversed(graph):
        if any(v.uses() or v.is_graph_output() or v in kept for v in node.outputs):
            for body in subgraphs_of(node):
                sweep(body)
        else:
            release(node)
            dead.append(node)
    graph.remove(dead)
    for name, value in list(graph.initializers.items()):
        if not (value.uses() or value.is_graph_output() or value.is_graph_input() or value in kept):
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
