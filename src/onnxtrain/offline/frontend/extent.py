"""How far a model reaches: its nodes, its functions once inlined, and how deep it is nested.

This is found out on the proto, before anything walks through it recursively, copies it, or hands it
to onnx, which expands functions wherever they are called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx

from onnxtrain.errors import ModelError
from onnxtrain.offline.graph.limits import DEEPEST, require

_Body = onnx.GraphProto | onnx.FunctionProto
_Called = tuple[str, str, str]
_GRAPHS = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)
_CONTAINERS = {"sequence_type": "elem_type", "optional_type": "elem_type", "map_type": "value_type"}


def require_moderate_extent(model: onnx.ModelProto) -> None:
    """Refuse a model of too many nodes, too deep, or with functions that call themselves."""
    functions = {(f.domain, f.name, f.overload): f for f in model.functions}
    stored = sum(1 for body in (model.graph, *model.functions) for _ in _nodes(body))
    require("nodes", stored, "the model has nodes:")
    _check_types(model.graph)
    if not functions:
        return
    sizes: dict[_Called, tuple[int, int]] = {}  # nodes, and how deep they lie
    for called in _callees_first(functions):
        sizes[called] = _inlined(functions[called], sizes)
    total, depth = _inlined(model.graph, sizes)
    require("inlined_nodes", total, "once its functions are inlined, the model has nodes:")
    if depth > DEEPEST:
        raise _too_deep("once its functions are inlined, the model")


def _nodes(body: _Body) -> Iterator[tuple[onnx.NodeProto, int]]:
    """Yield the nodes of a body and of its subgraphs, each with the number of graphs around it."""
    waiting: list[tuple[_Body, int]] = [(body, 0)]
    while waiting:
        current, depth = waiting.pop()
        if depth > DEEPEST:
            raise _too_deep("the model")
        for node in current.node:
            yield node, depth
            for attribute in node.attribute:
                if attribute.type in _GRAPHS:
                    waiting.extend((g, depth + 1) for g in (attribute.g, *attribute.graphs))


def _too_deep(what: str) -> ModelError:
    return ModelError(f"{what} has more than {DEEPEST} subgraphs in each other")


def _check_types(graph: onnx.GraphProto) -> None:
    for info in (*graph.input, *graph.output, *graph.value_info):
        kind, depth = info.type, 0
        while (holds := kind.WhichOneof("value")) in _CONTAINERS:
            kind, depth = getattr(getattr(kind, holds), _CONTAINERS[holds]), depth + 1
            if depth > DEEPEST:
                raise ModelError(f"the type of {info.name!r} has more than {DEEPEST} levels")


def _called(node: onnx.NodeProto) -> _Called:
    return node.domain, node.op_type, node.overload


def _inlined(body: _Body, sizes: Mapping[_Called, tuple[int, int]]) -> tuple[int, int]:
    """Return the number of nodes of a body when all calls are inlined, and how deep they lie."""
    total = deepest = 0
    for node, depth in _nodes(body):
        count, levels = sizes.get(_called(node), (1, 0))
        total, deepest = total + count, max(deepest, depth + levels)
    return total, deepest


def _callees_first(functions: Mapping[_Called, onnx.FunctionProto]) -> list[_Called]:
    """Return the functions in an order in which each comes after those that it calls."""
    calls = {
        caller: {_called(node) for node, _ in _nodes(function)} & functions.keys()
        for caller, function in functions.items()
    }
    callers: dict[_Called, list[_Called]] = {called: [] for called in calls}
    for caller, called_ones in calls.items():
        for called in called_ones:
            callers[called].append(caller)
    missing = {caller: len(called_ones) for caller, called_ones in calls.items()}
    order = [caller for caller, count in missing.items() if not count]
    for called in order:
        for caller in callers[called]:
            missing[caller] -= 1
            if not missing[caller]:
                order.append(caller)
    stuck = [name for (_, name, _), count in missing.items() if count]
    if stuck:
        raise ModelError(
            "the functions of the model are recursive, they call themselves or each other in turn: "
            f"{', '.join(map(repr, stuck[:4]))}"
        )
    return order
