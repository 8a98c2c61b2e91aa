"""Gradients that are larger than what they are computed from: they are computed with the updates.

No update may run before all gradients are known to be finite (`finite_guard.py`), and gradients
that wait for that take as much memory as their parameters. But the gradient of a weight is a
product: each element is an inner product of parts of what the layer has read and of the cotangent
of what it has made. By the inequality of Cauchy and Schwarz, no element is larger than the product
of the norms of the two. Where both together are smaller than the weight, they are checked in the
place of the gradient. It is then computed in the branch of the updates; a large one just before its
own update, so that one of these is in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.offline.graph.kernels import input_values, kernel_groups, place_of
from onnxtrain.offline.graph.op_facts import VIEWS
from onnxtrain.offline.graph.shapes import dims_of, is_float
from onnxtrain.offline.graph.subgraphs import subgraphs_of, values_of

_LEAST, _LARGE = 65_536, 1 << 20  # elements
_BATCH = 64  # what a symbolic batch size is taken for
_REORDERS = VIEWS | {"Transpose"}

Factors = tuple[ir.Value, ir.Value]


@dataclass(frozen=True)
class LateGradient:
    """A gradient that is the product of two tensors, and the nodes that compute it from them."""

    factors: Factors
    nodes: tuple[ir.Node, ...]  # in their order; nobody else reads what they compute
    is_large: bool  # so that its parameter is updated by itself, which costs some microseconds

    def move(self, target: ir.Graph) -> None:
        """Compute it in another graph, where the factors can be read."""
        graph = self.nodes[0].graph
        assert isinstance(graph, ir.Graph)
        graph.remove(self.nodes)
        target.extend(self.nodes)


def late_gradients(
    graph: ir.Graph, gradients: Mapping[ir.Value, ir.Value], overwritten: Collection[ir.Value]
) -> dict[ir.Value, LateGradient]:
    """Return the gradients to compute late, by parameter, before anything reads them.

    What is `overwritten` by updates is not read by any of them.
    """
    finder = _Finder(graph, overwritten)
    found = {parameter: finder.find(gradient) for parameter, gradient in gradients.items()}
    return {parameter: late for parameter, late in found.items() if late is not None}


class _Finder:
    def __init__(self, graph: ir.Graph, overwritten: Collection[ir.Value]) -> None:
        self._graph = graph
        self._overwritten = frozenset(overwritten)
        self._groups = kernel_groups(graph)
        self._named = {str(v.name): v for v in values_of(graph)}
        self._places = {node: place for place, node in enumerate(graph)}
        self._batches = _first_symbols(graph)

    def find(self, gradient: ir.Value) -> LateGradient | None:
        last = gradient.producer()
        factors = None if last is None or gradient.uses() else self._factors(last)
        if last is None or factors is None or any(map(self._is_unfit, (gradient, *factors))):
            return None
        size = self._size(gradient)
        kept = sum(self._size(v) for v in set(factors) if not v.is_graph_input())
        nodes = self._between(factors, last) if _pays(size, kept) else None
        return None if nodes is None else LateGradient(factors, nodes, size >= _LARGE)

    def _is_unfit(self, value: ir.Value) -> bool:
        return value.dtype != ir.DataType.FLOAT or _memory_of(value) in self._overwritten

    def _factors(self, node: ir.Node) -> Factors | None:
        """Return the two tensors that a node, or the group that it is in, multiplies."""
        while node.op_type in _REORDERS and node.domain == "" and place_of(node) is None:
            source = None if node.inputs[0] is None else node.inputs[0].producer()
            if source is None:
                return None
            node = source
        marked = place_of(node)
        if marked is not None:
            group = marked[0]
            if group.kind != "ConvGradWeight":
                return None
            found = input_values(group, self._groups[group], self._named)
        else:
            is_product = node.op_type in ("Gemm", "MatMul") and node.domain == ""
            is_plain = node.attributes.get_float("alpha", 1.0) == 1.0 and len(node.inputs) == 2
            found = [v for v in node.inputs if v is not None] if is_product and is_plain else None
        return None if found is None or len(found) < 2 else (found[0], found[1])

    def _between(self, factors: Factors, last: ir.Node) -> tuple[ir.Node, ...] | None:
        """Return the nodes that compute a gradient from its factors.

        None where others read what they compute, or where they read something else than factors,
        constants and sizes. What computes sizes stays where it is.
        """
        found, pending = {last}, [last]
        while pending:
            node = pending.pop()
            if node.graph is not self._graph or subgraphs_of(node):
                return None
            for value in node.inputs:
                if value is None or value in factors or not is_float(value):
                    continue
                if value in self._overwritten:
                    return None
                source = value.producer()
                if source is not None and source not in found:
                    found.add(source)
                    pending.append(source)
        made = [value for node in found for value in node.outputs]
        if any(v.is_graph_output() or not {n for n, _ in v.uses()} <= found for v in made):
            return None
        return tuple(sorted(found, key=lambda node: self._places[node]))

    def _size(self, value: ir.Value) -> float:
        """Return how many elements a value has, or probably has; infinity if that is unknown."""
        dims = dims_of(value)
        if dims is None:
            return math.inf
        known = [_BATCH if d in self._batches else d for d in dims[:1]] + list(dims[1:])
        return math.prod(d if isinstance(d, int) else math.inf for d in known)


def _pays(size: float, kept: float) -> bool:
    """Whether to keep so many elements of factors instead of a gradient of a size."""
    return _LEAST <= size < math.inf and kept <= size


def _first_symbols(graph: ir.Graph) -> set[ir.SymbolicDim]:
    """Return the symbolic dimensions that inputs begin with."""
    first = [dims[0] for v in graph.inputs if (dims := dims_of(v))]
    return {d for d in first if not isinstance(d, int) and d.value is not None}


def _memory_of(value: ir.Value) -> ir.Value:
    """Return the value whose memory a value is in."""
    while (node := value.producer()) is not None and node.op_type in VIEWS and node.domain == "":
        if node.inputs[0] is None:
            break
        value = node.inputs[0]
    return value
