"""All parameters concatenated in one buffer, as federated learning exchanges them.

The order is that of the training graph's inputs for what trains, then running statistics in the
same order, then frozen parameters as the graph's metadata lists them (by name where it has none).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxtrain.device.export.layout import stored_shapes
from onnxtrain.device.parameters import checked
from onnxtrain.device.run.binding import as_ortvalue
from onnxtrain.device.run.executors import TrainExecutor, require_values
from onnxtrain.errors import ArgumentError, StateError, UnknownNameError
from onnxtrain.format.checkpoint.content import Array
from onnxtrain.format.element_types import ELEMENT_TYPES

_FLOAT = 1


class ParameterBuffers:
    """What a module has to read and set all parameters at once."""

    def __init__(self, executor: TrainExecutor) -> None:
        self.training_executor = executor
        self.training_state = state = executor.state  # what graphs are bound to
        model, signature = executor.graph.model, executor.signature
        self._shapes: dict[str, tuple[int, ...]] = {}
        trained = set(state.trainable_names())
        inputs = {v.name: v.dims for v in signature.parameters}
        self._trainable = [name for name in inputs if name in trained]
        rest = [name for name in inputs if name not in trained]
        noted = [n for n in model.metadata.frozen if state.has(n) and n not in inputs]
        others = sorted(set(state.names()) - set(inputs) - set(noted))
        self._all = [*self._trainable, *rest, *noted, *others]
        constants = stored_shapes(model, [*noted, *others]) if state.nominal else {}
        for name in self._all:
            dims = inputs.get(name, constants.get(name))
            if dims is not None and all(isinstance(d, int) for d in dims):
                self._shapes[name] = tuple(int(d) for d in dims if isinstance(d, int))
            elif not state.nominal:
                self._shapes[name] = state.type_of(name)[0]
        # The names of running statistics: what a step changes without training it.
        self.statistics = tuple(rest)
        if not state.nominal:
            executor.allocate()

    def _names(self, trainable_only: bool) -> list[str]:
        return self._trainable if trainable_only else self._all

    def get_parameters_size(self, trainable_only: bool = True) -> int:
        """Return the number of elements of the parameters."""
        return sum(math.prod(self.shape_of(name)) for name in self._names(trainable_only))

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter, of a nominal state too."""
        if name not in self._shapes:
            raise StateError(
                f"the shape of {name!r} is neither in the training graph nor in the nominal "
                "checkpoint: use a complete checkpoint"
            )
        return self._shapes[name]

    def get_contiguous_parameters(self, trainable_only: bool = False) -> Any:
        """Return a copy of all parameters, concatenated, as an OrtValue of float32."""
        with self.training_state.lock:
            require_values(self.training_state)
            names = self._names(trainable_only)
            self._require_floats(names)
            arrays = [self.training_state.value_of(name).reshape(-1) for name in names]
            buffer = np.concatenate([np.empty(0, np.float32), *arrays])
            return as_ortvalue(buffer)

    def copy_buffer_to_parameters(self, buffer: Any, trainable_only: bool = True) -> None:
        """Set all parameters from an array or `OrtValue` as `get_contiguous_parameters` returns.

        Nothing is changed if it does not fit. A nominal state is complete after it was given all
        parameters.
        """
        with self.training_state.lock:
            if self.training_state.nominal and trainable_only:
                raise StateError(
                    "Please load the model parameters first. A nominal state needs all of them: "
                    "trainable_only=False"
                )
            values = _elements(buffer)
            wanted = self.get_parameters_size(trainable_only)
            if values.size != wanted:
                raise ArgumentError(
                    f"the buffer has {values.size} elements, and {wanted} are needed"
                )
            names = self._names(trainable_only)
            self._require_floats(names)
            parts, start = {}, 0
            for name in names:
                shape = self.shape_of(name)
                parts[name] = values[start : start + math.prod(shape)].reshape(shape)
                start += math.prod(shape)
            self._set(parts)

    def load_parameters(self, values: Mapping[str, Array]) -> None:
        """Set parameters by name: some of them, or all of those of a nominal state.

        Nothing is changed if one of them is unknown, or of another shape or type.
        """
        state = self.training_state
        with state.lock:
            unknown = [name for name in values if not state.has(name)]
            if unknown:
                raise UnknownNameError(
                    f"there is no parameter {unknown[0]!r}; there are {', '.join(state.names())}"
                )
            missing = [name for name in state.names() if name not in values]
            if state.nominal and missing:
                raise StateError(
                    f"the checkpoint is nominal, and there are no values for {missing[0]!r}: it "
                    "needs all parameters at once"
                )
            self._set({name: checked(name, v, *self._type_of(name)) for name, v in values.items()})

    def _set(self, values: Mapping[str, Array]) -> None:
        """Set parameters to values of their shapes and types."""
        state = self.training_state
        if state.nominal:
            state.complete({name: array.copy() for name, array in values.items()})
            self.training_executor.allocate()
            return
        state.require_changeable(values)
        for name, array in values.items():
            state.set_value(name, array)

    def _type_of(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        if not self.training_state.nominal:
            return self.training_state.type_of(name)
        element = ELEMENT_TYPES[self.training_state.code_of(name)]
        if element.dtype is None:
            raise StateError(f"the parameter {name!r} is {element.name}, which numpy does not have")
        return self.shape_of(name), np.dtype(element.dtype)

    def _require_floats(self, names: Sequence[str]) -> None:
        for name in names:
            code = self.training_state.code_of(name)
            if code != _FLOAT:
                raise StateError(
                    f"the parameter {name!r} is {ELEMENT_TYPES[code].name.lower()}; only float32 "
                    "goes into a buffer"
                )


def _elements(buffer: Any) -> Array:
    """Return the elements of a buffer, whatever holds them."""
    if isinstance(buffer, np.ndarray):
        array: Array = buffer
    elif callable(getattr(buffer, "numpy", None)):  # OrtValue, or onnxruntime's inner value
        array = np.asarray(buffer.numpy())
    else:
        raise ArgumentError(
            f"a buffer is a numpy array or an OrtValue, not {type(buffer).__name__}"
        )
    if array.dtype != np.float32:
        raise ArgumentError(f"a buffer is of type float32, not {array.dtype.name}")
    return array.reshape(-1)
