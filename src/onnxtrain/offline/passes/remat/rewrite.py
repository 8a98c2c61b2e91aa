"""Writes the copies: late nodes read values that are computed again.

A runtime merges nodes that compute the same, and runs nodes as early as it likes. Either would undo
it. So each chain of copies begins with a kept value that has passed through a Reshape to its own
shape, and the shape is computed from one element of a gradient that is there when the copies are
due: no optimiser can know that the element does not matter, and a Reshape copies no data.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import UNKNOWN, dims_of, static_dims
from onnxtrain.offline.graph.subgraphs import move_before, subgraphs_of
from onnxtrain.offline.graph.sweep import sweep
from onnxtrain.offline.passes.remat.flow import Flow
from onnxtrain.offline.passes.remat.layers import Layers


@dataclass(frozen=True)
class Recomputation:
    """What is kept of the forward pass, by name; all other large values are computed again.

    `sizes` are the bytes of values, which tell the large ones from the others. `copies` tells what
    the values that were written are copies of.
    """

    kept: frozenset[str]
    sizes: Mapping[str, int]
    copies: dict[str, str] = field(default_factory=dict)

    def write(
        self,
        op: Ops,
        graph: ir.Graph,
        results: Sequence[ir.Value],
        forward: Collection[str],
        data: Collection[str],
    ) -> None:
        """Let the gradients in a graph compute again what is not kept.

        Args:
            op: the writer of the graph.
            graph: forward pass and gradients; nothing comes behind them.
            results: the gradients, and what else is not to be swept.
            forward: the names of the values of the forward pass.
            data: the names of the inputs that are not parameters.

        """
        sweep(graph, keep=results)
        op = Ops(graph, op.opset, op.names)
        forward = {*forward, *_shapes_early(op, graph, set(forward), self.sizes)}
        layers = Layers(Flow.of(graph), forward, data, self.sizes)
        self.copies.update(_Rewriting(op, graph, layers, layers.copied(self.kept)).run())
        sweep(graph, keep=results)


class _Rewriting:
    def __init__(self, op: Ops, graph: ir.Graph, layers: Layers, copied: set[int]) -> None:
        self._op = op
        self._graph = graph
        self._layers = layers
        self._nodes = list(graph)
        self._copied = {self._nodes[i] for i in copied}
        self._place = {node: i for i, node in enumerate(self._nodes)}
        self._made: dict[ir.Value, ir.Value] = {}
        self._gates: dict[ir.Value, ir.Value] = {}
        self._flags: dict[ir.Value, ir.Value] = {}
        self._after: dict[tuple[ir.Value, ir.Value], ir.Value] = {}
        op.scope = "again"

    def run(self) -> dict[str, str]:
        """Go through the late nodes; return the names of copies, and of what they are copies of."""
        late = [self._nodes[place] for place in sorted(self._layers.late)]
        # What runs when a gradient asks for it comes first: of what a node needs, onnxruntime runs
        # first what is last in the file, and that shall be the gradient.
        self._graph.remove(late)
        self._graph.extend(late)
        for node in late:
            last = self._graph[-1]
            wanted = [v for v in _reads(node) if self._is_copied(v)]
            if not wanted:
                continue
            gate = self._gate(node)
            for value in wanted:
                self._copy(value, gate)
            for reader in (node, *(n for body in subgraphs_of(node) for n in body.all_nodes())):
                for index, read in enumerate(reader.inputs):
                    if read is not None and read in self._made:
                        reader.replace_input_with(index, self._made[read])
            if self._graph[-1] is not last:
                move_before(self._graph, last, node)
        return {str(new.name): str(old.name) for old, new in self._made.items()}

    def _is_copied(self, value: ir.Value) -> bool:
        return value.producer() in self._copied and value.name not in self._layers.fixed

    def _gate(self, node: ir.Node) -> ir.Value:
        """Return the last one of the late values that a node reads."""
        layers = self._layers
        late = [v for v in _reads(node) if v.name in layers.late_names or v.name in layers.ends]
        return max(late, key=lambda v: layers.maker[v.name or ""])

    def _copy(self, value: ir.Value, gate: ir.Value) -> None:
        """Write what a value is computed from that is not there; iteratively, it may be long."""
        waiting = [value]
        while waiting:
            current = waiting[-1]
            node = current.producer()
            assert node is not None
            needed = [v for v in node.inputs if v and self._is_copied(v) and v not in self._made]
            if needed and current not in self._made:
                waiting.extend(needed)
                continue
            waiting.pop()
            if current not in self._made:
                self._clone(node, gate)

    def _clone(self, node: ir.Node, gate: ir.Value) -> None:
        inputs = [None if v is None else self._made.get(v, v) for v in node.inputs]
        if not any(v in self._gates and self._gates[v] is gate for v in node.inputs if v):
            index = self._layers.first_of_data(self._layers.steps[self._place[node]])
            kept = inputs[index]
            assert kept is not None
            inputs[index] = self._wait(kept, gate)
        copy = ir.Node(
            node.domain, node.op_type, inputs, list(node.attributes.values()),
            num_outputs=len(node.outputs), overload=node.overload, version=node.version,
            name=self._op.names.fresh(f"{node.name or node.op_type}_again"),
        )  # fmt: skip
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            new.name = self._op.names.fresh(f"{old.name}_again") if old.name else old.name
            new.type, new.shape = old.type, None if old.shape is None else old.shape.copy()
            self._made[old] = new
            self._gates[old] = gate
        self._graph.append(copy)

    def _wait(self, value: ir.Value, gate: ir.Value) -> ir.Value:
        """Return the value itself, as soon as another one is there."""
        if (value, gate) not in self._after:
            op = self._op
            shape = op.shape_of(value)
            waiting = op.Reshape(value, op.Add(shape, self._zero(gate)), allowzero=1)
            # onnxruntime replaces a chain of Reshapes whose last shape it knows by one that waits
            # for nothing. So it is not told all of this one's.
            dims = dims_of(value)
            waiting.type = value.type
            waiting.shape = ir.Shape([UNKNOWN, *dims[1:]]) if dims else None
            self._after[value, gate] = waiting
        return self._after[value, gate]

    def _zero(self, gate: ir.Value) -> ir.Value:
        """Return a vector of one zero, computed from the first element of a tensor of any type."""
        op = self._op
        if gate not in self._flags:
            first = op.Slice(op.Reshape(gate, [-1]), [0], [1], [0])
            number = op.Cast(op.Cast(first, to=ir.DataType.BOOL), to=ir.DataType.INT64)
            found = op.ReduceSum(number, [0], keepdims=1)  # 0 where there is no element
            self._flags[gate] = op.Min(found, op.int64([0]))
        return self._flags[gate]


def _reads(node: ir.Node) -> list[ir.Value]:
    inner = (v for body in subgraphs_of(node) for n in body.all_nodes() for v in n.inputs)
    return [v for v in (*node.inputs, *inner) if v is not None]


def _shapes_early(
    op: Ops, graph: ir.Graph, forward: set[str], sizes: Mapping[str, int]
) -> list[str]:
    """Let shapes of forward values be taken in the forward pass; return the names of new values.

    A Shape runs when its result is asked for, and its input lives until then. Where a gradient
    asks, that is long. So what else reads the value, reads it through a Reshape to that shape.
    """
    written = []
    for node in [n for n in graph if any(v.name in forward for v in n.outputs)]:
        for value in node.outputs:
            shapes = [n for n, _ in value.uses() if n.op_type == "Shape" and n.domain == ""]
            others = [(n, i) for n, i in value.uses() if n not in shapes]
            if not shapes or static_dims(value) is not None or not others:
                continue
            written.extend(_shape_early(op, graph, value, shapes, others))
    return written


def _shape_early(
    op: Ops,
    graph: ir.Graph,
    value: ir.Value,
    shapes: list[ir.Node],
    others: list[tuple[ir.Node, int]],
) -> list[str]:
    op.scope = f"{value.name}/shape"
    last = graph[-1]
    whole = op.Shape(value)
    passed = op.type_as(op.Reshape(value, whole, allowzero=1), value)
    for node, index in others:
        node.replace_input_with(index, passed)
    for node in shapes:
        start, end = (node.attributes.get_int(k, d) for k, d in (("start", 0), ("end", 2**31 - 1)))
        taken = whole if (start, end) == (0, 2**31 - 1) else op.Slice(whole, [start], [end], [0])
        old = node.outputs[0]
        taken.type, taken.shape = old.type, old.shape
        ir.convenience.replace_all_uses_with(old, taken)
    producer = value.producer()
    assert producer is not None
    written = []
    while graph[-1] is not last:
        written.append(graph[-1])
        graph.remove(graph[-1])
    producer.append(reversed(written))
    return [str(v.name) for n in written for v in n.outputs]
