"""What a user feeds: matched with the inputs of a graph, converted where nothing is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from onnxtrain.device.run.graph import ORT_TYPES, batch_symbol
from onnxtrain.errors import InputError
from onnxtrain.format.checkpoint.content import Array
from onnxtrain.format.element_types import ELEMENT_TYPES, STRING
from onnxtrain.format.model.file import ValueType

_INNER_VALUE = ort.capi.onnxruntime_pybind11_state.OrtValue


class Strings:
    """An array of strings, with as much of OrtValue as is asked of it: there is none of strings."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def shape(self) -> tuple[int, ...]:
        """The dimensions."""
        return self._array.shape

    def numpy(self) -> Array:
        """The elements."""
        return self._array


def arranged(
    inputs: Sequence[ValueType], given: Sequence[Any], named: Mapping[str, Any]
) -> Sequence[Any]:
    """Put inputs given by position and by name in the order of the graph.

    One dictionary is inputs by name, too: some names cannot be those of arguments.
    """
    if len(given) == 1 and not named and isinstance(given[0], Mapping):
        named, given = given[0], []
    if not named:
        if len(given) != len(inputs):
            raise InputError(
                f"{len(given)} inputs were given ({_given(given)}), and there are {len(inputs)}. "
                f"{_expected(inputs)}"
            )
        return given
    names = [value.name for value in inputs]
    unknown = [name for name in named if name not in names]
    twice = [name for name in names[: len(given)] if name in named]
    missing = [name for name in names[len(given) :] if name not in named]
    if unknown or twice or missing or len(given) > len(inputs):
        parts = [
            f"{what}: {', '.join(map(repr, found))}"
            for what, found in (("unknown", unknown), ("given twice", twice), ("missing", missing))
            if found
        ] or ["there are too many"]
        raise InputError(f"the inputs do not fit: {'; '.join(parts)}. {_expected(inputs)}")
    return [*given, *(named[name] for name in names[len(given) :])]


def is_ortvalue(value: Any) -> bool:
    """Whether a value is onnxruntime's, as its users know it or as it is inside."""
    return isinstance(value, ort.OrtValue | _INNER_VALUE)


def prepared(inputs: Sequence[ValueType], given: Sequence[Any]) -> list[Any]:
    """Return the values to bind to the inputs, checked and converted."""
    symbols: dict[str, tuple[int, str]] = {}
    result: list[Any] = []
    try:
        for value, data in zip(inputs, given, strict=True):
            held = _held(value, data)
            _check_shape(value, tuple(held.shape()), symbols)
            result.append(held)
        empty = [dim for dim, (size, _) in symbols.items() if size == 0]
        batch = batch_symbol(inputs) if empty else None
        if batch in empty:  # the mean loss of no samples is not a number
            raise InputError(f"the input {symbols[batch][1]!r} has no samples")
    except InputError as error:
        raise InputError(f"{error}. {_expected(inputs)}. Given: {_given(given)}") from None
    return result


def _held(value: ValueType, data: Any) -> Any:
    """Return the data of an input as an OrtValue, or as `Strings`."""
    if is_ortvalue(data):
        held = data if isinstance(data, ort.OrtValue) else ort.OrtValue(data)
        # What is in it cannot be converted without a copy.
        wanted = ORT_TYPES.get(value.element_type)
        if wanted is not None and held.data_type() != wanted:
            raise InputError(
                f"the input {value.name!r} is {wanted}, but the OrtValue is {held.data_type()}"
            )
        return held
    if value.element_type != STRING:
        return ort.OrtValue.ortvalue_from_numpy(converted(value, data))
    array = np.asarray(data)
    if array.dtype.kind != "U" and not (
        array.dtype.kind == "O" and all(isinstance(item, str) for item in array.flat)
    ):
        raise InputError(
            f"the input {value.name!r} takes strings, but the array is {array.dtype.name}"
        )
    return Strings(array.astype(object))


def converted(value: ValueType, data: Any) -> Array:
    """Return the data of an input as an array of its element type, if nothing is lost."""
    if data is None:
        raise InputError(f"the input {value.name!r} is None")
    element = ELEMENT_TYPES.get(value.element_type)
    wanted = None if element is None else element.dtype
    if wanted is None:
        raise InputError(
            f"the input {value.name!r} is of a type that numpy does not have: pass an OrtValue"
        )
    if isinstance(data, np.ndarray):
        if data.dtype == wanted:
            usable = data.flags.c_contiguous and data.flags.aligned
            return data if usable else data.copy()
        return _cast(value, data, wanted)
    try:
        array = np.asarray(data)
        # Numbers without a type of their own take that of the input, if that has fractions.
        if wanted.kind == "f" and array.dtype.kind in "biuf":
            return array.astype(wanted)
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(f"the input {value.name!r} is not an array: {error}") from None
    return _cast(value, array, wanted)


