"""Parameters as Flower's records and back, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord

from onnxtrain.device.parameters import Parameters
from onnxtrain.errors import ArgumentError, NonFiniteError, StateError, UnknownNameError
from onnxtrain.federated.files import read_npy
from onnxtrain.federated.selection import Holder, Which, module_of, select, state_of
from onnxtrain.format.checkpoint.content import Array as NumpyArray
from onnxtrain.format.element_types import ELEMENT_TYPES


def to_arrays(state: Holder, which: Which = "changing") -> ArrayRecord:
    """Return parameters as an `ArrayRecord`, by their names in the model.

    Args:
        state: a `TrainingSession`, a `Module` or a `CheckpointState`.
        which: the parameters: "changing", "trainable", "no-batch-norm", "everything", names and
            patterns, or a function of the name. See `select`.

    """
    held = state_of(state)
    with held.lock:
        return to_record({n: Parameters(held)[n].data for n in select(state, which)})


def to_record(values: Mapping[str, NumpyArray]) -> ArrayRecord:
    """Return arrays as a record."""
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in values.items()})


def from_arrays(state: Holder, record: ArrayRecord) -> None:
    """Set parameters from an `ArrayRecord`, by name; if one does not fit, none is changed.

    Floats of another width are converted. Arrays that are not floats, such as counters of other
    frameworks, are ignored if the model has none of that name. A nominal state needs all its
    parameters at once.
    """
    values = fitting(state, read_record(record))
    module = module_of(state)
    if module is not None:
        module.load_parameters(values)
        return
    held = state_of(state)
    if held.nominal:
        raise StateError("a nominal CheckpointState needs its graphs: pass the TrainingSession")
    with held.lock:
        held.require_changeable(values)
        for name, array in values.items():
            held.set_value(name, array)


def read_record(record: ArrayRecord) -> dict[str, NumpyArray]:
    """Return the arrays of an untrusted record."""
    return {name: read_array(name, array) for name, array in record.items()}


def read_array(name: str, array: Array) -> NumpyArray:
    """Return an untrusted array, which is not larger than its bytes."""
    try:
        if array.stype != "numpy.ndarray":
            raise TypeError(f"serialized as {array.stype!r}")
        return read_npy(array.data)
    except Exception as error:  # numpy raises many kinds of errors for broken bytes
        raise ArgumentError(f"the array {name!r} cannot be read: {error}") from None


def fitting(holder: Holder, arrays: Mapping[str, NumpyArray]) -> dict[str, NumpyArray]:
    """Return arrays in the types of the parameters; one that does not fit is an error."""
    state = state_of(holder)
    module = module_of(holder) if state.nominal else None  # knows what the state does not
    values = {}
    for name, array in arrays.items():
        if not state.has(name):
            if array.dtype.kind != "f":
                continue
            raise UnknownNameError(
                f"there is no parameter {name!r} here, only {', '.join(state.names())}: use "
                "artifacts of the same model"
            )
        shape = state.type_of(name)[0] if module is None else module.shape_of(name)
        values[name] = _converted(name, array, shape, ELEMENT_TYPES[state.code_of(name)].dtype)
    return values


def _converted(name: str, array: NumpyArray, shape: tuple[int, ...], dtype: Any) -> NumpyArray:
    if array.shape != shape:
        shapes = f"{list(shape)}, and the received array {list(array.shape)}"
        raise ArgumentError(f"the parameter {name!r} has the shape {shapes}")
    if dtype is None or array.dtype == dtype:
        return array
    if array.dtype.kind != "f" or np.dtype(dtype).kind != "f":
        kinds = f"{np.dtype(dtype).name}, and the received array {array.dtype.name}"
        raise ArgumentError(f"the parameter {name!r} is {kinds}")
    with np.errstate(over="ignore"):
        converted: NumpyArray = array.astype(dtype)
    if np.isfinite(array).all() and not np.isfinite(converted).all():
        raise NonFiniteError(f"the parameter {name!r} has values that do not fit {converted.dtype}")
    return converted
