"""Cotangents that follow from all steps of a Loop at once, instead of being added up in each.

Each step of a recurrent network reads one row of its input and multiplies with the same matrices.
Added up step by step, the cotangent of the input is as large as all steps together in each of them,
and each matrix is read and written once more in each step. Behind the Loop it is one matrix product
over all steps, or the rows themselves.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import Cotangents, Rule, lookup, required
from onnxtrain.offline.autodiff.rules.loop_record import Record
from onnxtrain.offline.autodiff.rules.scatter_helpers import pad
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import UNKNOWN, dims_of, same_dims


@dataclass
class Deferred:
    """A node in the body of a Loop, the cotangent of whose shared input is computed behind it."""

    node: ir.Node  # in the forward Loop
    base: Rule
    dy: ir.Value | None = None  # in one step of the reverse Loop

    @property
    def shared(self) -> ir.Value:
        """The value that all steps use."""
        return required(self.node, 2)[_place(self.node)]

    def rule(self) -> Rule:
        """Return the rule for a step: that of the operator, without the shared input."""

        def remember(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
            self.dy = dy
            if node.op_type == "Gather":
                return ()
            dx, _, *bias = self.base(op, node, dy)
            return dx, None, *bias

        return Rule(remember, self.node.op_type, "", 1, self.base.broadcasts, frozenset(), "")

    def cotangent(self, op: Ops, record: Record, dys: ir.Value) -> ir.Value:
        """Return the cotangent of the shared value, given those of the results of all steps."""
        if self.node.op_type == "Gather":
            return self._of_rows(op, record, dys)
        attributes, (x, w) = self.node.attributes, required(self.node, 2)
        rows, drows = (_as_matrix(op, v) for v in (steps_of(op, record, x), dys))
        transposed = attributes.get_int("transB", 0)
        dw = op.Gemm(
            *((drows, rows) if transposed else (rows, drows)), transA=1,
            alpha=attributes.get_float("alpha", 1.0),
        )  # fmt: skip
        return op.type_as(dw, w)

    def _of_rows(self, op: Ops, record: Record, dys: ir.Value) -> ir.Value:
        x, indices = required(self.node, 2)
        rank = op.rank(x)
        axis = self.node.attributes.get_int("axis", 0) % rank
        trips = op.reshape(record.trips(), [1])
        row = dims_of(self.node.outputs[0])
        assert row is not None
        if not all(isinstance(d, int) for d in row) and dims_of(indices) == ():
            # Where there was no step, sizes that only a step tells are zero.
            sizes = [op.dim(x, a) for a in range(rank) if a != axis]
            dys = op.with_dims(op.reshape(dys, op.dims_vector(trips, *sizes)), op.dims(dys))
        order = list(range(1, len(row) + 1))
        dys = op.transpose(dys, [*order[:axis], 0, *order[axis:]])
        if indices is record.parts.iteration:
            behind = op.dim(x, axis) - trips
            if same_dims(dims_of(dys), dims_of(x)):
                return dys
            return op.type_as(pad(op, dys, {axis: (0, behind)}), x)
        rows = op.Gather(x, record.stack(indices), axis=axis).producer()
        assert rows is not None
        dx, *_ = self.base(op, rows, dys)
        assert dx is not None
        return op.type_as(dx, x)


def deferrals(record: Record, captured: Collection[ir.Value]) -> dict[ir.Node, Deferred]:
    """Return the nodes in the body of a Loop whose shared input is one of the captured values.

    The cotangents of all steps take memory: a lean gradient adds those of matrices up.
    """
    operators = ("Gather", *(() if record.op.lean else _PRODUCTS))
    found = {}
    inside = {v for node in record.parts.body for v in node.outputs} | {*record.parts.body.inputs}
    for node in record.parts.body:
        if node.domain != "" or node.op_type not in operators:
            continue
        place = _place(node)
        other = node.inputs[1 - place]
        if node.inputs[place] not in captured:
            continue
        steady = all(v is not None and record.parts.is_steady(v) for v in (other, *node.outputs))
        base = lookup(node.op_type, "", record.op.opset)
        if steady and other in inside and _is_plain(node) and base is not None:
            found[node] = Deferred(node, base)
    return found


_PRODUCTS = ("Gemm", "MatMul")


def _place(node: ir.Node) -> int:
    """Return which of its first two inputs all steps have in common."""
    return 1 if node.op_type in _PRODUCTS else 0


def _is_plain(node: ir.Node) -> bool:
    dims = dims_of(required(node, 2)[_place(node)])
    if node.op_type == "MatMul":
        return dims is not None and len(dims) == 2
    return dims is not None and not node.attributes.get_int("transA", 0)


def steps_of(op: Ops, record: Record, value: ir.Value) -> ir.Value:
    """Return the values of all steps: rows that the steps read one by one are there already."""
    node = value.producer()
    if node is not None and node.op_type == "Gather" and node.domain == "":
        x, indices = required(node, 2)
        first = node.attributes.get_int("axis", 0) == 0
        if first and indices is record.parts.iteration and x.graph is not record.parts.body:
            rows = op.slice(x, 0, 0, op.reshape(record.trips(), [1]))
            return op.with_dims(rows, (UNKNOWN, *op.dims(x)[1:]))
    return record.stack(value)


def _as_matrix(op: Ops, value: ir.Value) -> ir.Value:
    width = op.dims(value)[-1]
    flat = op.reshape(value, op.dims_vector(-1, op.dim(value, -1)))
    return op.with_dims(flat, (UNKNOWN, width))