def _cast(value: ValueType, data: Array, wanted: np.dtype[Any]) -> Array:
    """Convert to the type of the input if every number survives it."""
    lost = "which cannot be converted"
    if data.dtype.kind in "biuf" and wanted.kind in "biuf":
        with np.errstate(all="ignore"):
            cast = np.ascontiguousarray(data, dtype=wanted).reshape(data.shape)
            if np.can_cast(data.dtype, wanted, "safe"):
                return cast
            same = _survives(data, cast)
        if same.all():
            return cast
        place = tuple(int(i) for i in np.argwhere(~same)[0])
        lost = (
            f"and {data[place]!r} at {list(place)} would change; convert it with "
            f"astype({wanted.name!r}) if that is intended"
        )
    raise InputError(
        f"the input {value.name!r} is {wanted.name}, but the array is {data.dtype.name}, {lost}"
    )


def _survives(data: Array, cast: Array) -> npt.NDArray[np.bool_]:
    """Tell for each number whether a conversion has kept it."""
    same: npt.NDArray[np.bool_] = cast.astype(data.dtype) == data
    if data.dtype.kind == cast.dtype.kind == "f":
        return same | np.isnan(data)
    if data.dtype.kind == "f" or cast.dtype.kind != "f":
        # What is too large wraps around, and may come back as it was.
        kept: npt.NDArray[np.bool_] = (cast < 0) == (data < 0)
    else:
        # A float that is too large for the integer is made the largest one by some processors.
        kept = cast < (2.0 if data.dtype.kind == "b" else float(np.iinfo(data.dtype).max) + 1.0)
    return same & kept


def _check_shape(
    value: ValueType, shape: tuple[int, ...], symbols: dict[str, tuple[int, str]]
) -> None:
    if value.dims is None:
        return
    fits = len(shape) == len(value.dims) and all(
        size == dim for size, dim in zip(shape, value.dims, strict=True) if isinstance(dim, int)
    )
    if not fits:
        raise InputError(
            f"the input {value.name!r} has the shape {_dims(value)}, and the array {list(shape)}"
            f"{_fixed_batch(value.dims, shape)}"
        )
    for size, dim in zip(shape, value.dims, strict=True):
        if isinstance(dim, str):
            known, where = symbols.setdefault(dim, (size, value.name))
            if known != size:
                raise InputError(
                    f"the dimension {dim!r} is {known} in {where!r} and {size} in "
                    f"{value.name!r}: it is the same in all inputs"
                )


def _fixed_batch(dims: Sequence[int | str | None], shape: Sequence[int]) -> str:
    """Say what to do where an array has another number of samples than the graph is made for."""
    batch = dims[0] if dims else None
    if not isinstance(batch, int) or len(shape) != len(dims) or shape[0] == batch:
        return ""
    more = f"accumulate={shape[0] // batch}" if shape[0] > batch else "drop_last=True"
    return (
        f": it takes batches of {batch}, so pass batch_size={batch} (and {more} to fit), or export "
        "the model with a symbolic batch"
    )


def _dims(value: ValueType) -> str:
    if value.dims is None:
        return "of any shape"
    return "[" + ", ".join("?" if d is None else str(d) for d in value.dims) + "]"


def _expected(inputs: Sequence[ValueType]) -> str:
    kinds = {code: element.name.lower() for code, element in ELEMENT_TYPES.items()}
    described = (f"{v.name}: {kinds.get(v.element_type, '?')} {_dims(v)}" for v in inputs)
    return f"The inputs are, in this order: {'; '.join(described)}"


def _given(given: Sequence[Any]) -> str:
    return "; ".join(_kind(data) for data in given) or "none"


def _kind(data: Any) -> str:
    if isinstance(data, np.ndarray):
        return f"{data.dtype.name} {list(data.shape)}"
    if is_ortvalue(data):
        return f"OrtValue of {data.data_type()}" + (
            f" {list(data.shape())}" if data.is_tensor() else ""
        )
    return type(data).__name__
