"""What stands behind a value: the nodes that a kernel may take in."""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxtrain.offline.graph.kernels import place_of
from onnxtrain.offline.graph.shapes import constant_array, dims_of, same_dims

Bounds = tuple[float, float]


def only_reader(value: ir.Value) -> ir.Node | None:
    """Return the node of the same graph that reads a value, if there is one alone, in no group."""
    readers = {node for node, _ in value.uses()}
    if len(readers) != 1 or value.is_graph_output():
        return None
    (reader,) = readers
    producer = value.producer()
    beside = producer is not None and reader.graph is producer.graph
    return reader if beside and place_of(reader) is None else None


def other_summand(node: ir.Node, y: ir.Value) -> ir.Value | None:
    """Return what a node adds to a value, if it is a sum and both have the same shape."""
    if node.op_type != "Add" or node.domain != "":
        return None
    other = node.inputs[1] if node.inputs[0] is y else node.inputs[0]
    dims, own = None if other is None else dims_of(other), dims_of(y)
    if other is y or dims is None or own is None or not same_dims(dims, own):
        return None
    return other


def bounds_of(node: ir.Node) -> Bounds | None:
    """Return the bounds of a node that keeps values between two numbers."""
    if node.domain != "" or node.op_type not in ("Relu", "Clip"):
        return None
    if node.op_type == "Relu":
        return 0.0, math.inf
    limits = [-math.inf, math.inf]
    for place, value in enumerate(node.inputs[1:]):
        if value is None:
            continue
        known = constant_array(value)
        if known is None or known.size != 1:
            return None
        limits[place] = float(known.reshape(()))
    return limits[0], limits[1]
