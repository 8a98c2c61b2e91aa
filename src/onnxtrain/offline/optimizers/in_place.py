"""Whether an output may be written into the memory of an input, and how to make it so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import onnx_ir as ir

from onnxtrain.offline.graph.control_dependencies import flag_of
from onnxtrain.offline.graph.kernels import (
    input_values,
    kernel_groups,
    output_values,
    read_by_kernel_alone,
)
from onnxtrain.offline.graph.op_facts import REARRANGES, VIEWS, WRITTEN_ANEW
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import static_dims
from onnxtrain.offline.graph.subgraphs import ancestors, sources, subgraphs_of, values_of


def after_readers(
    op: Ops,
    graph: ir.Graph,
    passed: ir.Value,
    overwritten: Sequence[ir.Value],
    needed: Sequence[ir.Value] = (),
) -> ir.Value:
    """Return a condition as a value that is computed when all readers of some inputs have run.

    Updates depend on it, and may then be written over what they replace. Most readers of a weight
    are on the way to a gradient, which the condition depends on anyway. Others are those whose
    result is only an output of the graph: the condition is made to depend on one element of each
    such result. No runtime can know that the element does not matter, and no data is copied.
    `needed` is what will be computed beside the outputs that the graph has so far.
    """
    check = passed.producer()
    assert check is not None
    owners, before = _owners(graph), ancestors([check])
    live = ancestors([p for v in (*graph.outputs, *needed) if (p := v.producer()) is not None])
    readers = dict.fromkeys(
        node for v in overwritten for node in _ends((n for n, _ in v.uses()), owners)
    )
    readers.update(dict.fromkeys(_ends_of_kernels(graph, overwritten, owners)))
    late = {n for n in readers if n in live and n not in before}
    if not late:
        return passed
    # One that another one needs has run before it. To ask it too would keep its result until then.
    late -= ancestors([source for node in late for source in sources(node)])
    in_order = [node for node in graph if node in late]
    with written_behind(op, in_order[-1]):
        flags = [flag_of(op, node.outputs[0]) for node in in_order]
        flag = flags[0] if len(flags) == 1 else op.Max(*flags)
        have_run = op.GreaterOrEqual(flag, op.int64([0]))
    return op.And(passed, have_run)


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


def steady_row(op: Ops, gradient: ir.Value) -> ir.Value:
    """Return a gradient for an If to read: as a row, where onnxruntime may write its node anew.

    It computes the inputs of an If from the newest node to the oldest, and nodes that it writes
    itself, in the place of a Transpose, a MatMul or several Reshapes, are the newest. With such a
    gradient, the backward pass would begin with the first layers: masks and copies for the
    gradients of all others would stay in memory. A Flatten, which copies nothing, stays the node
    that it is.
    """
    node = gradient.producer()
    if node is None or node.op_type not in WRITTEN_ANEW or static_dims(gradient) is None:
        return gradient
    with written_behind(op, node):
        return op.Flatten(gradient, axis=0)


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


def _ends_of_kernels(
    graph: ir.Graph, read: Iterable[ir.Value], owners: Mapping[ir.Node, ir.Node]
) -> Iterator[ir.Node]:
    """Yield the nodes that compute the results of kernels which read some values.

    The kernel may stand in for them. It reads a weight itself, where they read a copy of it that
    was made before.
    """
    values = {view for value in read for view in _views(value)}
    names = {str(value.name) for value in values}
    named = {str(value.name): value for value in values_of(graph)}
    for group, nodes in kernel_groups(graph).items():
        if not values.isdisjoint(input_values(group, nodes, named) or ()):
            made = (v.producer() for v in output_values(group, nodes) if v is not None)
            yield from (node for node in made if node is not None)
    for inner, node in owners.items():
        if not names.isdisjoint(read_by_kernel_alone(inner)):
            yield node


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
    for view in _views(value):
        yield from (node for node, _ in view.uses())


def _views(value: ir.Value) -> Iterator[ir.Value]:
    """Yield a value, and all that may share its memory."""
    yield value
    for node, _ in value.uses():
        if node.op_type in VIEWS and node.domain == "":
            yield from _views(node.outputs[0])
