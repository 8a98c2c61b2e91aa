"""The ranges of activations, which follow what training sees.

A step uses the ranges as they were before it, and moves each by a part (the momentum, a running
statistic too) of the way to the least and largest element of its own batch. On the device,
`TrainingSession.freeze_ranges` sets the momentum to 0, and they stay.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.format.names import RANGE_MOMENTUM, RANGES, UPDATED
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import constant_array
from onnxtrain.offline.passes.quantize.bounds import Bounds, noted_bounds

_LARGEST = float(np.finfo(np.float32).max)


def track_ranges(model: ir.Model) -> dict[str, ir.Value]:
    """Let a training graph compute the new ranges; return the updates by the name of what they are.

    The model has its running statistics as initializers still.
    """
    graph = model.graph
    ranges, momentum = (graph.initializers.get(name) for name in (RANGES, RANGE_MOMENTUM))
    if ranges is None or momentum is None:
        return {}
    op = Ops(graph, model.opset_imports[""])
    op.scope = "quantization/ranges"
    with op.arithmetic():
        observed = _observed(graph, ranges)
        rows = [
            op.Unsqueeze(
                op.Concat(*(op.Reshape(extreme, [1]) for extreme in _extremes(op, v)), axis=0), [0]
            )
            for v, _ in observed
        ]
        seen = rows[0] if len(rows) == 1 else op.Concat(*rows, axis=0)
        seen = _within_bounds(op, op.type_as(seen, ranges), [b for _, b in observed])
        moved = op.Add(ranges, op.Mul(momentum, op.Sub(seen, ranges)))
        return {
            RANGES: _named(op, op.type_as(moved, ranges), RANGES),
            RANGE_MOMENTUM: _named(op, op.type_as(op.Identity(momentum), momentum), RANGE_MOMENTUM),
        }


def _named(op: Ops, value: ir.Value, name: str) -> ir.Value:
    value.name = f"{name}{UPDATED}"
    return value


def _extremes(op: Ops, value: ir.Value) -> tuple[ir.Value, ir.Value]:
    return op.ReduceMin(value, keepdims=0), op.ReduceMax(value, keepdims=0)


def _within_bounds(op: Ops, seen: ir.Value, bounds: Sequence[Bounds]) -> ir.Value:
    """Leave out what Relu and Clip would have, of which the range is all that is left."""
    rows = np.clip(np.array(bounds, np.float32), -_LARGEST, _LARGEST)
    if (np.abs(rows) == _LARGEST).all():
        return seen
    low, high = (op.const(np.ascontiguousarray(column)) for column in (rows[:, :1], rows[:, 1:]))
    return op.type_as(op.Max(op.Min(seen, high), low), seen)


def _observed(graph: ir.Graph, ranges: ir.Value) -> list[tuple[ir.Value, Bounds]]:
    """Return the activation that each row is the range of, with its bounds.

    That is the first which is quantized with it.
    """
    found: dict[int, tuple[ir.Value, Bounds]] = {}
    for node in graph:
        if node.op_type != "QuantizeLinear" or node.domain != "":
            continue
        x, scale = node.inputs[:2]
        taken = None if scale is None else scale.producer()
        if taken is None or taken.op_type != "Gather" or x is None:
            continue
        index = constant_array(taken.inputs[1])
        if index is not None and index.ndim == 0:
            found.setdefault(int(index), (x, noted_bounds(node)))
    assert len(found) == ranges.shape[0]  # type: ignore[index]
    return [found[index] for index in sorted(found)]
