"""The rule of Loop; a Scan becomes a Loop first (`scan.py`).

The gradient is a Loop from the last step to the first. A step of it computes the step of the model
again, from the states before it, and differentiates it. It carries the cotangents of the states,
and adds up those of the values that the body captures. So the forward Loop has to give more than it
did: the states before each step, and how many steps there were, where only it can tell
(`loop_record.py`).

What takes long to compute again is recorded as well, and so is what was drawn at random. Where all
steps use parts of one value, or multiply with one matrix, its cotangent follows from those of all
steps at once (`deferred.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir

from onnxtrain.offline.autodiff.definitions import Definition, write_definition
from onnxtrain.offline.autodiff.engine import ActivePath, current_path, differentiate
from onnxtrain.offline.autodiff.registry import Cotangents, rule
from onnxtrain.offline.autodiff.rules.control import draws, require_certainty
from onnxtrain.offline.autodiff.rules.deferred import Deferred, deferrals
from onnxtrain.offline.autodiff.rules.loop_record import Record
from onnxtrain.offline.graph.copy_graph import copy_graph
from onnxtrain.offline.graph.loop_parts import State
from onnxtrain.offline.graph.op_facts import COSTLY
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import Dim, dims_of
from onnxtrain.offline.graph.subgraphs import captured_values, take_out
from onnxtrain.offline.graph.sweep import sweep

_FIRST = -(2**63)  # as the end of a Slice backwards: up to the first element


@rule("Loop", notes="to its states and to the values that its body uses; steps are computed again")
def loop(op: Ops, node: ir.Node, *dys: ir.Value | None) -> Cotangents:
    """A Loop over the steps in reverse: (dh, sum) becomes (∂step/∂h dh, sum + ∂step/∂w dh)."""
    scope = op.scope
    for inner in list(node.attributes["body"].as_graph()):
        if inner.op_type == "Dropout" and draws(inner):
            write_definition(op, inner, Definition(_factor_drawn, ()))
    op.scope = scope
    (path,) = current_path().inside(node)
    return _Reverse(op, Record(op, node), path, dys).write()


def _factor_drawn(
    op: Ops, node: ir.Node, x: ir.Value, ratio: ir.Value | None, training: ir.Value
) -> Sequence[ir.Value]:
    """Dropout as a product, so that what it draws is a value of its own, which can be recorded.

    The factor is made of the mask: onnxruntime removes a Dropout whose mask nothing reads.
    """
    mask = op.call("Dropout", x, ratio, training, outputs=2, like=x)[1]
    mask.type = ir.TensorType(ir.DataType.BOOL)
    kept = op.cast(op.shape_as(mask, x), x.dtype)
    half = op.const(0.5, x.dtype)
    share = op.Sub(1.0, half if ratio is None else op.cast(ratio, x.dtype))
    scale = op.Where(training, op.Reciprocal(share), op.const(1.0, x.dtype))
    return op.Mul(x, op.Mul(kept, scale)), mask


class _Reverse:
    """The Loop that runs from the last step to the first."""

    def __init__(
        self, op: Ops, record: Record, path: ActivePath, dys: Sequence[ir.Value | None]
    ) -> None:
        self.op, self.record = op, record
        parts = record.parts
        outputs = parts.node.outputs  # those that the model leaves out come last
        self.dys = dict(zip(outputs, (*dys, *[None] * len(outputs)), strict=False))
        self.through = current_path().straight_through
        passing = path.between(parts.states)
        self.states = [s for s in parts.states if s.before in passing]
        self.captured = [v for v in path.reached() if v not in {s.before for s in parts.states}]
        self.deferred = deferrals(record, set(self.captured))
        self.summed: list[tuple[ir.Value, ir.Value]] = []  # what is captured, and its sum so far
        self.copied: dict[ir.Node, ir.Node] = {}  # by the copy

    def write(self) -> Cotangents:
        """Write the Loop and what comes before and behind it, and return all cotangents."""
        op, record = self.op, self.record
        trips = record.trips()
        self.last = op.Sub(trips, 1)
        finals = [self._d_final(s) for s in self.states]
        inputs: list[tuple[str, ir.DataType, Sequence[Dim] | None]] = [
            ("step", ir.DataType.INT64, ()),
            ("go_on", ir.DataType.BOOL, ()),
        ]
        inputs += [("d_state", s.before.dtype, dims_of(s.before)) for s in self.states]  # type: ignore[misc]
        body = op.body(inputs, self._step, name="reverse")
        body.inputs.extend(total for _, total in self.summed)
        sweep(body, keep=[self.at])
        self._record_costly(body)
        sweep(body)
        require_certainty(record.parts.node, body, "the body of Loop", "the Loop")
        zeros = [op.zeros_like(v) for v, _ in self.summed]
        results = op.call(
            "Loop", trips, op.const(True), *finals, *zeros, outputs=len(body.outputs) - 1, body=body
        )
        targets = [*(s.initial for s in self.states), *(v for v, _ in self.summed)]
        contributions: dict[ir.Value, list[ir.Value]] = {}
        for target, result in zip(targets, results, strict=False):
            contributions.setdefault(target, []).append(op.type_as(result, target))
        ready = [d for d in self.deferred.values() if d.dy is not None]
        for each, result in zip(ready, results[len(targets) :], strict=True):
            dys = self._in_order(each, result)
            contributions.setdefault(each.shared, []).append(each.cotangent(op, record, dys))
        record.keep_what_is_read()
        return {value: op.add_all(parts) for value, parts in contributions.items()}

    def _d_final(self, state: State) -> ir.Value:
        dy = self.dys[state.final]
        return self.op.zeros_like(state.final) if dy is None else dy

    def _in_order(self, each: Deferred, stacked: ir.Value) -> ir.Value:
        """Turn what the reverse Loop collected into the order of the steps."""
        y = each.node.outputs[0]
        dims = (self.record.parts.steps, *(dims_of(y) or ()))
        stacked.type = y.type
        turned = self.op.slice(self.op.with_dims(stacked, dims), 0, -1, _FIRST, -1)
        return self.op.with_dims(turned, dims)

    def _step(self, step: ir.Value, go_on: ir.Value, *d_states: ir.Value) -> Sequence[ir.Value]:
        op, record, parts = self.op, self.record, self.record.parts
        self.at = op.Sub(self.last, step)
        copies = {parts.iteration: self.at, parts.condition: op.const(True)}
        for state in parts.states:
            copies[state.before] = record.read(state.before, self.at)
        first = len(op.target)
        copy_graph(parts.body, op.target, copies, op.names)
        self.copied = dict(zip(list(op.target)[first:], parts.body, strict=True))
        found = differentiate(
            op, list(op.target), self._seeds(copies, d_states),
            [*(copies[s.before] for s in self.states), *self.captured], self.through,
            rules={
                copy: self.deferred[node].rule()
                for copy, node in self.copied.items() if node in self.deferred
            },
            finite=self._finite(),
        )  # fmt: skip
        before = [
            self._zeros(state, d, copies) if (found_d := found[copies[state.before]]) is None
            else found_d
            for state, d in zip(self.states, d_states, strict=True)
        ]  # fmt: skip
        sums = [op.Add(total, d) for total, d in self._totals(found)]
        return [op.const(True), *before, *sums, *self._deferred_dys()]

    def _finite(self) -> list[ir.Value]:
        """Return the weights, in training, and the states that start with a computed value."""
        if self.through is not None:
            return []
        computed = [
            s.before
            for s in self.states
            if s.initial.producer() is not None or s.initial.const_value is not None
        ]
        return [*self.captured, *map(self.record.stack, computed)]

    def _seeds(
        self, copies: dict[ir.Value, ir.Value], d_states: Sequence[ir.Value]
    ) -> dict[ir.Value, ir.Value]:
        """Return the cotangents of what a step returns."""
        op = self.op
        seeds: dict[ir.Value, list[ir.Value]] = {}
        for state, d in zip(self.states, d_states, strict=True):
            seeds.setdefault(copies.get(state.after, state.after), []).append(d)
        for inner, outer in self.record.parts.collected:
            dys = self.dys[outer]
            if dys is not None:
                dy = op.type_as(op.Gather(dys, self.at, axis=0), inner)
                seeds.setdefault(copies.get(inner, inner), []).append(dy)
        return {value: op.add_all(parts) for value, parts in seeds.items()}

    def _zeros(self, state: State, d: ir.Value, copies: dict[ir.Value, ir.Value]) -> ir.Value:
        steady = self.record.parts.is_steady(state.before)
        return self.op.zeros_like(d if steady else copies[state.before])

    def _totals(
        self, found: dict[ir.Value, ir.Value | None]
    ) -> Iterator[tuple[ir.Value, ir.Value]]:
        for value in self.captured:
            d = found[value]
            if d is not None:
                total = ir.Value(name=self.op.names.fresh(f"{self.op.scope}/sum"))
                self.summed.append((value, self.op.type_as(total, value)))
                yield total, d

    def _deferred_dys(self) -> list[ir.Value]:
        return [d.dy for d in self.deferred.values() if d.dy is not None]

    def _record_costly(self, body: ir.Graph) -> None:
        """Let the forward Loop give what the gradient needs and takes long to compute again.

        That is what gradients read of a step, where a product or the like comes before it. What is
        drawn at random is always given. Recording takes memory: a lean gradient leaves it.
        """
        again = [node for node in body if node in self.copied]
        within = {*again, *(n for node in again for n in _inner_nodes(node))}
        costly: set[ir.Value] = set()
        for copy in again:
            drawn = draws(copy)
            if drawn or (copy.domain == "" and copy.op_type in COSTLY) or any(
                v in costly for v in (*copy.inputs, *captured_values(copy))
            ):  # fmt: skip
                costly.update(copy.outputs)
            for original, value in zip(self.copied[copy].outputs, copy.outputs, strict=False):
                read = any(user not in within for user, _ in value.uses())
                saves = read and value in costly and not self.op.lean
                if drawn or (saves and self.record.parts.is_steady(original)):
                    self._read_instead(copy, value, original)
                    costly.discard(value)

    def _read_instead(self, copy: ir.Node, value: ir.Value, original: ir.Value) -> None:
        """Read an output of a node from the record."""
        reader = self.op.body([], lambda: [self.record.read(original, self.at)])
        (read,), nodes = take_out(reader)
        assert isinstance(copy.graph, ir.Graph)
        copy.graph.insert_before(copy, nodes)
        ir.convenience.replace_all_uses_with(value, read, replace_graph_outputs=True)


def _inner_nodes(node: ir.Node) -> Iterator[ir.Node]:
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield from attribute.as_graph().all_nodes()
