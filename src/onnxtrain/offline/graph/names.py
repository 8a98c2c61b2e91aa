"""Names of values and nodes."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from onnxtrain.offline.graph.subgraphs import values_of


class Names:
    """The names in use in a model, and new ones that collide with none of them."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)
        self._next: dict[str, int] = {}

    @classmethod
    def of(cls, graph: ir.Graph) -> Names:
        """Collect every value and node name of a graph and its subgraphs."""
        taken: set[str] = set()
        for each in (graph, *graph.subgraphs()):
            taken.update(value.name for value in values_of(each) if value.name)
            taken.update(node.name for node in each if node.name)
        return cls(taken)

    def __contains__(self, name: str) -> bool:
        return name in self._taken

    def fresh(self, wish: str) -> str:
        """Return `wish`, or `wish_1`, `wish_2` … if it is taken, and take it."""
        name = wish
        while name in self._taken:
            self._next[wish] = number = self._next.get(wish, 0) + 1
            name = f"{wish}_{number}"
        self._taken.add(name)
        return name


def label_of(node: ir.Node) -> str:
    """Return a name for a node in messages: its own, that of its output, or its operator."""
    return node.name or (node.outputs[0].name if node.outputs else None) or node.op_type
