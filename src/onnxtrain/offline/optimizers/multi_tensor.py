"""Multi-tensor updates: many small tensors are updated as one vector.

A network with normalizations has a hundred vectors of a hundred elements. With a dozen operators
for each, onnxruntime takes longer to read and optimise the graph than to run it, and that time
grows faster than the graph. MobileNetV2 has 104 such vectors; updated together, they bring its step
graph from 6,100 nodes to 4,100.

Tensors that are alike but for one axis are joined along it, where there are many: a language model
has 210 pairs of low-rank factors. Nothing is reshaped then. They are joined to what fits into the
cache.

On a GPU each operator is a launch, and tensors of as many elements are stacked, as rows. Where
lengths differ, onnxruntime's Concat and Split for CUDA send a number for each element to the GPU in
every run; from 33 tensors on, addresses.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import onnx_ir as ir

from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.runs import in_runs
from onnxtrain.offline.graph.shapes import static_dims

SMALL = 4096  # elements; above, the copies into the vector and back cost more than they save
_MANY = 16  # tensors that are alike
_LARGEST_ALIKE, _LARGEST_JOINED = 65_536, 262_144  # elements
STACKED = -1  # instead of an axis: as rows of a matrix
MOST_STACKED, LARGEST_STACKED = 32, 1 << 22  # tensors, and elements of one
Update = Callable[..., Sequence[ir.Value]]


def is_small(value: ir.Value) -> bool:
    """Whether a tensor is known to be small."""
    dims = static_dims(value)
    return dims is not None and 0 < math.prod(dims) <= SMALL


def joined_along(tensors: Sequence[ir.Value]) -> Iterator[tuple[int, list[ir.Value]]]:
    """Yield groups of tensors that are alike but for an axis, and this axis."""
    keys = {tensor: _keys(tensor) for tensor in tensors}
    common = Counter(key for own in keys.values() for key in own)
    alike: dict[tuple[int, ...], list[ir.Value]] = {}
    for tensor, own in keys.items():
        best = max(own, key=lambda key: common[key], default=None)
        if best is not None:
            alike.setdefault(best, []).append(tensor)
    for key, group in alike.items():
        if len(group) >= _MANY:
            yield from ((key.index(-1), run) for run in in_runs(group, _size, _LARGEST_JOINED))


def _keys(tensor: ir.Value) -> list[tuple[int, ...]]:
    """Return the shape of a matrix or kernel with -1 for one axis; an entry for each axis."""
    dims = static_dims(tensor) or ()
    if len(dims) < 2 or not 0 < math.prod(dims) <= _LARGEST_ALIKE:
        return []
    return [(*dims[:axis], -1, *dims[axis + 1 :]) for axis in range(len(dims))]


def _size(tensor: ir.Value) -> int:
    return math.prod(static_dims(tensor) or ())


def update_multi_tensor(
    op: Ops, update: Update, tensors: Sequence[Sequence[ir.Value]], axis: int | None = None
) -> list[list[ir.Value]]:
    """Write `update(parameter, gradient, *states)` once for all.

    `tensors` has a row (parameter, gradient, *states) for each; returns a row (parameter, *states).
    They are joined along an axis, or as vectors, or `STACKED`: then rows are returned.
    """
    shapes = [static_dims(own[0]) or () for own in tensors]
    columns = zip(*tensors, strict=True)
    if axis == STACKED:
        return _update_stacked(op, update, tensors)
    if axis is None:
        made = update(*(_concatenate(op, column) for column in columns))
        parts = [_split(op, vector, shapes) for vector in made]
    else:
        sizes = [shape[axis] for shape in shapes]
        whole = [*shapes[0][:axis], sum(sizes), *shapes[0][axis + 1 :]]
        made = update(*(op.with_dims(op.Concat(*c, axis=axis), whole) for c in columns))
        parts = [list(op.call("Split", m, sizes, outputs=len(sizes), axis=axis)) for m in made]
    return [list(row) for row in zip(*parts, strict=True)]


def _update_stacked(
    op: Ops, update: Update, tensors: Sequence[Sequence[ir.Value]]
) -> list[list[ir.Value]]:
    size = math.prod(static_dims(tensors[0][0]) or ())
    rows = [[op.reshape(tensor, [1, size]) for tensor in own] for own in tensors]
    made = update_multi_tensor(op, update, rows, axis=0)
    for new, (parameter, _, *states) in zip(made, rows, strict=True):
        for value, like in zip(new, (parameter, *states), strict=True):
            op.type_as(value, like)
    return made


def _concatenate(op: Ops, tensors: Sequence[ir.Value]) -> ir.Value:
    sizes = [math.prod(static_dims(tensor) or ()) for tensor in tensors]
    return op.with_dims(op.Concat(*(flattened(op, t) for t in tensors), axis=0), [sum(sizes)])


def flattened(op: Ops, tensor: ir.Value) -> ir.Value:
    """Return a tensor as a vector; nothing is copied."""
    dims = static_dims(tensor)
    if dims is not None and len(dims) == 1:
        return tensor
    return op.reshape(tensor, [-1 if dims is None else math.prod(dims)])


def _split(op: Ops, vector: ir.Value, shapes: Sequence[Sequence[int]]) -> list[ir.Value]:
    sizes = [math.prod(shape) for shape in shapes]
    parts = op.call("Split", vector, sizes, outputs=len(sizes), axis=0)
    for part, size in zip(parts, sizes, strict=True):
        part.type = vector.type
        op.with_dims(part, [size])
    return [
        part if len(shape) == 1 else op.reshape(part, list(shape))
        for part, shape in zip(parts, shapes, strict=True)
    ]
