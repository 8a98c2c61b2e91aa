"""The graph of a step with copies, as numbers: to try out a choice, and to write it.

A late node that reads a value which is not kept reads a copy instead. A chain of copies begins with
a kept value that *waits* for a gate, one of the values that the late node reads as well.
"""

from __future__ import annotations

from collections.abc import Collection

from onnxtrain.offline.passes.remat.flow import Flow, Step
from onnxtrain.offline.passes.remat.layers import Layers

AGAIN = " again"
FLAG, WAIT = "Flag", "Reshape"  # a flag of a gate, and a kept value that waits for that flag


def with_copies(flow: Flow, layers: Layers, kept: Collection[str]) -> Flow:
    """Return the graph in which late nodes read copies of what is not kept."""
    # What runs when a gradient asks for it comes first: of what a node needs, onnxruntime runs
    # first what is last in the file, and that shall be the gradient.
    early = [step for place, step in enumerate(layers.steps) if place not in layers.late]
    return Flow(_swept([*early, *late_steps(layers, kept)], flow.outputs), flow.outputs)


def late_steps(layers: Layers, kept: Collection[str]) -> list[Step]:
    """Return the late nodes, each behind the copies that it reads."""
    copies = _Copies(layers, kept)
    for place in sorted(layers.late):
        copies.add(layers.steps[place])
    return copies.steps


class _Copies:
    def __init__(self, layers: Layers, kept: Collection[str]) -> None:
        self._layers = layers
        self._copied = layers.copied(kept)
        self._made: dict[str, str] = {}
        self._gates: dict[str, str] = {}
        self._waiting: set[str] = set()
        self.steps: list[Step] = []

    def add(self, step: Step) -> None:
        """Add a late node, behind the copies that it reads."""
        layers = self._layers
        wanted = [n for n in step.reads if self._is_copied(n)]
        if wanted:
            late = [n for n in step.reads if n in layers.late_names or n in layers.ends]
            gate = max(late, key=lambda n: layers.maker[n])
            for name in wanted:
                self._copy(name, gate)
            reads = tuple(self._made.get(n, n) for n in step.reads)
            step = Step(step.op_type, reads, step.makes, step.is_pure)
        self.steps.append(step)

    def _is_copied(self, name: str) -> bool:
        return self._layers.maker.get(name) in self._copied and name not in self._layers.fixed

    def _copy(self, name: str, gate: str) -> None:
        """Add what a value is computed from that is not there; iteratively, it may be long."""
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
                    self.steps.append(Step(FLAG, (gate,), (flag,)))
                self.steps.append(Step(WAIT, (reads[index], flag), (waiting,)))
                self._waiting.update((flag, waiting))
            reads[index] = waiting
        made = tuple(f"{n}{AGAIN}" for n in step.makes)
        self._made.update(zip(step.makes, made, strict=True))
        self._gates.update(dict.fromkeys(step.makes, gate))
        self.steps.append(Step(step.op_type, tuple(reads), made, is_copy=True))


def _swept(steps: list[Step], outputs: Collection[str]) -> list[Step]:
    """Leave out what nobody reads any more."""
    read = set(outputs)
    left = []
    for step in reversed(steps):
        if not read.isdisjoint(step.makes):
            read.update(step.reads)
            left.append(step)
    return left[::-1]
