"""Relu and Clip, which quantizing their result does as well.

Integers end where their range ends. A range that begins at 0 makes a Relu superfluous, one up to 6
a Clip at 6; so neither is computed where its result is quantized, in training as in deployment. The
range of such a result never leaves the bounds.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxtrain.offline.graph.initializers import remove_node
from onnxtrain.offline.graph.op_facts import RANGE_BOUNDS
from onnxtrain.offline.graph.shapes import constant_array

Bounds = tuple[float, float]
BOUNDS = "onnxtrain.bounds"  # in the notes of a QuantizeLinear: what its range stays in


def bounds_of(node: ir.Node | None) -> Bounds | None:
    """Return the bounds that a node sets, if it is Relu, or Clip around 0 with known bounds."""
    if node is None or node.domain or node.op_type not in RANGE_BOUNDS:
        return None
    if node.op_type == "Relu":
        return 0.0, math.inf
    found = [-math.inf, math.inf]
    for place, value in enumerate(node.inputs[1:3]):
        if value is not None:
            known = constant_array(value)
            if known is None or known.size != 1:
                return None
            found[place] = float(known.reshape(-1)[0])
    low, high = found
    return (low, high) if low <= 0 <= high and low < high else None


def take_bounds(value: ir.Value) -> tuple[ir.Value, Bounds | None]:
    """Return what a value is before Relu or Clip bound it, and the bounds; or itself, and None."""
    source, bounds = value, None
    while (found := bounds_of(source.producer())) is not None:
        x = _first_input(source)
        if x is None or x.is_initializer():
            break
        both = found if bounds is None else (max(found[0], bounds[0]), min(found[1], bounds[1]))
        if both[0] >= both[1]:
            break
        source, bounds = x, both
    return source, bounds


def is_within(given: Bounds, bounds: Bounds) -> bool:
    """Whether a range ends where the bounds do, or before; a given model may have another."""
    slack = 1e-5 * (given[1] - given[0])
    return bounds[0] - slack <= given[0] and given[1] <= bounds[1] + slack


def remove_bounds(graph: ir.Graph, value: ir.Value, source: ir.Value) -> None:
    """Remove the nodes between a value that nothing reads any more and its source."""
    while value is not source and not value.uses() and not value.is_graph_output():
        node = value.producer()
        assert node is not None
        x = _first_input(value)
        remove_node(graph, node)
        if x is None:
            return
        value = x


def _first_input(value: ir.Value) -> ir.Value | None:
    node = value.producer()
    return None if node is None else node.inputs[0]


def note_bounds(node: ir.Node, bounds: Bounds) -> None:
    """Note on a QuantizeLinear that its range stays within bounds."""
    node.metadata_props[BOUNDS] = f"{bounds[0]!r} {bounds[1]!r}"


def noted_bounds(node: ir.Node) -> Bounds:
    """Return the bounds that are noted on a QuantizeLinear."""
    noted = node.metadata_props.get(BOUNDS)
    if noted is None:
        return -math.inf, math.inf
    low, high = map(float, noted.split())
    return low, high
