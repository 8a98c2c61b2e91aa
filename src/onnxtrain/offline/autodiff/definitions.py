"""Operators defined by others: the table of definitions, and how one replaces a node.

A definition is a function `f(op, node, *inputs)`: it writes ordinary nodes and returns one value
per output of the node (fewer, or None, for outputs that it does not compute). Inputs that are left
out are None, or the default of the parameter. It raises `NotExpandable` for a form of the operator
that it does not cover; the node then stays as it is.

Fused operators of onnxruntime are always expanded (`fused/`); operators of ai.onnx only where a
gradient has to pass them and there is no rule (`expand.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import onnx_ir as ir

from onnxtrain.offline.graph.error_context import error_context
from onnxtrain.offline.graph.names import label_of
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import UNKNOWN, dims_of
from onnxtrain.offline.graph.subgraphs import release, take_out

Maybe = ir.Value | None
Defined = ir.Value | Sequence[Maybe]
DefinitionFunction = Callable[..., Defined]
F = TypeVar("F", bound=DefinitionFunction)


class NotExpandable(Exception):
    """The definition of an operator does not cover the form that a node uses."""


@dataclass(frozen=True)
class Definition:
    """The definition of an operator, and the inputs whose rank it needs."""

    function: DefinitionFunction
    ranks: tuple[int, ...]

    def is_ready(self, node: ir.Node) -> bool:
        """Tell whether all types and the ranks that are needed are known."""
        ranked = [node.inputs[i] for i in self.ranks if i < len(node.inputs)]
        return all(v.dtype is not None for v in node.inputs if v is not None) and all(
            dims_of(v) is not None for v in ranked if v is not None
        )


_table: dict[tuple[str, str], Definition] = {}


def definition(*op_types: str, domain: str = "", ranks: Sequence[int] = ()) -> Callable[[F], F]:
    """Register a function as the definition of operators."""

    def register(function: F) -> F:
        for op_type in op_types:
            _table[domain, op_type] = Definition(function, tuple(ranks))
        return function

    return register


def definition_of(node: ir.Node) -> Definition | None:
    """Return the definition of a node's operator, or None."""
    return _table.get((node.domain, node.op_type))


def defined(domain: str) -> frozenset[str]:
    """Return the operators of a domain that have a definition."""
    return frozenset(op_type for other, op_type in _table if other == domain)


def wanted(node: ir.Node, index: int) -> bool:
    """Tell whether an output of a node is there and used."""
    if index >= len(node.outputs):
        return False
    output = node.outputs[index]
    return bool(output.name) and bool(output.uses() or output.is_graph_output())


def write_definition(op: Ops, node: ir.Node, found: Definition) -> list[ir.Node] | None:
    """Replace a node by plain nodes and return them; None if its form has no definition.

    Its output values stay, names included.
    """
    op.scope = label_of(node)
    written: list[ir.Graph] = []
    places = [i for i in range(len(node.outputs)) if wanted(node, i)]

    def write() -> Sequence[ir.Value]:
        written.append(op.target)
        returned = found.function(op, node, *node.inputs)
        made = [returned] if isinstance(returned, ir.Value) else list(returned)
        results = [r for i, r in enumerate(made) if i in places and r is not None]
        if len(results) < len(places):
            raise NotExpandable("an output that the definition does not give")
        return results

    with error_context(node, "expanding"):
        try:
            body = op.body([], write)
        except NotExpandable:
            for abandoned in written[0]:
                release(abandoned)
            return None
    results, nodes = take_out(body)
    return splice(node, nodes, {node.outputs[i]: r for i, r in zip(places, results, strict=True)})


def split(
    op: Ops, x: ir.Value, count: int, axis: int, sizes: Sequence[int] = ()
) -> tuple[ir.Value, ...]:
    """Split into parts, equal ones unless sizes are given; every part is typed."""
    if len(sizes):
        parts = op.call("Split", x, list(sizes), outputs=count, axis=axis)
    else:
        parts = op.call("Split", x, outputs=count, axis=axis, num_outputs=count)
    dims = dims_of(x)
    for index, part in enumerate(parts):
        part.type = x.type
        if dims is not None:
            whole, place = dims[axis], axis % len(dims)
            share = whole // count if isinstance(whole, int) else UNKNOWN
            width = sizes[index] if len(sizes) else share
            part.shape = ir.Shape([*dims[:place], width, *dims[place + 1 :]])
    return parts


def splice(
    node: ir.Node, nodes: Sequence[ir.Node], results: Mapping[ir.Value, ir.Value]
) -> list[ir.Node]:
    """Replace a node by others that compute the same, and return them.

    `results` maps each output to its new value. Callers may hold the old value objects, so these
    stay in the graph: the nodes that make the new ones are rebuilt around them.
    """
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    for old, new in results.items():
        old.type = old.type or new.type
        old.shape = _better_shape(old.shape, new.shape)
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    node.resize_outputs(0)
    graph.insert_before(node, nodes)
    graph.remove(node, safe=True)
    originals = {new: old for old, new in results.items()}
    return [_around(each, originals) for each in nodes]


def _better_shape(old: ir.Shape | None, new: ir.Shape | None) -> ir.Shape | None:
    """Return the old shape, with the wrong zeros of onnx replaced.

    onnx infers zero where it multiplies or adds symbolic dimensions, as for the outputs of
    Attention.
    """
    if old is None or new is None or len(old) != len(new):
        return new if old is None else old
    return ir.Shape([b if a == 0 else a for a, b in zip(old.dims, new.dims, strict=True)])


def _around(node: ir.Node, originals: Mapping[ir.Value, ir.Value]) -> ir.Node:
    """Return the node, or a copy of it whose outputs are the original values."""
    if not any(v in originals for v in node.outputs):
        return node
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    outputs = [
        originals[v] if v in originals else ir.Value(name=v.name, type=v.type, shape=v.shape)
        for v in node.outputs
    ]
    twin = ir.Node(
        node.domain, node.op_type, node.inputs, list(node.attributes.values()), outputs=outputs,
        name=node.name,
    )  # fmt: skip
    graph.insert_after(node, twin)
    for value, original in zip(node.outputs, outputs, strict=True):
        ir.convenience.replace_all_uses_with(value, original, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    return twin
