"""The proximal term on the device: its strength, and the values that it pulls to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from onnxtrain.device.parameters import checked
from onnxtrain.device.run.executors import require_values
from onnxtrain.device.run.variables import Variable
from onnxtrain.device.state import TrainingState
from onnxtrain.errors import ArgumentError, UnknownNameError
from onnxtrain.format.checkpoint.content import Array
from onnxtrain.format.names import PROXIMAL_MU, REFERENCE


class Proximal:
    """What graphs with the proximal term read beside gradients: µ and a copy of each parameter."""

    def __init__(self, state: TrainingState, names: Sequence[str]) -> None:
        self._state = state
        self._names = list(names)
        self._mu = Variable(np.zeros(1, np.float32))
        self._references: dict[str, Variable] = {}

    def bound(self) -> dict[str, Variable]:
        """Return the memory of the inputs by their names."""
        return {PROXIMAL_MU: self._mu} | {
            f"{name}{REFERENCE}": variable for name, variable in self._allocated().items()
        }

    def _allocated(self) -> dict[str, Variable]:
        if not self._references:
            self._references = {
                name: Variable.zeros(*self._state.type_of(name), self._state.device)
                for name in self._names
            }
        return self._references

    def set(self, mu: float, reference: Mapping[str, Array] | None) -> None:
        """Set the strength, and what to pull to: the present values, or those given."""
        require_values(self._state)
        try:
            strength = float(np.float32(mu))
        except (TypeError, ValueError):
            raise ArgumentError(
                f"the strength of the proximal term is a number, not {mu!r}"
            ) from None
        if not math.isfinite(strength) or strength < 0:
            raise ArgumentError(
                f"the strength of the proximal term is {mu!r}; it must be 0 or more"
            )
        values = self._values(reference)
        for name, variable in self._allocated().items():
            variable.assign(values[name])
        self._mu.array[0] = strength

    def _values(self, reference: Mapping[str, Array] | None) -> Mapping[str, Array]:
        if reference is None:
            return {name: self._state.value_of(name) for name in self._names}
        missing = [name for name in self._names if name not in reference]
        if missing:
            raise UnknownNameError(f"the reference has no values for {missing[0]!r}, which trains")
        return {n: checked(n, reference[n], *self._state.type_of(n)) for n in self._names}
