"""Relu and Clip, which quantizing their result does as well.

Integers end where their range ends. A range that begins at 0 makes a Relu superfluous, one up to 6
a Clip at 6; so deployed models have neither, and integer kernels do without. Training keeps them,
for their gradients and for the ranges, which never leave the bounds.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.graph.initializers import remove_node
from onnxtrain.offline.graph.op_facts import KEEPS_RANGE, RANGE_BOUNDS
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import constant_array

Bounds = tuple[float, float]
_LEAST = -float(np.finfo(np.float32).max)
# In the notes of a QuantizeLinear: what it reads is bounded by its range anyway, or is made by a
# layer of floats.
SOURCE, BOUNDED, FLOAT_LAYER = "onnxtrain.source", "bounded", "float layer"


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


def keeps_range(node: ir.Node) -> bool:
    """Whether a node only moves elements of its first input, as Resize to the nearest does."""
    if node.domain or node.op_type not in KEEPS_RANGE:
        return False
    read = node.attributes
    return node.op_type != "Resize" or (
        read.get_string("mode", "nearest") == "nearest"
        and read.get_string("coordinate_transformation_mode", "") != "tf_crop_and_resize"
    )


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


def drop_bounds(op: Ops, graph: ir.Graph) -> bool:
    """Let quantizers of an evaluation graph read what is not bounded yet; tell if there are such.

    Between a layer of floats and its quantizer, there has to be something: or else onnxruntime,
    from version 1.21 on, quantizes the weights of that layer too. It takes out a Relu or a Clip
    there, but no Max.
    """
    is_changed = False
    for node in list(graph):
        noted, x = node.metadata_props.get(SOURCE), node.inputs[0] if node.inputs else None
        if noted is None or x is None:
            continue
        source, bounds = take_bounds(x)
        if noted == FLOAT_LAYER:
            low = _LEAST if bounds is None else max(bounds[0], _LEAST)
            source = op.type_as(op.Max(source, low), source)
        node.replace_input_with(0, source)
        _remove_unread(graph, x)
        _take_name(source, x)
        is_changed = True
    return is_changed


def _take_name(source: ir.Value, bounded: ir.Value) -> None:
    """Call what is bounded by its range alone as what it means, if nothing else reads it."""
    node = bounded.producer()
    is_gone = bounded is not source and (node is None or node.graph is None)
    if is_gone and len(source.uses()) == 1 and not source.is_graph_output():
        name, bounded.name = bounded.name, f"{bounded.name}_before"
        source.name = name


def _remove_unread(graph: ir.Graph, value: ir.Value) -> None:
    while not value.uses() and not value.is_graph_output():
        node = value.producer()
        if node is None or bounds_of(node) is None or node.inputs[0] is None:
            return
        value = node.inputs[0]
        remove_node(graph, node)


def _first_input(value: ir.Value) -> ir.Value | None:
    node = value.producer()
    return None if node is None else node.inputs[0]
