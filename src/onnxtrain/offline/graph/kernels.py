"""Groups of nodes that a native kernel can stand in for.

A rule writes plain nodes and says what they are together: `op.kernel("ReluGrad", [dy, y], write)`.
Every pass sees the plain nodes. When the graph is written to a file, a group becomes a call of an
ONNX function whose body is these nodes (`writer/functions.py`): stock onnxruntime puts the body in
its place, and where our library is registered, its kernel of that name runs instead.

What a kernel reads and writes is remembered as places in the group, since values get other names
and readers other values on the way: "input 0 of the third node". A group that a pass has taken
apart, so that it does not fit any more, stays plain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from onnxtrain.offline.graph.shapes import is_float

Place = tuple[int, int]  # a node of the group, and its input or output
Attribute = int | float | str | Sequence[int]
_KEY = "kernel"


@dataclass(frozen=True)
class KernelInput:
    """Something that a kernel reads."""

    name: str  # of the value, for those that no node of the group reads
    read_at: tuple[Place, ...]  # where nodes of the group read it


@dataclass(frozen=True, eq=False)
class KernelGroup:
    """What the nodes of a group are together."""

    kind: str
    inputs: tuple[KernelInput, ...]
    outputs: tuple[Place | None, ...]  # None for one that the nodes do not compute
    attributes: Mapping[str, Attribute]
    saved_inputs: frozenset[int]  # which are what another kernel saved, see `mark_kernel`
    saved_outputs: frozenset[int]


def mark_kernel(
    nodes: Iterable[ir.Node],
    kind: str,
    inputs: Sequence[ir.Value],
    outputs: Sequence[ir.Value | None],
    *,
    saved: Collection[ir.Value] = (),
    **attributes: Attribute,
) -> KernelGroup | None:
    """Mark nodes as a group that the kernel of a kind can stand in for.

    Kernels compute with float32: where an input or output is of another float type, nothing is
    marked. Nodes that were in another group are in this one from now on.

    `saved` are outputs that only other kernels of ours read, and inputs that such a kernel made: a
    kernel may put something else there than the nodes do, of another shape. If one of the groups
    that share such a value stays plain, all of them do.
    """
    group_nodes = list(nodes)
    values = (*inputs, *outputs)
    if any(v is not None and is_float(v) and v.dtype != ir.DataType.FLOAT for v in values):
        return None
    read_at: dict[ir.Value, list[Place]] = {}
    made_at: dict[ir.Value, Place] = {}
    for place, node in enumerate(group_nodes):
        for index, value in enumerate(node.inputs):
            if value is not None:
                read_at.setdefault(value, []).append((place, index))
        made_at.update((value, (place, index)) for index, value in enumerate(node.outputs))
    group = KernelGroup(
        kind,
        tuple(KernelInput(str(v.name), tuple(read_at.get(v, ()))) for v in inputs),
        tuple(None if v is None else made_at.get(v) for v in outputs),
        attributes,
        frozenset(i for i, v in enumerate(inputs) if v in saved),
        frozenset(i for i, v in enumerate(outputs) if v is not None and v in saved),
    )
    for place, node in enumerate(group_nodes):
        node.meta[_KEY] = group, place
    return group


def place_of(node: ir.Node) -> tuple[KernelGroup, int] | None:
    """Return the group of a node, and its place in it."""
    found: tuple[KernelGroup, int] | None = node.meta.get(_KEY)
    return found


def read_by_kernel_alone(node: ir.Node) -> Iterator[str]:
    """Yield the names of values that the kernel of a node's group reads, and no node of it."""
    if (marked := place_of(node)) is not None:
        yield from (wanted.name for wanted in marked[0].inputs if not wanted.read_at)


def forget_kernel(nodes: Iterable[ir.Node]) -> None:
    """Take nodes out of their groups."""
    for node in nodes:
        node.meta.pop(_KEY, None)


def mark_copy(copy: ir.Node, node: ir.Node, twins: dict[KernelGroup, KernelGroup]) -> None:
    """Put the copy of a node into the copy of its group; `twins` are those made so far."""
    if (marked := place_of(node)) is not None:
        group, place = marked
        copy.meta[_KEY] = twins.setdefault(group, replace(group)), place


def add_kernel_attributes(
    nodes: Iterable[ir.Node], kinds: Collection[str], **attributes: Attribute
) -> None:
    """Give the groups of some kinds more attributes."""
    changed: dict[KernelGroup, KernelGroup] = {}
    for node in nodes:
        if (marked := place_of(node)) is None or marked[0].kind not in kinds:
            continue
        group, place = marked
        if group not in changed:
            changed[group] = replace(group, attributes={**group.attributes, **attributes})
        node.meta[_KEY] = changed[group], place


def rename_kernel_inputs(nodes: Iterable[ir.Node], renamed: Mapping[str, str | None]) -> None:
    """Let kernels read other values where no node of their group does, by their names.

    Groups that would read a value without a new name are forgotten.
    """
    changed: dict[KernelGroup, KernelGroup | None] = {}
    for node in nodes:
        if (marked := place_of(node)) is None:
            continue
        group, place = marked
        if group not in changed:
            changed[group] = _with_renamed_inputs(group, renamed)
        now = changed[group]
        if now is None:
            forget_kernel([node])
        else:
            node.meta[_KEY] = now, place


def _with_renamed_inputs(
    group: KernelGroup, renamed: Mapping[str, str | None]
) -> KernelGroup | None:
    inputs = list[KernelInput]()
    for wanted in group.inputs:
        name = wanted.name if wanted.read_at else renamed.get(wanted.name, wanted.name)
        if name is None:
            return None
        inputs.append(replace(wanted, name=name))
    return replace(group, inputs=tuple(inputs))


def kernel_groups(graph: ir.Graph) -> dict[KernelGroup, dict[int, ir.Node]]:
    """Return the groups of a graph, its subgraphs not included, with their nodes by place."""
    found: dict[KernelGroup, dict[int, ir.Node]] = {}
    for node in graph:
        if (marked := place_of(node)) is not None:
            found.setdefault(marked[0], {})[marked[1]] = node
    return found


def input_values(
    group: KernelGroup, nodes: Mapping[int, ir.Node], named: Mapping[str, ir.Value]
) -> list[ir.Value] | None:
    """Return what a kernel reads now; None where something is not there any more.

    `named` are the values of the graph by name, for inputs that no node of the group reads.
    """
    found = list[ir.Value]()
    for wanted in group.inputs:
        reads = (nodes[place].inputs[i] for place, i in wanted.read_at if place in nodes)
        value = next((v for v in reads if v is not None), None) or named.get(wanted.name)
        if value is None:
            return None
        found.append(value)
    return found


def output_values(group: KernelGroup, nodes: Mapping[int, ir.Node]) -> list[ir.Value | None]:
    """Return what a kernel computes; None for what the nodes do not compute any more."""
    return [
        None if at is None or at[0] not in nodes else nodes[at[0]].outputs[at[1]]
        for at in group.outputs
    ]


def written_after(graph: ir.Graph, last: ir.Node | None) -> Iterator[ir.Node]:
    """Yield the nodes behind a node of a graph, from the end; all of them without one."""
    for node in reversed(graph):
        if node is last:
            return
        yield node
