"""Rules for Slice and Pad: each is mostly the other one's gradient."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import Cotangents, optional, required, rule
from onnxtrain.offline.autodiff.rules.scatter_helpers import (
    add_along,
    add_elements,
    pad,
    positions,
    spread,
)
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import UNKNOWN, constant_array, dims_of
from onnxtrain.offline.graph.sizes import Size, arange, entry

_TO_THE_END = int(np.iinfo(np.int64).max)

# ---- Slice -------------------------------------------------------------------------------------


@rule("Slice")
def slice_(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """The cotangent, with zeros where nothing was taken."""
    x, starts, ends = required(node, 3)
    axes, steps = optional(node, 3), optional(node, 4)
    chosen = _axes(axes, starts, op.rank(x))
    if chosen is None:
        # Where x was cut is known at run time only: let Slice itself tell, element by element.
        return (add_elements(op, dy, x, op.Slice(positions(op, x), *node.inputs[1:])),)
    cut = dy
    widths: dict[int, tuple[Size, Size]] = {}
    for i, axis in enumerate(chosen):
        start, end = entry(op, starts, i), entry(op, ends, i)
        step = op.int64([1]) if steps is None else entry(op, steps, i)
        size = op.dim(x, axis)
        taken = _taken(op, size, start, end, step)
        if taken is not None:
            dy = spread(op, dy, axis, size, taken)
        else:
            widths[axis] = _margins(op, size, start, op.dim(cut, axis))
    return (op.type_as(pad(op, dy, widths), x),)


def _axes(axes: ir.Value | None, starts: ir.Value, rank: int) -> list[int] | None:
    """Return the axes that a Slice acts on, or None where they are not known."""
    known = constant_array(axes)
    if known is not None:
        return [int(a) % rank for a in known]
    count = (dims_of(starts) or (None,))[0]
    return list(range(count)) if axes is None and isinstance(count, int) else None


def _taken(
    op: Ops, size: ir.Value, start: ir.Value, end: ir.Value, step: ir.Value
) -> ir.Value | npt.NDArray[np.int64] | None:
    """Return what a slice takes of an axis, or None where it is all of a stretch."""
    length, first, last, stride = (constant_array(v) for v in (size, start, end, step))
    if stride is not None and stride[0] == 1:
        return None
    if length is None or first is None or last is None or stride is None:
        return op.Slice(arange(op, size), start, end, [0], step)
    return np.arange(int(length[0]))[int(first[0]) : int(last[0]) : int(stride[0])]


def _margins(op: Ops, size: ir.Value, start: ir.Value, taken: ir.Value) -> tuple[Size, Size]:
    """Return how much a slice with step 1 leaves out before and after what it takes."""
    length, first, count = (constant_array(v) for v in (size, start, taken))
    if length is not None and first is not None and count is not None:
        before = slice(int(first[0]), None).indices(int(length[0]))[0]
        return before, int(length[0] - count[0]) - before
    # A start before the beginning counts from the end; one that is out of range is moved inside.
    start = op.Where(op.Less(start, 0), op.Add(start, size), start)
    start = op.Max(op.Min(start, size), op.int64([0]))
    return start, op.Sub(op.Sub(size, start), taken)


# ---- Pad ---------------------------------------------------------------------------------------


@rule("Pad")
def pad_(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """What lies inside goes to x, and the frame to the constant or to the elements it repeats."""
    x, pads = required(node, 2)
    value, axes = optional(node, 2), optional(node, 3)
    mode = node.attributes.get_string("mode", "constant")
    widths = _widths_of_all_axes(op, pads, axes, op.rank(x))
    known = constant_array(widths)
    if mode == "constant":
        frame = None if value is None else _frame_sum(op, dy, x, widths, value)
        if known is None:
            return op.type_as(op.Pad(dy, op.Neg(widths)), x), None, frame
        inside = {a: (-int(b), -int(e)) for a, (b, e) in enumerate(known.reshape(2, -1).T)}
        return op.type_as(pad(op, dy, inside), x), None, frame
    if known is None:
        return (add_elements(op, dy, x, op.Pad(positions(op, x), widths, mode=mode)),)
    for axis, (before, after) in enumerate(known.reshape(2, -1).T):
        dy = _fold_in(op, dy, axis, op.dim(x, axis), int(before), int(after), mode)
    return (op.type_as(dy, x),)


def _widths_of_all_axes(op: Ops, pads: ir.Value, axes: ir.Value | None, rank: int) -> ir.Value:
    """Return the pads as a vector of 2 rank numbers, whichever axes they were given for."""
    if axes is None:
        return pads
    known_pads, known_axes = constant_array(pads), constant_array(axes)
    if known_pads is not None and known_axes is not None:
        full = np.zeros((2, rank), dtype=np.int64)
        full[:, known_axes] = known_pads.reshape(2, -1)
        return op.int64(full.reshape(-1).tolist())
    numbers = op.cast(axes, ir.DataType.INT64)
    numbers = op.Where(op.Less(numbers, 0), op.Add(numbers, rank), numbers)
    places = op.Concat(numbers, op.Add(numbers, rank), axis=0)
    return op.ScatterElements([0] * (2 * rank), places, pads, axis=0)


def _frame_sum(op: Ops, dy: ir.Value, x: ir.Value, widths: ir.Value, value: ir.Value) -> ir.Value:
    inside = op.type_as(op.Pad(op.full_like(x, 1.0), widths), dy)
    frame = op.Where(op.Equal(inside, 0.0), dy, 0.0)
    return op.reshape_like(op.ReduceSum(frame, keepdims=0), value)


def _fold_in(
    op: Ops, dy: ir.Value, axis: int, size: ir.Value, before: int, after: int, mode: str
) -> ir.Value:
    """Undo a pad along one axis whose frame repeats elements: add the frame to them."""
    inside = pad(op, dy, {axis: (-before, -after)})
    ends = [(0, before)] if before > 0 else []
    if after > 0:
        ends.append((-after, _TO_THE_END))
    if not ends:
        return inside
    # The same Pad, applied to the numbers of the elements, tells which one stands where.
    shown = op.with_dims(op.Pad(arange(op, size), [before, after], mode=mode), [UNKNOWN])
    frame = [op.slice(dy, axis, *end) for end in ends]
    places = [op.slice(shown, 0, *end) for end in ends]
    return add_along(op, op.concat(frame, axis), inside, axis, op.concat(places, 0))
