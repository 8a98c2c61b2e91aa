"""Parameters and properties of a checkpoint, as users see them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxtrain.errors import ArgumentError, ArgumentTypeError, StateError
from onnxtrain.format.checkpoint.content import RESERVED_PREFIX, Array, Property, RawTensor

if TYPE_CHECKING:
    from onnxtrain.device.state import TrainingState


class Parameter:
    """A tensor of the model.

    `data` and `grad` are the memory that training works with: they show the present values, and
    training continues from what is written into them. A frozen parameter is a constant of the
    graphs: its `data` is read-only, but it can be set, which rebuilds the graphs.
    """

    def __init__(self, state: TrainingState, name: str) -> None:
        self._state = state
        self._name = name

    @property
    def name(self) -> str:
        """The name in the model."""
        return self._name

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter trains."""
        return self._state.is_trainable(self._name)

    @property
    def data(self) -> Array:
        """The values."""
        return self._state.value_of(self._name)

    @data.setter
    def data(self, value: Array) -> None:
        self._state.set_value(self._name, value)

    @property
    def grad(self) -> Array | None:
        """The accumulated gradient; None for what is frozen, and before there is a Module."""
        return self._state.gradient_of(self._name)

    @grad.setter
    def grad(self, value: Array) -> None:
        self._state.set_gradient(self._name, value)

    def __repr__(self) -> str:
        return f"Parameter(name={self.name}, requires_grad={self.requires_grad})"


class Parameters:
    """The parameters of a state, by name; iteration yields pairs of name and parameter."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state

    def __getitem__(self, name: str) -> Parameter:
        self._require(name)
        return Parameter(self._state, name)

    def __setitem__(self, name: str, value: Array) -> None:
        self._require(name)
        self._state.set_value(name, value)

    def __contains__(self, name: object) -> bool:
        return self._state.has(name)

    def __len__(self) -> int:
        return len(self._state.names())

    def __iter__(self) -> Iterator[tuple[str, Parameter]]:
        self._require(None)
        for name in self._state.names():
            yield name, Parameter(self._state, name)

    def __repr__(self) -> str:
        return f"Parameters({', '.join(self._state.names())})"

    def _require(self, name: str | None) -> None:
        """Refuse an unknown name, and a state without values."""
        if name is not None and name not in self:
            raise KeyError(f"Parameter {name} not found.")
        if self._state.nominal:
            raise StateError(
                "Please load the parameter states first: the checkpoint is nominal, it has names "
                "and no values. Copy a buffer of all parameters into it with "
                "Module.copy_buffer_to_parameters(buffer, trainable_only=False)"
            )


class Properties:
    """The user's own values in a checkpoint: integers, floats and strings.

    Floats are rounded to 32 bits, as the file has them. Iteration yields pairs of name and value.
    """

    def __init__(self, values: dict[str, Property]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> Property:
        if name not in self._values:
            raise KeyError(f"Property {name} not found.")
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if not isinstance(name, str) or not name:
            raise ArgumentTypeError(f"the name of a property is a text, not {name!r}")
        _text(name, name)
        if name.startswith(RESERVED_PREFIX):
            raise ArgumentError(f"names that begin with {RESERVED_PREFIX!r} are reserved")
        self._values[name] = _property(name, value)

    def __delitem__(self, name: str) -> None:
        self[name]  # a missing one is a KeyError that says so
        del self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[tuple[str, Property]]:
        yield from sorted(self._values.items())

    def __repr__(self) -> str:
        return f"Properties({dict(self)!r})"


def _property(name: str, value: Any) -> Property:
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, bool | np.bool_ | int | np.integer):
        number = int(value)
        # The file has integers of 64 bits; larger ones are kept as floats, as upstream does.
        return number if -(2**63) <= number < 2**63 else _rounded(name, number)
    if isinstance(value, float | np.floating):
        return _rounded(name, value)
    if isinstance(value, bytes | str):
        return _text(name, value)
    raise ArgumentTypeError(
        f"the property {name!r} is of type {type(value).__name__}; properties are integers, "
        "floats and strings"
    )


def _rounded(name: str, value: Any) -> float:
    try:
        with np.errstate(over="ignore"):
            return float(np.float32(value))
    except OverflowError:
        raise ArgumentError(f"the property {name!r} is too large a number") from None


def _text(name: str, value: bytes | str) -> str:
    """Return a text that can be written to a file."""
    try:
        return (value if isinstance(value, bytes) else value.encode("utf-8")).decode("utf-8")
    except UnicodeError:
        raise ArgumentError(f"the property {name!r} is not a text in UTF-8") from None


def checked(name: str, value: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return what a parameter is set to, which has to be an array of its shape and type."""
    if isinstance(value, RawTensor) or not isinstance(value, np.ndarray):
        raise StateError(
            f"the parameter {name!r} is set to a numpy array, not to {type(value).__name__}"
        )
    if value.shape != shape:
        raise StateError(
            f"the parameter {name!r} has the shape {list(shape)}, not {list(value.shape)}"
        )
    if value.dtype != dtype:
        raise StateError(f"the parameter {name!r} is {dtype.name}, not {value.dtype.name}")
    return value
