"""A graph as memory sees it: which node makes and reads which values, in which order, how large.

`Flow` is a graph in numbers, small enough to be run through hundreds of times while a plan is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.offline.graph.op_facts import RANDOM, VIEWS
from onnxtrain.offline.graph.quantized_operators import is_kept, is_quantized_product
from onnxtrain.offline.graph.subgraphs import subgraphs_of


@dataclass(frozen=True)
class Step:
    """A node: what it reads, bodies included, and what it makes, by name."""

    op_type: str
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    is_pure: bool = True  # a second run makes the same, and no more
    is_copy: bool = False

    @property
    def is_view(self) -> bool:
        """Whether the first value that is made is the first one that is read."""
        return self.op_type in VIEWS


@dataclass(frozen=True)
class Flow:
    """The nodes of a graph in the order of the file, and its outputs."""

    steps: Sequence[Step]
    outputs: frozenset[str]

    @staticmethod
    def of(graph: ir.Graph) -> Flow:
        """Take over a graph."""
        is_fixed = all(_has_fixed_shape(value) for value in graph.inputs)
        steps = []
        for node in graph:
            reads = tuple(_reads(node))
            if node.op_type == "Shape" and (is_fixed or _has_fixed_shape(node.inputs[0])):
                reads = ()  # onnxruntime knows it beforehand
            made = tuple(v.name for v in node.outputs if v.name)
            op_type = "MatMul" if is_quantized_product(node) else node.op_type
            steps.append(Step(op_type, reads, made, _is_pure(node)))
        return Flow(steps, frozenset(str(value.name) for value in graph.outputs))

    def without_shapes(self) -> Flow:
        """Return the graph as if the shape of a value could be told without the value."""
        steps = [
            Step(s.op_type, (), s.makes, s.is_pure) if s.op_type == "Shape" else s
            for s in self.steps
        ]
        return Flow(steps, self.outputs)

    def peak(self, sizes: Mapping[str, int]) -> int:
        """Return the most bytes that live at a time when onnxruntime runs the graph."""
        return max(bytes_alive(self, execution_order(self.steps), sizes)[0], default=0)


def _has_fixed_shape(value: ir.Value | None) -> bool:
    return value is not None and value.shape is not None and value.shape.is_static()


def _is_pure(node: ir.Node) -> bool:
    """Whether a node can run twice. What has a body is left alone, as are other people's nodes."""
    if is_kept(node):
        return True
    return node.domain == "" and node.op_type not in RANDOM and not any(subgraphs_of(node))


def _reads(node: ir.Node) -> Iterator[str]:
    """Yield what a node reads, its subgraphs included."""
    yield from (v.name for v in node.inputs if v is not None and v.name)
    for body in subgraphs_of(node):
        for inner in body:
            yield from _reads(inner)
        yield from (str(value.name) for value in body.outputs)


def execution_order(steps: Sequence[Step]) -> list[int]:
    """Return the order in which onnxruntime runs nodes, as their places in the file.

    It goes from what nobody reads, beginning at the end of the file, to what that needs, and comes
    back: a node runs when someone asks for it. Of several things that a node needs, the one that is
    last in the file comes first.
    """
    maker = {name: place for place, step in enumerate(steps) for name in step.makes}
    sources = [sorted({maker[name] for name in step.reads if name in maker}) for step in steps]
    is_read = {source for found in sources for source in found}
    order: list[int] = []
    entered = bytearray(len(steps))
    stack = [place for place in range(len(steps)) if place not in is_read]
    while stack:
        place = stack.pop()
        if place < 0:
            order.append(~place)
        elif not entered[place]:
            entered[place] = 1
            stack.append(~place)
            stack.extend(source for source in sources[place] if not entered[source])
    return order


def homes(steps: Sequence[Step]) -> dict[str, str]:
    """Say for each value that is made in whose memory it is: mostly in its own.

    A view of what is fed has no memory of its own either, and is in that of the input.
    """
    home: dict[str, str] = {}
    for step in steps:
        home.update((name, name) for name in step.makes)
        if step.is_view and step.reads:
            home[step.makes[0]] = home.get(step.reads[0], step.reads[0])
    return home


def bytes_alive(
    flow: Flow, order: Sequence[int], sizes: Mapping[str, int]
) -> tuple[list[int], dict[str, tuple[int, int]]]:
    """Return how many bytes are alive while each node runs, and from when to when values are.

    Outputs live in memory that others own, and do not count.
    """
    steps, home = flow.steps, homes(flow.steps)
    given = {home[name] for name in flow.outputs if name in home}
    life: dict[str, tuple[int, int]] = {}
    for now, place in enumerate(order):
        step = steps[place]
        for name in step.makes:
            if home[name] == name:
                life[name] = (now, now)
        for name in step.reads:
            owner = home.get(name)
            if owner in life:
                life[owner] = (life[owner][0], now)
    change = [0] * (len(order) + 1)
    for name, (first, last) in life.items():
        if name not in given:
            size = sizes.get(name, 0)
            change[first] += size
            change[last + 1] -= size
    alive, total = [], 0
    for difference in change[:-1]:
        total += difference
        alive.append(total)
    return alive, life
