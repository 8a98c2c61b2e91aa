"""The proximal term of federated learning, as a device sets it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from onnxtrain.device.checks import float32, not_negative
from onnxtrain.device.parameters import checked
from onnxtrain.device.run.binding import Variable
from onnxtrain.device.run.executors import require_values
from onnxtrain.device.state import TrainingState
from onnxtrain.errors import UnknownNameError
from onnxtrain.format.checkpoint.content import Array
from onnxtrain.format.names import PROXIMAL_MU, REFERENCE


class Proximal:
    """What graphs with the proximal term read beside gradients: µ and a copy of each parameter."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self._mu = Variable(np.zeros(1, np.float32))
        self._references: dict[str, Variable] = {}

    def bound(self, state: TrainingState) -> dict[str, Variable]:
        """Return the memory of the inputs by their names."""
        return {PROXIMAL_MU: self._mu} | {
            f"{name}{REFERENCE}": variable for name, variable in self._allocated(state).items()
        }

    def _allocated(self, state: TrainingState) -> dict[str, Variable]:
        for name in self._names if not self._references else ():
            self._references[name] = Variable.zeros(*state.type_of(name), state.device)
        return self._references

    def set(self, state: TrainingState, mu: float, reference: Mapping[str, Array] | None) -> None:
        """Set the strength, and what to pull to: the present values, or those given."""
        require_values(state)
        what = "the strength of the proximal term"
        strength = not_negative(what, float32(what, mu))
        if reference is None:
            values = {name: state.value_of(name) for name in self._names}
        else:
            missing = [name for name in self._names if name not in reference]
            if missing:
                raise UnknownNameError(f"the reference has no values for {missing[0]!r}")
            values = {n: checked(n, reference[n], *state.type_of(n)) for n in self._names}
        for name, variable in self._allocated(state).items():
            variable.assign(values[name])
        self._mu.array[0] = strength
