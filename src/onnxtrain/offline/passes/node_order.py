"""The order of nodes of a model as a proto: onnxruntime does not mind it, onnx's inference does."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import onnx

from onnxtrain.offline.passes.lora.graph_index import captured


def in_order(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model whose nodes come after those that they read; one with a cycle stays."""
    nodes = model.graph.node
    makers = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    needed = {
        i: [makers[name] for name in (*node.input, *captured(node)) if name in makers]
        for i, node in enumerate(nodes)
    }
    if all(before < i for i, others in needed.items() for before in others):
        return model
    try:
        order = list(TopologicalSorter(needed).static_order())
    except CycleError:
        return model  # which is said where the graph is read
    made = onnx.ModelProto()
    made.CopyFrom(model)
    del made.graph.node[:]
    made.graph.node.extend(nodes[i] for i in order)
    return made
