"""The graph with copies, as numbers: what `rewrite.py` writes, to try out a choice."""

from __future__ import annotations

from collections.abc import Collection

from onnxtrain.offline.passes.remat.flow import Flow, Step
from onnxtrain.offline.passes.remat.layers import Layers

AGAIN = " again"


def with_copies(flow: Flow, layers: Layers, kept: Collection[str]) -> Flow:
    """Return the graph in which late nodes read copies of what is not kept."""
    return _Copies(flow, layers, kept).flow()


class _Copies:
    def __init__(self, flow: Flow, layers: Layers, kept: Collection[str]) -> None:
        self._flow = flow
        self._layers = layers
        self._copied = layers.copied(kept)
        self._forward = layers.forward
        self._made: dict[str, str] = {}
        self._gates: dict[str, str] = {}
        self._waiting: set[str] = set()
        self._steps: list[Step] = []

    def flow(self) -> Flow:
        layers = self._layers
        # What runs when a gradient asks for it comes first: of what a node needs, onnxruntime runs
        # first what is last in the file, and that shall be the gradient.
        self._steps.extend(s for i, s in enumerate(layers.steps) if i not in layers.late)
        for step in (layers.steps[i] for i in sorted(layers.late)):
            wanted = [n for n in step.reads if self._is_copied(n)]
            if wanted:
                gate = self._gate(step)
                for name in wanted:
                    self._copy(name, gate)
                reads = tuple(self._made.get(n, n) for n in step.reads)
                step = Step(step.op_type, reads, step.makes, step.is_pure)
            self._steps.append(step)
        return Flow(_swept(self._steps, self._flow.outputs), self._flow.outputs)

    def _is_copied(self, name: str) -> bool:
        place = self._layers.maker.get(name)
        return place in self._copied and name not in self._layers.fixed

    def _gate(self, step: Step) -> str:
        """Return the last one of the late values that a node reads."""
        layers = self._layers
        names = [n for n in step.reads if n in layers.late_names or n in layers.ends]
        return max(names, key=lambda n: layers.maker[n])

    def _copy(self, name: str, gate: str) -> None:
        waiting = [name]
        while waiting:
            current = waiting[-1]
            step = self._layers.steps[self._layers.maker[current]]
            needed = [n for n in step.reads if self._is_copied(n) and n not in self._made]
            if needed and current not in self._made:
                waiting.extend(needed)
                continue
            waiting.pop()
            if current not in self._made:
                self._clone(step, gate)

    def _clone(self, step: Step, gate: str) -> None:
        reads = [self._made.get(n, n) for n in step.reads]
        if not any(self._gates.get(n) == gate for n in step.reads):
            index = self._layers.first_of_data(step)
            flag, waiting = f"{gate} is there", f"{reads[index]} after {gate}"
            if waiting not in self._waiting:
                if flag not in self._waiting:
                    self._steps.append(Step("Flag", (gate,), (flag,)))
                self._steps.append(Step("Reshape", (reads[index], flag), (waiting,)))
                self._waiting.update((flag, waiting))
            reads[index] = waiting
        made = tuple(f"{n}{AGAIN}" for n in step.makes)
        self._made.update(zip(step.makes, made, strict=True))
        self._gates.update(dict.fromkeys(step.makes, gate))
        self._steps.append(Step(step.op_type, tuple(reads), made, is_copy=True))


def _swept(steps: list[Step], outputs: Collection[str]) -> list[Step]:
    """Leave out what nobody reads any more."""
    read = set(outputs)
    left = []
    for step in reversed(steps):
        if not read.isdisjoint(step.makes):
            read.update(step.reads)
            left.append(step)
    return left[::-1]
