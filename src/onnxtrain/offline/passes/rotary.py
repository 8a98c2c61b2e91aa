"""Rotary positions: x cos + turn(x) sin, where turn exchanges the halves of each row, as one group.

Exporters write them for the queries and for the keys of each layer: two slices, a Neg, a Concat,
two products and a sum, whose gradients are nine nodes more. The gradient of a rotation is the
rotation back. As one group, a native kernel can stand in for it in either direction.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.offline.autodiff.heads import halves
from onnxtrain.offline.autodiff.registry import Cotangents, Rule
from onnxtrain.offline.graph.kernels import mark_kernel
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import constant_array, dims_of, same_dims
from onnxtrain.offline.graph.subgraphs import maker_read_once


def join_rotary(sums: Iterable[ir.Node], wanted: Collection[ir.Value]) -> dict[ir.Node, Rule]:
    """Return a rule for each Add that is the last node of a rotation.

    `wanted` are the values that are differentiated, or with respect to which.
    """
    found = {last: _rotation_behind(last, wanted) for last in sums}
    return {last: _rule(rotation) for last, rotation in found.items() if rotation is not None}


@dataclass(frozen=True)
class _Rotation:
    """x cos + (sign b, a) sin, where a and b are the halves of the last axis of x."""

    nodes: tuple[ir.Node, ...]  # each behind those that it reads
    x: ir.Value
    cos: ir.Value
    sin: ir.Value
    turned: ir.Value
    sign: int


def _rule(found: _Rotation) -> Rule:
    x, cos, sin, sign = found.x, found.cos, found.sin, found.sign

    def gradient(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
        def write() -> list[ir.Value]:
            a, b = halves(op, op.type_as(dy * sin, dy))
            back = op.type_as(op.Concat(b, a if sign > 0 else -a, axis=-1), dy)
            return [op.type_as(dy * cos + back, x)]

        mark_kernel(found.nodes, "Rotary", [x, cos, sin], node.outputs, sign=sign)
        (dx,) = op.kernel("RotaryGrad", [dy, cos, sin], write, sign=sign)
        # Angles that are learned need what lies between: then the nodes are no group.
        dcos, dsin = op.sum_to(dy * x, cos), op.sum_to(dy * found.turned, sin)
        return {x: op.keep_zeros(dx, dy), cos: dcos, sin: dsin}

    stops = frozenset({0, 1})  # the gradient goes past the products
    return Rule(
        gradient, "Add", "", 1, False, stops, "RotaryEmbedding", reaches=lambda _: (x, cos, sin)
    )


def _rotation_behind(last: ir.Node, wanted: Collection[ir.Value]) -> _Rotation | None:
    """Return the rotation that a sum ends, if nobody else reads its parts."""
    search = _Search(wanted)
    for straight, across in _in_either_order(last):
        first, second = search.maker(straight, "Mul"), search.maker(across, "Mul")
        if first is None or second is None:
            continue
        for turned, sin in _in_either_order(second):
            exchange = search.exchange(turned)
            if exchange is None:
                continue
            nodes, x, sign = exchange
            for given, cos in _in_either_order(first):
                rows = {_row(v) for v in (x, cos, sin)}
                fits = len(rows) == 1 and same_dims(dims_of(last.outputs[0]), dims_of(x))
                if given is x and fits:
                    return _Rotation((*nodes, first, second, last), x, cos, sin, turned, sign)
    return None


@dataclass(frozen=True)
class _Search:
    wanted: Collection[ir.Value]

    def exchange(self, turned: ir.Value) -> tuple[list[ir.Node], ir.Value, int] | None:
        """Return the nodes of (±b, a), the value whose halves a and b are, and the sign of b."""
        joined = self.maker(turned, "Concat")
        if joined is None or len(joined.inputs) != 2 or not _is_last_axis(joined, turned):
            return None
        front, a = joined.inputs
        negated = self.maker(front, "Neg")
        b = front if negated is None else negated.inputs[0]
        found = self._halves(a, b)
        if found is None:
            return None
        parts, x = found
        between = [] if negated is None else [negated]
        return [*parts, *between, joined], x, 1 if negated is None else -1

    def _halves(
        self, a: ir.Value | None, b: ir.Value | None
    ) -> tuple[list[ir.Node], ir.Value] | None:
        """Return the nodes that make two values, and what they are the halves of."""
        if a is None or b is None:
            return None
        split = self.maker(a, "Split")
        if split is not None and split is self.maker(b, "Split") and _cuts(split, (a, b)):
            assert split.inputs[0] is not None
            return [split], split.inputs[0]
        first, second = self.maker(a, "Slice"), self.maker(b, "Slice")
        if first is None or second is None or first.inputs[0] is not second.inputs[0]:
            return None
        x = first.inputs[0]
        size = _row(x)
        if x is None or size is None or size % 2:
            return None
        bounds = [_bounds(node, x, size) for node in (first, second)]
        return ([first, second], x) if bounds == [(0, size // 2), (size // 2, size)] else None

    def maker(self, value: ir.Value | None, op_type: str) -> ir.Node | None:
        """Return the node of a kind that makes a value, if the value is read once and unwanted."""
        if value is None or value in self.wanted:
            return None
        return maker_read_once(value, op_type)


def _in_either_order(node: ir.Node) -> Iterator[tuple[ir.Value, ir.Value]]:
    a, b = node.inputs
    if a is not None and b is not None:
        yield a, b
        yield b, a


def _row(value: ir.Value | None) -> int | None:
    """Return the size of the last axis, if it is known."""
    dims = None if value is None else dims_of(value)
    return dims[-1] if dims and isinstance(dims[-1], int) else None


def _is_last_axis(node: ir.Node, like: ir.Value) -> bool:
    dims = dims_of(like)
    return dims is not None and node.attributes.get_int("axis", 0) in (-1, len(dims) - 1)


def _cuts(split: ir.Node, parts: tuple[ir.Value, ir.Value]) -> bool:
    """Whether a Split cuts the last axis into two parts, of equal size and in this order."""
    size, x = _row(split.inputs[0]), split.inputs[0]
    if size is None or x is None or tuple(split.outputs) != parts or not _is_last_axis(split, x):
        return False
    sizes = constant_array(split.inputs[1]) if len(split.inputs) > 1 else None
    stated = sizes is None or (sizes.size == 2 and sizes[0] == sizes[1])
    given = len(split.inputs) > 1 and split.inputs[1] is not None and sizes is None
    return size % 2 == 0 and stated and not given


def _bounds(node: ir.Node, x: ir.Value, size: int) -> tuple[int, int] | None:
    """Return where a Slice of the last axis begins and ends, if that is known."""
    given = [constant_array(v) for v in node.inputs[1:]]
    if len(given) < 3 or any(g is None or g.size != 1 for g in given):
        return None
    begin, end, axis, *step = (int(g.item()) for g in given if g is not None)
    if axis not in (-1, len(dims_of(x) or ()) - 1) or step not in ([], [1]):
        return None
    low, high, _ = slice(begin, end).indices(size)
    return low, high
