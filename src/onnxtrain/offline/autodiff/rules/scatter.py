"""Rules for operators that write updates into a tensor."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import Cotangents, optional, required, rule
from onnxtrain.offline.autodiff.rules.scatter_helpers import (
    as_rows,
    positions,
    row_numbers,
    scatter,
)
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import dims_of, is_half, working_type
from onnxtrain.offline.graph.sizes import arange
from onnxtrain.offline.graph.writer import attributes_of

_NOTES = "max, min: ties share the gradient equally; none: indices must not repeat"


@rule("ScatterElements", notes=_NOTES)
def scatter_elements(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """An update has the cotangent of the element that it fell on; see `_reduced` for the rest."""
    data, indices, updates = required(node, 3)
    axis = node.attributes.get_int("axis", 0)
    reduction = node.attributes.get_string("reduction", "none")
    if reduction in ("none", "add"):
        dupdates = op.type_as(op.GatherElements(dy, indices, axis=axis), updates)
        if reduction == "add":
            return dy, None, dupdates
        return op.ScatterElements(dy, indices, op.zeros_like(updates), axis=axis), None, dupdates
    ddata, dupdates = _reduced(op, reduction, dy, data, indices, updates, node.outputs[0], axis)
    return ddata, None, dupdates


@rule("ScatterND", notes=_NOTES)
def scatter_nd(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """An update has the cotangent of the slice that it fell on.

    With a product, maximum or minimum, data is seen as a matrix of those slices, and the operator
    as ScatterElements on its rows.
    """
    data, indices, updates = required(node, 3)
    reduction = node.attributes.get_string("reduction", "none")
    if reduction in ("none", "add"):
        dupdates = op.type_as(op.GatherND(dy, indices), updates)
        if reduction == "add":
            return dy, None, dupdates
        return op.ScatterND(dy, indices, op.zeros_like(updates)), None, dupdates
    depth = (dims_of(indices) or (None,))[-1]
    if isinstance(depth, int):
        taken = op.GatherND(row_numbers(op, data, depth), indices)
    else:  # the updates are elements, each with a place of its own
        depth = op.rank(data)
        taken = op.GatherND(positions(op, data), indices)
    dy, matrix, changes, y = (
        as_rows(op, value, data, depth) for value in (dy, data, updates, node.outputs[0])
    )
    rows = op.Expand(op.Reshape(taken, [-1, 1]), op.shape_of(changes))
    ddata, dupdates = _reduced(op, reduction, dy, matrix, rows, changes, y, 0)
    return op.reshape_like(ddata, data), None, op.reshape_like(dupdates, updates)


def _reduced(
    op: Ops,
    reduction: str,
    dy: ir.Value,
    data: ir.Value,
    indices: ir.Value,
    updates: ir.Value,
    y: ir.Value,
    axis: int,
) -> tuple[ir.Value, ir.Value]:
    """Return the cotangents of data and updates of ScatterElements with mul, max or min."""

    def collect(start: ir.Value, values: ir.Value, reduction: str) -> ir.Value:
        return scatter(op, start, indices, values, axis, reduction)

    def at_updates(value: ir.Value) -> ir.Value:
        return op.shape_as(op.GatherElements(value, indices, axis=axis), updates)

    if reduction == "mul":
        # y / update would do, but for zeros: an element with one zero among its updates has a
        # derivative with respect to that one, an element with two has none.
        is_zero = op.Equal(updates, 0.0)
        factors = op.Where(is_zero, 1.0, updates)
        zeros = collect(op.zeros_like(data), op.Cast(is_zero, to=data.dtype), "add")
        terms = dy * collect(data, factors, "mul")
        without_zeros = op.Where(op.Equal(zeros, 0.0), terms, 0.0)
        with_one_zero = op.Where(op.Equal(zeros, 1.0), terms, 0.0)
        dupdates = op.Where(is_zero, at_updates(with_one_zero), at_updates(without_zeros) / factors)
        return dy * collect(op.full_like(data, 1.0), updates, "mul"), dupdates
    if is_half(data):
        data, updates = (op.cast(v, working_type(v)) for v in (data, updates))
        y = collect(data, updates, reduction)
    data_won = op.Equal(data, y)
    update_won = op.Equal(updates, at_updates(y))
    ones = op.Cast(update_won, to=dy.dtype)
    share = dy / collect(op.Cast(data_won, to=dy.dtype), ones, "add")
    return op.Where(data_won, share, 0.0), op.Where(update_won, at_updates(share), 0.0)


@rule("TensorScatter", stops=(2,))
def tensor_scatter(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """The update has the cotangent of the places that it was written to, the past has the rest."""
    past, update, start = *required(node, 2), optional(node, 2)
    rank = op.rank(past)
    axis = node.attributes.get_int("axis", -2) % rank
    zeros, attributes = op.zeros_like(update), attributes_of(node)
    (dpast,) = op.call("TensorScatter", dy, zeros, start, like=past, **attributes)
    written = op.reshape(
        arange(op, op.dim(update, axis)), [-1 if a == axis else 1 for a in range(rank)]
    )
    if start is not None:  # one number per sample of the batch, which is axis 0
        written = op.Add(written, op.reshape(start, [-1] + [1] * (rank - 1)))
    if node.attributes.get_string("mode", "linear") == "circular":
        written = op.Mod(written, op.dim(past, axis))
    places = op.Expand(written, op.shape_of(update))
    return dpast, op.type_as(op.GatherElements(dy, places, axis=axis), update)
