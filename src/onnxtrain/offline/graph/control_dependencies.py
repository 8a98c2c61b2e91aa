"""Nodes that wait for others, in a graph of which only the data says what runs when.

onnxruntime computes what depends on constants alone when it loads a graph, and all else when
someone asks for it. A node that reads a value through `wait_for` runs behind the node that it waits
for, whichever runtime executes the graph, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import UNKNOWN


def flag_of(op: Ops, value: ir.Value) -> ir.Value:
    """Return a vector of one number, 0 or 1, from the first element of a tensor of any type."""
    first = op.Slice(op.Reshape(value, [-1]), [0], [1], [0])
    number = op.Cast(op.Cast(first, to=ir.DataType.BOOL), to=ir.DataType.INT64)
    return op.ReduceSum(number, [0], keepdims=1)  # 0 where there is no element


def wait_for(op: Ops, flag: ir.Value, value: ir.Value, shape: Sequence[int]) -> ir.Value:
    """Return a constant in another shape, none of whose sizes is zero, when a flag is there.

    The flag is 0 or 1 and the sizes are at least 1, so the larger of both is the size. No optimizer
    can know that the flag never matters.
    """
    waiting = op.Reshape(value, op.Max(flag, op.int64(list(shape))))
    # Of a chain of Reshapes whose last shape it knows, onnxruntime keeps the last one alone: it
    # would wait for nothing.
    waiting.type = value.type
    return op.with_dims(waiting, [UNKNOWN, *shape[1:]])
