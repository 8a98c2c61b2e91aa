"""What a forward Loop gives beyond its outputs, so that its gradient can run its steps again."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.errors import NotDifferentiableError
from onnxtrain.offline.graph.loop_parts import LoopParts, replace_loop, take_over
from onnxtrain.offline.graph.names import label_of
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import dims_of


class Record:
    """The values of all steps of a Loop, by the value in its body.

    They are stand-ins until `keep_what_is_read` lets the Loop give those that anything reads.
    """

    def __init__(self, op: Ops, node: ir.Node) -> None:
        self.op = op
        self.parts = LoopParts(node)
        for inner, outer in zip(self.parts.body.outputs[1:], node.outputs, strict=True):
            if not outer.name:
                outer.name = op.names.fresh(f"{label_of(node)}/{inner.name}_out")
                outer.type = inner.type
        self._kept: dict[ir.Value, ir.Value] = {}

    def trips(self) -> ir.Value:
        """Return the number of steps: the trip count, or counted where a condition can end them."""
        op, parts = self.op, self.parts
        if parts.trip_count is not None:
            return op.int64(parts.trip_count)
        limit = parts.node.inputs[0]
        if parts.runs_to_the_end and limit is not None:
            return op.Max(limit if dims_of(limit) == () else op.reshape(limit, []), 0)
        return op.squeeze(op.Shape(self.stack(parts.iteration)), [0])

    def stack(self, value: ir.Value) -> ir.Value:
        """Return the values of all steps along a new first axis, or as a sequence."""
        if value not in self._kept:
            kept = ir.Value(name=self.op.names.fresh(f"{value.name}_of_all_steps"))
            kept.type = value.type
            if self.parts.is_steady(value):
                self.op.with_dims(kept, (self.parts.steps, *(dims_of(value) or ())))
            elif isinstance(value.type, ir.TensorType):
                kept.type = ir.SequenceType(value.type)
            self._kept[value] = kept
        return self._kept[value]

    def read(self, value: ir.Value, at: ir.Value) -> ir.Value:
        """Read the value of one step."""
        op, stack = self.op, self.stack(value)
        if not isinstance(value.type, ir.TensorType):
            return stack  # an error, if anything reads it
        in_sequence = isinstance(stack.type, ir.SequenceType)
        found = op.SequenceAt(stack, at) if in_sequence else op.Gather(stack, at, axis=0)
        return op.type_as(found, value)

    def keep_what_is_read(self) -> None:
        """Let the Loop give what the stand-ins stand for."""
        read = {inner: kept for inner, kept in self._kept.items() if kept.uses()}
        for inner, kept in read.items():
            if not isinstance(inner.type, ir.TensorType):
                raise NotDifferentiableError(
                    f"the gradient of Loop (node {label_of(self.parts.node)!r}) needs its state "
                    f"{inner.name!r} in each step, which is a {inner.type}: only tensors are kept. "
                    "Let the Loop carry or collect tensors"
                )
            if isinstance(kept.type, ir.SequenceType):
                self._keep_in_sequence(inner, kept)
            else:
                self._collect(inner, kept)

    def _collect(self, inner: ir.Value, kept: ir.Value) -> None:
        node, body = self.parts.node, self.parts.body
        body.append(self._named(ir.node("Identity", [inner]), inner))
        body.outputs.append(self.op.type_as(body[-1].outputs[0], inner))
        node.resize_outputs(len(node.outputs) + 1)
        take_over(node.outputs[-1], kept)

    def _keep_in_sequence(self, inner: ir.Value, kept: ir.Value) -> None:
        """Add a state to the Loop; that takes a new node, since states come before the rest."""
        op, node, body = self.op, self.parts.node, self.parts.body
        graph, states = node.graph, len(self.parts.states)
        assert isinstance(graph, ir.Graph) and inner.dtype is not None
        empty = self._named(ir.node("SequenceEmpty", [], {"dtype": inner.dtype}), inner)
        graph.insert_before(node, empty)
        before = ir.Value(name=op.names.fresh(f"{kept.name}_before"), type=kept.type)
        insert = self._named(ir.node("SequenceInsert", [before, inner]), inner)
        body.append(insert)
        body.inputs.append(before)
        body.outputs.insert(1 + states, insert.outputs[0])
        for made in (empty, insert):
            made.outputs[0].type = kept.type
        outputs = [*node.outputs[:states], kept, *node.outputs[states:]]
        larger = replace_loop(node, [*node.inputs, empty.outputs[0]], outputs)
        self.parts = LoopParts(larger)

    def _named(self, node: ir.Node, inner: ir.Value) -> ir.Node:
        node.name = self.op.names.fresh(f"{label_of(self.parts.node)}/{node.op_type}")
        node.outputs[0].name = self.op.names.fresh(f"{inner.name}_kept")
        return node
