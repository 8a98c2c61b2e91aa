"""What a user feeds: matched with the inputs of a graph, converted where nothing is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from onnxtrain.api.checkpoint_content import ELEMENT_TYPES, STRING, Array
from onnxtrain.api.model_file import ValueType
from onnxtrain.errors import InputError


def arranged(
    inputs: Sequence[ValueType], given: Sequence[Any], named: Mapping[str, Any]
) -> Sequence[Any]:
    """Put what was given by position and by name in the order of the inputs."""
    if not named:
        if len(given) != len(inputs):
            raise InputError(_wrong_number(inputs, given))
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
    return isinstance(value, ort.OrtValue)


def prepared(inputs: Sequence[ValueType], given: Sequence[Any]) -> list[Any]:
    """Return what is to be bound to each input, checked and converted."""
    symbols: dict[str, tuple[int, str]] = {}
    result = []
    for value, data in zip(inputs, given, strict=True):
        if is_ortvalue(data):
            result.append(data)
            shape = tuple(data.shape())
        else:
            array = _converted(value, data, inputs, given)
            result.append(ort.OrtValue.ortvalue_from_numpy(array))
            shape = array.shape
        _check_shape(value, shape, symbols, inputs, given)
    return result


def _converted(
    value: ValueType, data: Any, inputs: Sequence[ValueType], given: Sequence[Any]
) -> Array:
    if data is None:
        raise InputError(f"the input {value.name!r} is None. {_expected(inputs)}")
    if value.element_type == STRING:
        raise InputError(
            f"the input {value.name!r} takes strings, which onnxruntime does not bind to a graph: "
            "turn them into numbers first"
        )
    element = ELEMENT_TYPES.get(value.element_type)
    wanted = None if element is None else element.dtype
    if isinstance(data, np.ndarray):
        if wanted is None or data.dtype == wanted:
            return np.ascontiguousarray(data).reshape(data.shape)
        return _cast(value, data, wanted, inputs, given)
    try:
        # Numbers without a type of their own take that of the input.
        return np.asarray(data, dtype=wanted)
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(
            f"the input {value.name!r} is not an array: {error}. {_expected(inputs)}"
        ) from None


def _cast(
    value: ValueType,
    data: Array,
    wanted: np.dtype[Any],
    inputs: Sequence[ValueType],
    given: Sequence[Any],
) -> Array:
    """Convert to the type of the input if every number survives it."""
    if data.dtype.kind in "biuf" and wanted.kind in "biuf":
        with np.errstate(all="ignore"):
            cast = np.ascontiguousarray(data, dtype=wanted).reshape(data.shape)
            if np.can_cast(data.dtype, wanted, "safe"):
                return cast
            same = cast.astype(data.dtype) == data
            if data.dtype.kind == "f" and wanted.kind == "f":
                same |= np.isnan(data)
        if same.all():
            return cast
        place = tuple(int(i) for i in np.argwhere(~same)[0])
        lost = (
            f"and {data[place]!r} at {list(place)} would change; convert it with "
            f"astype({wanted.name!r}) if that is meant"
        )
    else:
        lost = "which cannot be converted"
    raise InputError(
        f"the input {value.name!r} is {wanted.name}, but the array is {data.dtype.name}, {lost}. "
        f"{_order_hint(inputs, given)}"
    )


def _check_shape(
    value: ValueType,
    shape: tuple[int, ...],
    symbols: dict[str, tuple[int, str]],
    inputs: Sequence[ValueType],
    given: Sequence[Any],
) -> None:
    if value.dims is None:
        return
    fits = len(shape) == len(value.dims) and all(
        size == dim for size, dim in zip(shape, value.dims, strict=True) if isinstance(dim, int)
    )
    if not fits:
        raise InputError(
            f"the input {value.name!r} has the shape {_dims(value)}, and the array "
            f"{list(shape)}. {_order_hint(inputs, given)}"
        )
    for size, dim in zip(shape, value.dims, strict=True):
        if isinstance(dim, str):
            known, where = symbols.setdefault(dim, (size, value.name))
            if known != size:
                raise InputError(
                    f"the dimension {dim!r} is {known} in {where!r} and {size} in "
                    f"{value.name!r}: it is the same in all inputs"
                )


# ---- messages ------------------------------------------------------------------------------------


def describe(value: ValueType) -> str:
    """Say what an input takes, as `labels: int64 [batch]`."""
    element = ELEMENT_TYPES.get(value.element_type)
    type_ = "?" if element is None else element.name.lower()
    return f"{value.name}: {type_} {_dims(value)}"


def _dims(value: ValueType) -> str:
    if value.dims is None:
        return "of any shape"
    return "[" + ", ".join("?" if d is None else str(d) for d in value.dims) + "]"


def _expected(inputs: Sequence[ValueType]) -> str:
    return f"The inputs are, in this order: {'; '.join(describe(v) for v in inputs)}"


def _wrong_number(inputs: Sequence[ValueType], given: Sequence[Any]) -> str:
    return (
        f"{len(given)} inputs were given ({_given(given)}), and there are {len(inputs)}. "
        f"{_expected(inputs)}"
    )


def _order_hint(inputs: Sequence[ValueType], given: Sequence[Any]) -> str:
    return f"{_expected(inputs)}. Given: {_given(given)}"


def _given(given: Sequence[Any]) -> str:
    return "; ".join(_kind(data) for data in given) or "none"


def _kind(data: Any) -> str:
    if isinstance(data, np.ndarray):
        return f"{data.dtype.name} {list(data.shape)}"
    if is_ortvalue(data):
        return f"OrtValue of {data.data_type()} {list(data.shape())}"
    return type(data).__name__
