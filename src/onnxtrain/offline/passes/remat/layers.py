"""Which nodes are the forward pass, and which values can be computed again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache, cached_property

from onnxtrain.offline.graph.op_facts import COSTLY
from onnxtrain.offline.passes.remat.flow import Flow, Step, homes

SMALL = 1 << 15  # bytes: values that are not worth a thought


class Layers:
    """The parts of a training graph.

    *Forward* is what the model itself computes. *Late* is what needs the end of the forward pass:
    gradients, mostly, and updates. What is neither was written with the gradients, but depends on
    single layers (masks and such); it runs when a gradient asks for it. *Fixed* values follow from
    parameters alone.

    `forward` names the values of the model, and `data` the inputs that are not parameters; `sizes`
    has the bytes of values.
    """

    def __init__(
        self, flow: Flow, forward: Collection[str], data: Collection[str], sizes: Mapping[str, int]
    ) -> None:
        steps = self.steps = flow.steps
        self._data = set(data)
        self.maker = {name: i for i, step in enumerate(steps) for name in step.makes}
        self.home = homes(steps)
        self.forward = self._ancestors(forward)
        self.fixed = self._fixed()
        self.ends = self._ends()
        self.late = self._late()
        self.forward_names = {n for i in self.forward for n in steps[i].makes}
        self.late_names = {n for i in self.late for n in steps[i].makes}
        self.large = {
            name
            for name, home in self.home.items()
            if name == home
            and name in self.forward_names
            and name not in self.fixed
            and sizes.get(name, 0) > SMALL
        }
        self.can_copy = {
            name for name in self.large if steps[self.maker[name]].is_pure and name not in self.ends
        }
        self.read_late = self._read_late()
        self.anchors = {n for n in self.large if steps[self.maker[n]].op_type in COSTLY}

    def _ancestors(self, names: Collection[str]) -> set[int]:
        waiting = [self.maker[name] for name in names if name in self.maker]
        found = set(waiting)
        while waiting:
            for name in self.steps[waiting.pop()].reads:
                place = self.maker.get(name)
                if place is not None and place not in found:
                    found.add(place)
                    waiting.append(place)
        return found

    def _fixed(self) -> set[str]:
        fixed: set[str] = set()
        varying = self._data | self.maker.keys()
        for step in self.steps:
            given = step.reads or step.op_type == "Constant"
            if given and all(name in fixed or name not in varying for name in step.reads):
                fixed.update(step.makes)
        return fixed

    def _ends(self) -> set[str]:
        """Return what lies behind the last costly node of a path: the scores, and the loss."""
        behind: set[str] = set()
        for i, step in enumerate(self.steps):
            if i in self.forward and (
                step.op_type in COSTLY or any(n in behind for n in step.reads)
            ):
                behind.update(n for n in step.makes if n not in self.fixed)
        before: set[str] = set()
        for i in sorted(self.forward, reverse=True):
            step = self.steps[i]
            if step.op_type in COSTLY or any(n in before for n in step.makes):
                before.update(step.reads)
        return behind - before

    def _late(self) -> set[int]:
        late: set[int] = set()
        names = set(self.ends)
        for i, step in enumerate(self.steps):
            if i not in self.forward and any(n in names for n in step.reads):
                late.add(i)
                names.update(step.makes)
        return late

    def _read_late(self) -> set[str]:
        """Return the large values of the forward pass that others than itself read."""
        return {
            home
            for i, step in enumerate(self.steps)
            if i not in self.forward
            for name in step.reads
            if (home := self.home.get(name)) in self.large
        }

    def first_of_data(self, step: Step) -> int:
        """Return which value that a node reads follows from the data; others are always there."""
        return next(
            i for i, name in enumerate(step.reads)
            if name in self._data or (name in self.maker and name not in self.fixed)
        )  # fmt: skip

    def is_there(self, name: str, kept: Collection[str]) -> bool:
        """Whether a value outlives the forward pass if these large ones are kept."""
        if name not in self.forward_names or name in self.fixed:
            return True
        home = self.home[name]
        return home not in self.can_copy or home in kept

    def copied(self, kept: Collection[str]) -> set[int]:
        """Return the nodes that run again, or late only, because of what is not kept."""
        found: set[int] = set()
        for i in self._on_demand:
            if any(m in found if h is None else h not in kept for m, h in self._needs[i]):
                found.add(i)
        waiting = [*found, *(m for m, h in self._asked_for if h is not None and h not in kept)]
        seen = set(waiting)
        while waiting:
            for maker, home in self._needs[waiting.pop()]:
                if maker not in seen and (maker in found if home is None else home not in kept):
                    seen.add(maker)
                    waiting.append(maker)
        return seen

    @cached_property
    def _on_demand(self) -> list[int]:
        """What was written with the gradients, but depends on single layers that may be dropped."""
        rest = (i for i in range(len(self.steps)) if i not in self.forward and i not in self.late)
        return [i for i in rest if self._needs[i]]

    @cached_property
    def _asked_for(self) -> set[tuple[int, str | None]]:
        return {need for i in self.late for need in self._needs[i]}

    @cached_property
    def _needs(self) -> list[tuple[tuple[int, str | None], ...]]:
        """For each node, the makers of what it reads and may not be there.

        A value of the forward pass is there if the large one in whose memory it is, is kept; others
        (None) are if their maker does not run again.
        """
        needs = []
        for step in self.steps:
            found: dict[tuple[int, str | None], None] = {}
            for name in step.reads:
                place = self.maker.get(name)
                if place is None or name in self.fixed or place in self.late:
                    continue
                if place not in self.forward:
                    found[place, None] = None
                elif self.home[name] in self.can_copy:
                    found[place, self.home[name]] = None
            needs.append(tuple(found))
        return needs

    @cache  # noqa: B019  (lives as long as a plan is made)
    def cheap_after(self, name: str) -> tuple[int, ...]:
        """Return the forward nodes that follow from a value without a costly node in between."""
        reached = {name}
        found = []
        for i in range(self.maker[name] + 1, len(self.steps)):
            step = self.steps[i]
            is_cheap = i in self.forward and step.op_type not in COSTLY and step.is_pure
            if is_cheap and any(n in reached for n in step.reads):
                reached.update(step.makes)
                found.append(i)
        return tuple(found)
