"""The ranges of activations, which follow what training sees.

A step uses the ranges as they were before it, and moves each by a part (the momentum, a running
statistic too) of the way to the least and largest element of its own batch. A batch in which an
activation is zero throughout says nothing about it: its range stays. On the device,
`TrainingSession.freeze_ranges` sets the momentum to 0, and all of them stay.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.format.names import RANGE_MOMENTUM, RANGES, UPDATED
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import constant_array, static_dims
from onnxtrain.offline.graph.signs import is_not_negative


def track_ranges(model: ir.Model) -> dict[str, ir.Value]:
    """Let a training graph compute the new ranges; return the updates by the name of what they are.

    The model has its running statistics as initializers still.
    """
    graph = model.graph
    ranges, momentum = (graph.initializers.get(name) for name in (RANGES, RANGE_MOMENTUM))
    if ranges is None or momentum is None or not ranges.uses():
        return {}
    op = Ops(graph, model.opset_imports[""])
    op.scope = "quantization/ranges"
    with op.arithmetic():
        seen = _seen(op, _observed(graph, ranges))
        is_zero = op.Equal(op.Gather(seen, [0], axis=1), op.Gather(seen, [1], axis=1))
        step = op.Mul(momentum, op.Sub(op.type_as(seen, ranges), ranges))
        moved = op.Add(ranges, op.Where(is_zero, 0.0, step))
        return {
            RANGES: _named(op, op.type_as(moved, ranges), RANGES),
            RANGE_MOMENTUM: _named(op, op.type_as(op.Identity(momentum), momentum), RANGE_MOMENTUM),
        }


def _named(op: Ops, value: ir.Value, name: str) -> ir.Value:
    value.name = f"{name}{UPDATED}"
    return value


def _seen(op: Ops, values: Sequence[ir.Value | None]) -> ir.Value:
    """Return the least and the largest element of each value, zero included, in two columns."""
    zero = op.const(np.zeros(1, np.float32))
    low, high = [zero] * len(values), [zero] * len(values)
    for row, value in enumerate(values):
        if value is not None:
            high[row] = _one(op, op.ReduceMax(value, keepdims=0))
            if not is_not_negative(value):
                low[row] = _one(op, op.ReduceMin(value, keepdims=0))
    columns = [op.Reshape(op.Concat(*parts, axis=0), [-1, 1]) for parts in (low, high)]
    return op.Concat(op.Min(columns[0], 0.0), op.Max(columns[1], 0.0), axis=1)


def _one(op: Ops, scalar: ir.Value) -> ir.Value:
    return op.with_dims(op.Reshape(scalar, [1]), [1])


def _observed(graph: ir.Graph, ranges: ir.Value) -> list[ir.Value | None]:
    """Return the activation that each row is the range of: the first that is quantized with it.

    In the frozen part of a model, ranges are constants, and nobody reads their rows.
    """
    found: dict[int, ir.Value] = {}
    for node in graph:
        if node.op_type != "QuantizeLinear" or node.domain != "":
            continue
        x, scale = node.inputs[:2]
        taken = None if scale is None else scale.producer()
        if taken is None or taken.op_type != "Gather" or x is None:
            continue
        index = constant_array(taken.inputs[1])
        if index is not None and index.ndim == 0:
            found.setdefault(int(index), x)
    (count,) = (static_dims(ranges) or (0,))[:1]
    return [found.get(index) for index in range(count)]
