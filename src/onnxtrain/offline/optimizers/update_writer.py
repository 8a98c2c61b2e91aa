"""How updates are written into a graph: many tensors at once, one at a time, or in chunks.

`<x>.updated` may be bound to the memory of `<x>`; `optimizer_graphs.py` says why that is safe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from onnxtrain.errors import BlockError
from onnxtrain.format.names import UPDATED
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.runs import in_runs
from onnxtrain.offline.graph.shapes import Dim, static_dims
from onnxtrain.offline.optimizers.chunked import update_chunked
from onnxtrain.offline.optimizers.multi_tensor import (
    LARGEST_STACKED,
    MOST_STACKED,
    STACKED,
    is_small,
    joined_along,
    update_multi_tensor,
)

Formula = Callable[..., Sequence[ir.Value]]


@dataclass(frozen=True)
class Slot:
    """A parameter to be updated, its gradient and the states that are kept for it."""

    parameter: ir.Value
    gradient: ir.Value
    states: tuple[ir.Value, ...] = ()

    def shaped(self, op: Ops) -> Slot:
        """Return the slot with a gradient that has the shape of the parameter."""
        dims = static_dims(self.parameter)
        if dims is None or static_dims(self.gradient) in (None, dims):
            return self
        return replace(self, gradient=op.reshape(self.gradient, dims))


@dataclass(frozen=True)
class Updated:
    """The updated values of a slot, each named `<x>.updated`."""

    parameter: ir.Value
    states: tuple[ir.Value, ...] = ()

    @property
    def values(self) -> tuple[ir.Value, ...]:
        """The parameter and then the states."""
        return (self.parameter, *self.states)


def values_of(slots: Iterable[Slot | Updated]) -> list[ir.Value]:
    """Return the parameters and the states behind each."""
    return [value for slot in slots for value in (slot.parameter, *slot.states)]


@dataclass(frozen=True)
class Update:
    """What is to be computed for a slot. Equal formulas are one object."""

    slot: Slot
    gradient: ir.Value  # as it is after clipping
    formula: Formula

    @property
    def tensors(self) -> tuple[ir.Value, ...]:
        """What the formula is a function of."""
        return self.slot.parameter, self.gradient, *self.slot.states


@dataclass(frozen=True)
class UpdateWriter:
    """Writes updates: of many tensors at once, of one at a time, or in chunks."""

    op: Ops
    chunked: bool

    def write(self, updates: Sequence[Update]) -> list[Updated]:
        """Write all updates."""
        made: dict[ir.Value, Updated] = {}
        together, alone = _stacked(updates) if self.op.on_gpu else _sorted(updates)
        for axis, group in together:
            made.update(self._multi_tensor(group, axis))
        for update in alone:
            made[update.slot.parameter] = self._single(update)
        return [made[update.slot.parameter] for update in updates]

    def _multi_tensor(
        self, group: Sequence[Update], axis: int | None
    ) -> Iterator[tuple[ir.Value, Updated]]:
        self.op.scope = "optimizer/multi_tensor"
        tensors = [each.tensors for each in group]
        rows = update_multi_tensor(self.op, group[0].formula, tensors, axis)
        for each, made in zip(group, rows, strict=True):
            yield each.slot.parameter, self._named(each.slot, made, shaped=axis != STACKED)

    def _single(self, update: Update) -> Updated:
        slot = update.slot
        self.op.scope = f"optimizer/{slot.parameter.name}"
        if self.chunked:
            made = update_chunked(self.op, update.formula, update.tensors)
            if made is not None:
                return self._named(slot, made, shaped=False)
        return self._named(slot, update.formula(*update.tensors))

    def _named(self, slot: Slot, made: Sequence[ir.Value], *, shaped: bool = True) -> Updated:
        for old, new in zip((slot.parameter, *slot.states), made, strict=True):
            new.name = reserve(self.op, f"{old.name}{UPDATED}")
            if shaped:
                self.op.type_as(new, old)
        return Updated(made[0], tuple(made[1:]))


_Joined = tuple[int | None, list[Update]]  # along an axis, or as vectors


def _stacked(updates: Sequence[Update]) -> tuple[list[_Joined], list[Update]]:
    """Return the groups of tensors with as many elements, and the other updates."""
    alike: dict[tuple[Formula, int], list[Update]] = {}
    for update in updates:
        size = math.prod(static_dims(update.slot.parameter) or (0,))
        if 0 < size <= LARGEST_STACKED:
            alike.setdefault((update.formula, size), []).append(update)
    runs = (in_runs(own, lambda _: 1, MOST_STACKED) for own in alike.values())
    together = [(STACKED, list(run)) for own in runs for run in own if len(run) > 1]
    stacked = {update.slot.parameter for _, group in together for update in group}
    return [*together], [u for u in updates if u.slot.parameter not in stacked]


def _sorted(updates: Sequence[Update]) -> tuple[list[_Joined], list[Update]]:
    """Return the groups of tensors that are updated together, and the other updates."""
    by_formula: dict[Formula, dict[ir.Value, Update]] = {}
    for update in updates:
        by_formula.setdefault(update.formula, {})[update.slot.parameter] = update
    together = list[_Joined]()
    for own in by_formula.values():
        for axis, alike in joined_along(list(own)):
            together.append((axis, [own.pop(parameter) for parameter in alike]))
        small = [update for parameter, update in own.items() if is_small(parameter)]
        if len(small) > 1:
            together.append((None, small))
    combined = {update.slot.parameter for _, group in together for update in group}
    return together, [u for u in updates if u.slot.parameter not in combined]


def reserve(op: Ops, name: str) -> str:
    """Take a name that is part of the interface of the graph; it is an error if it is in use."""
    if op.names.fresh(name) != name:
        raise BlockError(
            f"the optimizer adds a value {name!r}, but the model has one already: rename it, or "
            "build the optimizer in onnxblock.empty_base()"
        )
    return name


def graph_input(op: Ops, name: str, dtype: ir.DataType, dims: Sequence[Dim]) -> ir.Value:
    """Add an input to the graph that is being written."""
    value = ir.Value(name=reserve(op, name))
    value.dtype, value.shape = dtype, ir.Shape(dims)
    op.target.inputs.append(value)
    return value
