"""Tables of embeddings that are stored as integers: rows are looked up first, then expanded.

`Gather(expand(table), rows)` is `expand(Gather(table, rows))`, which touches the rows of a batch
instead of a table of a whole vocabulary, four times as large as the one that is stored.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnxtrain.offline.graph.op_facts import ARITHMETIC
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.quantized_operators import is_constant, is_large_integer
from onnxtrain.offline.graph.shapes import dims_of, static_dims
from onnxtrain.offline.graph.subgraphs import replace_node

Take = Callable[[ir.Value], ir.Value]  # takes rows of something that has one for each of the table


def look_up_integers(op: Ops, graph: ir.Graph) -> None:
    """Take rows of integers before they are expanded, wherever a table is looked up, in place."""
    for node in list(graph):
        if (
            node.op_type == "Gather"
            and node.domain == ""
            and not node.attributes.get_int("axis", 0)
        ):
            _look_up(op, graph, node)


def _look_up(op: Ops, graph: ir.Graph, node: ir.Node) -> None:
    table, rows = node.inputs
    if table is None or rows is None or dims_of(rows) is None or not _is_expanded(table):
        return
    op.scope = f"{table.name}/rows"
    last = graph[-1]
    taken = _rows_of(op, table, lambda value: op.Gather(value, rows, axis=0), op.rank(rows))
    replace_node(node, [taken], last)


def _is_expanded(value: ir.Value | None) -> bool:
    """Tell whether a matrix is made of constant integers, element by element."""
    node, dims = (None, None) if value is None else (value.producer(), static_dims(value))
    if node is None or node.domain or dims is None or len(dims) != 2:
        return False
    x, *others = node.inputs
    if node.op_type in ("Cast", "DequantizeLinear"):
        is_blocked = node.attributes.get_int("block_size", 0) != 0
        is_byte = x is not None and x.dtype is not None and x.dtype.bitwidth == 8
        constants = all(v is None or is_constant(v) for v in others)
        return x is not None and is_byte and is_large_integer(x) and constants and not is_blocked
    if node.op_type not in ARITHMETIC or x is None:
        return False
    return _is_expanded(x) and is_constant(others[0]) and dims == static_dims(x)


def _rows_of(op: Ops, value: ir.Value, take: Take, rank: int) -> ir.Value:
    """Write the expansion of a table again, for some of its rows; they have `rank` axes."""
    node = value.producer()
    assert node is not None
    x, *others = [v for v in node.inputs if v is not None]
    if node.op_type == "Cast":
        return op.Cast(take(x), to=value.dtype)
    if node.op_type in ARITHMETIC:
        return _combined(op, node, _rows_of(op, x, take, rank), _matching(others[0], value, take))
    if _is_by_row(node, others[0]):
        numbers = op.Cast(take(x), to=value.dtype)
        if len(others) > 1:
            zero = op.Cast(take(others[1]), to=value.dtype)
            numbers = op.Sub(numbers, op.unsqueeze(zero, [rank]))
        return op.Mul(numbers, op.unsqueeze(take(others[0]), [rank]))
    return op.DequantizeLinear(take(x), *others, axis=rank)


def _combined(op: Ops, node: ir.Node, x: ir.Value, other: ir.Value) -> ir.Value:
    """Write a sum or product of a table and constants for some of its rows."""
    match node.op_type:
        case "Add":
            return op.Add(x, other)
        case "Sub":
            return op.Sub(x, other)
        case "Mul":
            return op.Mul(x, other)
        case _:
            return op.Div(x, other)


def _matching(constant: ir.Value, table: ir.Value, take: Take) -> ir.Value:
    """Return constants that broadcast against rows: those of the rows, if each has its own."""
    dims, whole = static_dims(constant) or (), static_dims(table) or ()
    return take(constant) if len(dims) == 2 and dims[0] == whole[0] != 1 else constant


def _is_by_row(node: ir.Node, scale: ir.Value) -> bool:
    """Tell whether DequantizeLinear has a scale for each row."""
    size = (static_dims(scale) or (1,))[0]
    return size != 1 and node.attributes.get_int("axis", 1) % 2 == 0
