"""Takes the slots for an adapter out of a model: what is left is the base."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import onnx

from onnxtrain.errors import AdapterError
from onnxtrain.format.adapter.pairs import is_factor


def remove_slots(graph: onnx.GraphProto) -> list[str]:
    """Remove the factors that are inputs with defaults, and what adds their product; return them.

    What a slot leads to ends in an addition to the base: the addition goes, and the value it made
    is made by the base again.
    """
    defaults = {tensor.name for tensor in graph.initializer}
    slots = [v.name for v in graph.input if v.name in defaults and is_factor(v.name)]
    if not slots:
        return []
    updates, gone, sums = set(slots), set[str](), dict[str, str]()
    for node in graph.node:
        read = [name in updates for name in node.input]
        if not any(read):
            continue
        gone.add(node.output[0])
        if node.op_type == "Add" and sum(read) == 1:
            sums[node.output[0]] = node.input[read.index(False)]
        else:
            updates.update(node.output)
    _drop_nodes(graph, gone)
    _reconnect(graph, sums, defaults)
    outputs = {value.name for value in graph.output}
    if updates.intersection(outputs, (name for node in graph.node for name in node.input)):
        raise AdapterError(
            "the model does something else with its factors than adding their product: pass the "
            "model without slots"
        )
    _drop(graph.input, slots)
    _drop(graph.initializer, slots)
    return slots


def _reconnect(graph: onnx.GraphProto, sums: dict[str, str], tensors: Collection[str]) -> None:
    """Let the base make each sum under its name; weights and bases of several sums keep theirs."""
    several = Counter(sums.values())
    renamed = {base: made for made, base in sums.items() if several[base] == 1}
    renamed = {base: made for base, made in renamed.items() if base not in tensors}
    back = {made: base for made, base in sums.items() if base not in renamed}
    for node in graph.node:
        for place, name in enumerate(node.output):
            node.output[place] = renamed.get(name, name)
        for place, name in enumerate(node.input):
            node.input[place] = back.get(name, renamed.get(name, name))


def _drop_nodes(graph: onnx.GraphProto, outputs: Collection[str]) -> None:
    kept = [node for node in graph.node if not node.output or node.output[0] not in outputs]
    del graph.node[:]
    graph.node.extend(kept)


def _drop(values: Any, names: Collection[str]) -> None:
    kept = [value for value in values if value.name not in names]
    del values[:]
    values.extend(kept)
