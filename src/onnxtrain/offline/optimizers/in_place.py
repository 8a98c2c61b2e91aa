"""Whether an output may be written into the memory of an input, and how to make it so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import onnx_ir as ir

from onnxtrain.offline.graph.op_facts import REARRANGES, VIEWS
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import HIDDEN_DIMS, static_dims
from onnxtrain.offline.graph.subgraphs import ancestors, sources, subgraphs_of


class ControlDependencies:
    """What an update has to run after, so that nothing reads a parameter once it is overwritten.

    The gradient of a weight does not depend on the gradient of the layer's input, which still reads
    the weight. Such a dependency is added: a Reshape of the gradient to its own shape, where the
    shape is computed from one element of each of those results. No runtime can know that the
    element does not matter, and no data is copied. The update may then be written over the weight.
    """

    def __init__(self, graph: ir.Graph, gradients: Mapping[ir.Value, ir.Value]) -> None:
        owners = _owners(graph)
        needed = (*graph.outputs, *gradients.values())
        self.live = ancestors([p for v in needed if (p := v.producer()) is not None])
        self._gradients = dict(gradients)
        self._ends = {
            p: [node for node in _ends((n for n, _ in p.uses()), owners) if node in self.live]
            for p in gradients
        }
        self._place = {node: i for i, node in enumerate(graph)}
        readers = {node for nodes in self._ends.values() for node in nodes}
        self._bit = {node: 1 << i for i, node in enumerate(readers)}
        # For every node the readers that it depends on, itself included, as bits of a number.
        self._before: dict[ir.Node | None, int] = {}
        for node in graph:  # in topological order
            self._before[node] = self._bit.get(node, 0)
            for source in sources(node):
                self._before[node] |= self._before.get(source, 0)

    def flag(self, op: Ops, parameters: Iterable[ir.Value]) -> ir.Value | None:
        """Return a number, 0 or 1, that is computed when the parameters may be overwritten.

        None where their gradients depend on every reader already.
        """
        late = self._late(list(parameters))
        if not late:
            return None
        with written_behind(op, max(late, key=lambda node: self._place[node])):
            flags = [flag_of(op, node.outputs[0]) for node in late]
            return flags[0] if len(flags) == 1 else op.Max(*flags)

    def _late(self, parameters: Sequence[ir.Value]) -> list[ir.Node]:
        """Return the readers that neither a gradient nor another one of them depends on."""
        readers = list(dict.fromkeys(node for p in parameters for node in self._ends[p]))
        seen = 0
        for parameter in parameters:
            seen |= self._before.get(self._gradients[parameter].producer(), 0)
        return [
            node
            for node in readers
            if not seen & self._bit[node]
            and not any(self._before[r] & self._bit[node] for r in readers if r is not node)
        ]


@contextmanager
def written_behind(op: Ops, node: ir.Node) -> Iterator[list[ir.Node]]:
    """Put what is written into a graph behind a node of it; the list is filled in the end.

    Of two inputs of a node, onnxruntime computes the one that is later in the file first. So the
    gradient of a weight is computed before the nodes of its control dependencies, and what it is
    computed from is released before they run.
    """
    graph = op.target
    last = graph[-1]
    written: list[ir.Node] = []
    yield written
    while graph[-1] is not last:
        written.append(graph[-1])
        graph.remove(graph[-1])
    node.append(reversed(written))


def delayed(op: Ops, gradient: ir.Value, parameter: ir.Value, flag: ir.Value | None) -> ir.Value:
    """Return the gradient of a parameter as a value that depends on the flag."""
    dims = static_dims(parameter)
    assert dims is not None, "the shape of a parameter is known"
    if flag is None or 0 in dims:
        return gradient
    made_by = flag.producer()
    assert made_by is not None
    with written_behind(op, made_by):
        shape = op.Max(op.int64(list(dims)), flag)
    late = op.Reshape(gradient, shape)
    # onnxruntime merges a chain of Reshapes whose last shape it knows, and with it the dependency
    # would go. So this shape is hidden from it.
    late.type, late.shape = gradient.type, None
    late.meta[HIDDEN_DIMS] = dims
    return late


def flag_of(op: Ops, value: ir.Value) -> ir.Value:
    """Return a vector of one number, 0 or 1, from the first element of a tensor of any type."""
    first = op.Slice(op.Reshape(value, [-1]), [0], [1], [0])
    number = op.Cast(op.Cast(first, to=ir.DataType.BOOL), to=ir.DataType.INT64)
    return op.ReduceSum(number, [0], keepdims=1)  # 0 where there is no element


def _ends(readers: Iterable[ir.Node], owners: Mapping[ir.Node, ir.Node]) -> list[ir.Node]:
    """Return the nodes that compute with what the readers read or rearrange."""
    found: dict[ir.Node, None] = {}
    pending = list(readers)
    while pending:
        node = pending.pop()
        users = [user for user, _ in node.outputs[0].uses()]
        if node.op_type in REARRANGES and node.domain == "" and users:
            pending.extend(users)
        else:
            found[owners.get(node, node)] = None
    return list(found)


def late_readers(value: ir.Value, updated: ir.Value) -> list[ir.Node]:
    """Return the nodes that may read a value when `updated` has been written over it.

    Those are all its readers, also through views of it, that the node which writes `updated` does
    not depend on. Where there are none, `updated` may be bound to the memory of `value`, whatever
    order a runtime executes the graph in.
    """
    writer = updated.producer()
    assert writer is not None
    before = ancestors([writer])
    # A body reads while the node that owns it runs.
    owners = _owners(writer.graph or ())
    readers = (owners.get(node, node) for node in _readers(value))
    return [node for node in readers if node not in before]


def _owners(graph: Iterable[ir.Node]) -> dict[ir.Node, ir.Node]:
    """Map the nodes in bodies to the node of the graph that they are a part of."""
    return {
        inner: node for node in graph for body in subgraphs_of(node) for inner in body.all_nodes()
    }


def _readers(value: ir.Value) -> Iterator[ir.Node]:
    for node, _ in value.uses():
        yield node
        if node.op_type in VIEWS and node.domain == "":
            yield from _readers(node.outputs[0])
