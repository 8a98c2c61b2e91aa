"""Models that are quantized already (QDQ): back to floats, with the places and ranges they had.

Integer weights become floats that can train, and the pairs of QuantizeLinear and DequantizeLinear
are taken out; they are written again in the same places, with scales that follow training.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import ArgumentError
from onnxtrain.offline.graph.initializers import initializer, remove_node
from onnxtrain.offline.graph.names import Names, label_of
from onnxtrain.offline.graph.shapes import constant_array

Array = np.ndarray[Any, Any]
_BOUNDS = {
    ir.DataType.UINT8: (0, 255), ir.DataType.INT8: (-128, 127),
    ir.DataType.UINT16: (0, 65535), ir.DataType.INT16: (-32768, 32767),
}  # fmt: skip


@dataclass
class Lifted:
    """Where a model was quantized, and with which ranges."""

    ranges: dict[ir.Value, tuple[float, float]] = field(default_factory=dict)
    roots: dict[ir.Value, ir.Value] = field(default_factory=dict)  # what shares a range
    weights: int = 0

    def __bool__(self) -> bool:
        return bool(self.weights or self.ranges)


def lift(model: ir.Model) -> Lifted:
    """Take the quantization out of a canonical model, in place; return where it was."""
    graph, names, found = model.graph, Names.of(model.graph), Lifted()
    by_scale: dict[tuple[ir.Value | None, ir.Value | None], ir.Value] = {}
    for node in list(graph):
        if node.op_type != "DequantizeLinear" or node.domain != "":
            continue
        q = node.inputs[0]
        if q is None:
            continue
        if q.is_initializer():
            _lift_constant(graph, node, q, names)
            found.weights += 1
            continue
        source = q.producer()
        if source is None or source.op_type != "QuantizeLinear" or source.domain != "":
            raise ArgumentError(
                f"quantize: {label_of(node)} reads integers that no QuantizeLinear made. Models "
                "that compute on integers cannot train for them: take the float model, or one in "
                "QDQ form"
            )
        _lift_pair(graph, source, node, found, by_scale)
    return found


def _lift_constant(graph: ir.Graph, node: ir.Node, q: ir.Value, names: Names) -> None:
    levels, scale = constant_array(q), constant_array(node.inputs[1])
    zero = constant_array(node.inputs[2]) if len(node.inputs) > 2 else None
    if levels is None or scale is None:
        raise ArgumentError(f"quantize: the scale of {label_of(node)} is computed")
    read = node.attributes
    axis, block = read.get_int("axis", 1), read.get_int("block_size", 0)
    factor = _spread(scale.astype(np.float32), levels.shape, axis, block)
    numbers = levels.astype(np.float32)
    if zero is not None:
        numbers = numbers - _spread(zero.astype(np.float32), levels.shape, axis, block)
    name = (q.name or "weight").removesuffix("_quantized")
    name = names.fresh(name) if name in graph.initializers else name
    made = initializer(name, ir.Tensor(numbers * factor, name=name))
    graph.register_initializer(made)
    ir.convenience.replace_all_uses_with(node.outputs[0], made, replace_graph_outputs=True)
    remove_node(graph, node)


def _spread(values: Array, shape: tuple[int, ...], axis: int, block: int) -> Array:
    """Give scales the shape in which they broadcast against integers."""
    if values.size == 1:
        return values.reshape(())
    if block:
        return np.repeat(values, block, axis)[tuple(slice(n) for n in shape)]
    wide = [1] * len(shape)
    wide[axis % len(shape)] = -1
    return values.reshape(wide)


def _lift_pair(
    graph: ir.Graph,
    source: ir.Node,
    node: ir.Node,
    found: Lifted,
    by_scale: dict[tuple[ir.Value | None, ir.Value | None], ir.Value],
) -> None:
    x, scale = source.inputs[0], constant_array(source.inputs[1])
    zero_value = source.inputs[2] if len(source.inputs) > 2 else None
    zero = 0 if zero_value is None else constant_array(zero_value)
    if x is None or scale is None or zero is None or scale.size != 1:
        raise ArgumentError(f"quantize: the scale of {label_of(source)} is not one known number")
    dtype = source.outputs[0].dtype
    least, most = _BOUNDS.get(dtype, (-128, 127)) if dtype is not None else (0, 255)
    step, offset = float(scale.reshape(())), int(np.asarray(zero).reshape(()))
    key = (source.inputs[1], zero_value)
    found.roots[x] = by_scale.setdefault(key, x)
    found.ranges[x] = ((least - offset) * step, (most - offset) * step)
    y = node.outputs[0]
    name = y.name if y.is_graph_output() else None
    ir.convenience.replace_all_uses_with(y, x, replace_graph_outputs=True)
    remove_node(graph, node)
    if not source.outputs[0].uses():
        remove_node(graph, source)
    if name is not None:
        x.name = name
