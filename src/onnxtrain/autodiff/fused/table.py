"""The table of fused operators: how each is written in plain ai.onnx.

An expansion is a function `f(op, node, *inputs)`: it writes ordinary nodes and returns one value
per output of the node (fewer, or None, for outputs that it cannot give). Inputs that are left out
are None or fall to the default of the parameter. A form that cannot be expanded is told by raising
`NotExpandable`, before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import onnx_ir as ir

MICROSOFT = "com.microsoft"
Expanded = ir.Value | Sequence["ir.Value | None"]
ExpansionFunction = Callable[..., Expanded]
F = TypeVar("F", bound=ExpansionFunction)


class NotExpandable(Exception):
    """This form of a fused operator has no plain equivalent here; the node stays as it is."""


@dataclass(frozen=True)
class Expansion:
    """How one operator is expanded, and the inputs whose rank has to be known for it."""

    function: ExpansionFunction
    ranks: tuple[int, ...]


_table: dict[str, Expansion] = {}


def expansion(*op_types: str, ranks: Sequence[int] = ()) -> Callable[[F], F]:
    """Register a function as the expansion of operators of the domain com.microsoft."""

    def register(function: F) -> F:
        for op_type in op_types:
            _table[op_type] = Expansion(function, tuple(ranks))
        return function

    return register


def expansion_of(node: ir.Node) -> Expansion | None:
    """Return the expansion of a node, or None where it is not a fused operator that we know."""
    return _table.get(node.op_type) if node.domain == MICROSOFT else None


def expandable() -> frozenset[str]:
    """Return the operators that have an expansion."""
    return frozenset(_table)


def wanted(node: ir.Node, index: int) -> bool:
    """Tell whether an output of a node is there and used."""
    if index >= len(node.outputs):
        return False
    output = node.outputs[index]
    return bool(output.name) and bool(output.uses() or output.is_graph_output())
