"""Updating many small tensors as one vector.

A network with normalizations has a hundred vectors of a hundred numbers. An update of a dozen
operators for each is work for the device that has nothing to do with numbers: onnxruntime takes
longer to read and optimise such a graph than to run it, and the time grows faster than the
graph. Joined, they are one update. MobileNetV2 has 104 such vectors, and its step graph 4,100
instead of 6,100 nodes.

Not every small gradient may wait for the others. One that is computed from an activation, as that
of a bias is, would keep the activation in memory until the end of the backward pass: onnxruntime
runs a node when somebody needs its result. `needed_anyway` tells those that are there by then,
because other gradients are computed from the same sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import onnx_ir as ir

from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import static_dims

SMALL = 4096  # elements; the copies into the vector and back cost more than they save above
Update = Callable[..., Sequence[ir.Value]]


def is_small(value: ir.Value) -> bool:
    """Whether a tensor is known to be small."""
    dims = static_dims(value)
    return dims is not None and 0 < math.prod(dims) <= SMALL


def update_joined(
    op: Ops, update: Update, tensors: Sequence[Sequence[ir.Value]]
) -> list[list[ir.Value]]:
    """Write `update(parameter, gradient, *states)` once for many.

    `tensors` has parameter, gradient and states of each. Returns parameter and states of each.
    """
    shapes = [static_dims(own[0]) or () for own in tensors]
    sizes = [math.prod(shape) for shape in shapes]
    made = update(*(_join(op, column) for column in zip(*tensors, strict=True)))
    columns = [_part(op, vector, sizes, shapes) for vector in made]
    return [list(row) for row in zip(*columns, strict=True)]


def _join(op: Ops, tensors: Sequence[ir.Value]) -> ir.Value:
    joined = op.Concat(*(_flat(op, tensor) for tensor in tensors), axis=0)
    return op.with_dims(joined, [sum(math.prod(static_dims(t) or ()) for t in tensors)])


def _flat(op: Ops, tensor: ir.Value) -> ir.Value:
    dims = static_dims(tensor) or ()
    return tensor if len(dims) == 1 else op.reshape(tensor, [math.prod(dims)])


def _part(
    op: Ops, vector: ir.Value, sizes: Sequence[int], shapes: Sequence[Sequence[int]]
) -> list[ir.Value]:
    parts = op.call("Split", vector, list(sizes), outputs=len(sizes), axis=0)
    for part, size in zip(parts, sizes, strict=True):
        part.type = vector.type
        op.with_dims(part, [size])
    return [
        part if len(shape) == 1 else op.reshape(part, list(shape))
        for part, shape in zip(parts, shapes, strict=True)
    ]


def needed_anyway(
    gradients: Mapping[ir.Value, ir.Value], live: Collection[ir.Node]
) -> set[ir.Value]:
    """Return the small parameters whose gradients may wait for each other."""
    return {
        parameter
        for parameter, gradient in gradients.items()
        if is_small(parameter) and _comes_from_shared_sums(gradient, live)
    }


def _comes_from_shared_sums(gradient: ir.Value, live: Collection[ir.Node]) -> bool:
    """Whether all that is large behind a gradient is read for the sake of other results too."""
    own: set[ir.Node] = set()
    waiting: list[ir.Value] = [gradient]
    while waiting:
        value = waiting.pop()
        node = value.producer()
        if node is None or node in own or _has_other_readers(value, own, live):
            continue
        inputs = [v for v in node.inputs if v is not None and v.const_value is None]
        if not all(is_small(v) for v in inputs):
            return False
        own.add(node)
        waiting.extend(inputs)
    return True


def _has_other_readers(
    value: ir.Value, own: Collection[ir.Node], live: Collection[ir.Node]
) -> bool:
    return any(node in live and node not in own for node, _ in value.uses())
