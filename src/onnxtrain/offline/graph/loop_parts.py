"""A Loop, taken apart: the values in its body and those around it that belong together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import onnx_ir as ir

from onnxtrain.offline.graph.shapes import constant_array


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

    @cached_property
    def runs_to_the_end(self) -> bool:
        """Whether nothing but the trip count ends the Loop."""
        started = self.node.inputs[1]
        last: ir.Value | None = self.body.outputs[0]
        while last is not None and last is not self.condition and _is_identity(last.producer()):
            last = last.producer().inputs[0]  # type: ignore[union-attr]
        goes_on = last is self.condition or _is_true(last)
        return self.node.inputs[0] is not None and (started is None or _is_true(started)) and goes_on

    @property
    def trip_count(self) -> int | None:
        """The number of steps, if it is known before run time."""
        limit = constant_array(self.node.inputs[0])
        return max(int(limit.reshape(-1)[0]), 0) if self.runs_to_the_end and limit is not None else None


def _is_identity(node: ir.Node | None) -> bool:
    return node is not None and node.op_type == "Identity" and node.domain == ""


def _is_true(value: ir.Value | None) -> bool:
    known = constant_array(value)
    return known is not None and bool(known.all())
