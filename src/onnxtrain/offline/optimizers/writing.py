"""How updates are written into a graph: joined, whole or in pieces.

`<x>.updated` may be bound to the memory of `<x>` then; `optimizer.py` says what makes that right.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.errors import BlockError
from onnxtrain.format.names import UPDATED
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.optimizers.chunked import update_in_pieces
from onnxtrain.offline.optimizers.in_place import Waits, waiting
from onnxtrain.offline.optimizers.multi_tensor import is_small, update_joined

Formula = Callable[..., Sequence[ir.Value]]


@dataclass(frozen=True)
class Slot:
    """A parameter to be updated, its gradient and the states that are kept for it.

    Those with a lower `place` are written first.
    """

    parameter: ir.Value
    gradient: ir.Value
    states: tuple[ir.Value, ...] = ()
    place: int = 0


@dataclass(frozen=True)
class Updated:
    """What a slot becomes; named `<x>.updated` each."""

    parameter: ir.Value
    states: tuple[ir.Value, ...] = ()

    @property
    def values(self) -> tuple[ir.Value, ...]:
        """The parameter and then the states."""
        return (self.parameter, *self.states)


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
class Writing:
    """How updates are written: joined, whole or in pieces."""

    op: Ops
    in_pieces: bool
    waits: Waits | None
    joinable: Container[ir.Value] | None

    def write(self, updates: Sequence[Update]) -> list[Updated]:
        """Write all updates; the joined ones first.

        onnxruntime begins with what stands last, and a joined update needs every gradient.
        """
        made: dict[ir.Value, Updated] = {}
        together, alone = self._sorted(updates)
        for group in together:
            made.update(self._joined(group))
        for update in sorted(alone, key=lambda each: each.slot.place):
            made[update.slot.parameter] = self._single(update)
        return [made[update.slot.parameter] for update in updates]

    def _sorted(self, updates: Sequence[Update]) -> tuple[list[list[Update]], list[Update]]:
        groups: dict[Formula, list[Update]] = {}
        for update in updates:
            parameter = update.slot.parameter
            if is_small(parameter) and (self.joinable is None or parameter in self.joinable):
                groups.setdefault(update.formula, []).append(update)
        together = [group for group in groups.values() if len(group) > 1]
        joined = {update.slot.parameter for group in together for update in group}
        return together, [u for u in updates if u.slot.parameter not in joined]

    def _joined(self, group: Sequence[Update]) -> Iterator[tuple[ir.Value, Updated]]:
        op = self.op
        op.scope = "optimizer/joined"
        flag = self._flag([update.slot.parameter for update in group])
        formula = group[0].formula

        def update(
            parameter: ir.Value, gradient: ir.Value, *states: ir.Value
        ) -> Sequence[ir.Value]:
            return formula(parameter, waiting(op, gradient, parameter, flag), *states)

        rows = update_joined(op, update, [each.tensors for each in group])
        for each, made in zip(group, rows, strict=True):
            yield each.slot.parameter, self._named(each.slot, made)

    def _single(self, update: Update) -> Updated:
        op, slot = self.op, update.slot
        op.scope = f"optimizer/{slot.parameter.name}"
        flag = self._flag([slot.parameter])
        if self.in_pieces:
            cut = update_in_pieces(op, update.formula, update.tensors, flag)
            if cut is not None:
                return self._named(slot, cut, shaped=False)
        gradient = waiting(op, update.gradient, slot.parameter, flag)
        return self._named(slot, update.formula(slot.parameter, gradient, *slot.states))

    def _flag(self, parameters: Sequence[ir.Value]) -> ir.Value | None:
        return None if self.waits is None else self.waits.flag(self.op, parameters)

    def _named(self, slot: Slot, made: Sequence[ir.Value], *, shaped: bool = True) -> Updated:
        for old, new in zip((slot.parameter, *slot.states), made, strict=True):
            new.name = reserve(self.op, f"{old.name}{UPDATED}")
            if shaped:
                self.op.type_as(new, old)
        return Updated(made[0], tuple(made[1:]))


def reserve(
    op: Ops,
    name: str,
    adds: str = "optimizer",
    advice: str = "An optimizer of its own is built in onnxblock.empty_base()",
) -> str:
    """Take a name that is part of the interface, so nothing else will do."""
    if op.names.fresh(name) != name:
        raise BlockError(
            f"there is a value {name!r} in the model already, which the {adds} is to add. {advice}"
        )
    return name
