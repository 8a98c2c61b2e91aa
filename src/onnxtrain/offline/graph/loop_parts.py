"""A Loop, taken apart: the values in its body and those around it that belong together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import onnx_ir as ir

from onnxtrain.offline.graph.op_facts import VIEWS
from onnxtrain.offline.graph.shapes import UNKNOWN, Dim, constant_array, dims_of, dims_read
from onnxtrain.offline.graph.subgraphs import captured_values


@dataclass(frozen=True)
class State:
    """A value that a Loop carries from step to step."""

    initial: ir.Value
    before: ir.Value  # an input of the body
    after: ir.Value  # an output of the body
    final: ir.Value


class LoopParts:
    """The states of a Loop, what it collects, and how many steps it makes."""

    def __init__(self, node: ir.Node) -> None:
        self.node = node
        self.body: ir.Graph = node.attributes["body"].as_graph()
        self.iteration, self.condition = self.body.inputs[:2]
        initials = [v for v in node.inputs[2:] if v is not None]
        # Outputs that nothing uses may be left out at the end.
        node.resize_outputs(len(self.body.outputs) - 1)
        self.states = [
            State(*values)
            for values in zip(
                initials,
                self.body.inputs[2:],
                self.body.outputs[1:],
                node.outputs,
                strict=False,
            )
        ]
        first = len(self.states)
        self.collected = list(
            zip(self.body.outputs[1 + first :], node.outputs[first:], strict=True)
        )

    def is_steady(self, value: ir.Value) -> bool:
        """Tell whether a value in the body has the same shape in all steps, for certain."""
        dims = dims_of(value)
        return dims is not None and all(
            isinstance(dim, int) or (dim.value is not None and dim.value in self._symbols)
            for dim in dims
        )

    @cached_property
    def _symbols(self) -> set[str | None]:
        """The sizes that have a name outside of the body."""
        outside = (*self.node.inputs, *self.node.outputs, *captured_values(self.node))
        shapes = [dims_of(value) or () for value in outside if value is not None]
        return {dim.value for dims in shapes for dim in dims if not isinstance(dim, int)}

    @cached_property
    def runs_to_the_end(self) -> bool:
        """Whether nothing but the trip count ends the Loop."""
        started = self.node.inputs[1]
        last: ir.Value | None = self.body.outputs[0]
        while last is not None and last is not self.condition and _is_identity(last.producer()):
            last = last.producer().inputs[0]  # type: ignore[union-attr]
        goes_on = last is self.condition or _is_true(last)
        return (
            self.node.inputs[0] is not None and (started is None or _is_true(started)) and goes_on
        )

    @property
    def trip_count(self) -> int | None:
        """The number of steps, if it is known before run time."""
        limit = constant_array(self.node.inputs[0])
        if limit is None or not self.runs_to_the_end:
            return None
        return max(int(limit.reshape(-1)[0]), 0)

    @property
    def steps(self) -> Dim:
        """The number of steps as a dimension: a number, the size of an axis, or unknown."""
        if self.trip_count is not None:
            return self.trip_count
        return _size_read(self.node.inputs[0]) if self.runs_to_the_end else UNKNOWN


def _size_read(value: ir.Value | None) -> Dim:
    """Return the size of an axis that a value is."""
    node = None if value is None else value.producer()
    if node is None or node.domain != "":
        return UNKNOWN
    if node.op_type in VIEWS or node.op_type == "Cast":
        return _size_read(node.inputs[0])
    index = 0
    if node.op_type == "Gather":
        place = constant_array(node.inputs[1])
        node = None if node.inputs[0] is None else node.inputs[0].producer()
        if place is None or place.size != 1 or node is None:
            return UNKNOWN
        index = int(place.reshape(-1)[0])
    if node.op_type != "Shape" or node.domain != "":
        return UNKNOWN
    dims = dims_read(node)
    return UNKNOWN if dims is None or not -len(dims) <= index < len(dims) else dims[index]


def replace_loop(
    node: ir.Node, inputs: Sequence[ir.Value | None], outputs: Sequence[ir.Value | None]
) -> ir.Node:
    """Replace a Loop, whose body has been changed, by one with other inputs and outputs.

    `outputs` has the old outputs and stand-ins in their new places; the new ones take them over.
    """
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    new = ir.Node(
        "", "Loop", inputs, list(node.attributes.values()), num_outputs=len(outputs), name=node.name
    )
    graph.insert_after(node, new)
    for old, value in zip(outputs, new.outputs, strict=True):
        if old is not None:
            take_over(value, old)
    graph.remove(node, safe=True)
    return new


def take_over(value: ir.Value, old: ir.Value) -> None:
    """Give a value the name, type and readers of another one."""
    value.name, value.type, value.shape = old.name, old.type, old.shape
    if old.producer() is not None:
        old.name = f"{old.name}_before"
    ir.convenience.replace_all_uses_with(old, value, replace_graph_outputs=True)


def _is_identity(node: ir.Node | None) -> bool:
    return node is not None and node.op_type == "Identity" and node.domain == ""


def _is_true(value: ir.Value | None) -> bool:
    known = constant_array(value)
    return known is not None and bool(known.all())
