"""Arrays of samples whose rows are read when a batch needs them: all, some, or as another type."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxtrain.errors import InputError
from onnxtrain.format.element_types import ELEMENT_TYPES
from onnxtrain.format.model.file import ValueType

Array = npt.NDArray[Any]
_LOOKED_AT, _SMALL = 8, 1 << 20  # rows of a large array that make its checksum; bytes


class RowView:
    """Some rows of an array, or all of them as a narrower float; nothing is copied before."""

    def __init__(
        self,
        array: Rows,
        rows: npt.NDArray[np.int64] | None = None,
        dtype: np.dtype[Any] | None = None,
        name: str = "",
    ) -> None:
        self._array, self._rows = array, rows
        self.dtype: np.dtype[Any] = array.dtype if dtype is None else dtype
        self._name = name
        self.shape: tuple[int, ...] = (len(array) if rows is None else len(rows), *array.shape[1:])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Array:
        found = self._array[index if self._rows is None else self._rows[index]]
        return found if found.dtype == self.dtype else rounded(found, self.dtype, self._name)


Rows = Array | RowView


def take_types(inputs: Sequence[ValueType], arrays: Sequence[Rows]) -> tuple[list[Rows], list[str]]:
    """Return arrays in the float types of the inputs, and notes on those that are converted."""
    views: list[Rows] = []
    notes = []
    for value, array in zip(inputs, arrays, strict=True):
        narrow = narrower(value, array.dtype)
        views.append(array if narrow is None else RowView(array, None, narrow, value.name))
        if narrow is not None:
            notes.append(conversion(value, array.dtype))
    return views, notes


def narrower(value: ValueType, dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """Return the type of an input, if it is a float of fewer bits than that of an array."""
    element = ELEMENT_TYPES.get(value.element_type)
    wanted = None if element is None else element.dtype
    if wanted is None or wanted.kind != "f" or dtype.kind != "f":
        return None
    return wanted if wanted.itemsize < dtype.itemsize else None


def conversion(value: ValueType, dtype: np.dtype[Any]) -> str:
    """Say that an array is converted."""
    element = ELEMENT_TYPES[value.element_type].name.lower()
    return f"note: {value.name!r} is given as {dtype.name} and rounded to {element}"


def rounded(array: Array, dtype: np.dtype[Any], name: str) -> Array:
    """Round floats to fewer bits, which may change the last digits of fractions and no more."""
    with np.errstate(over="ignore", under="ignore"):
        made = array.astype(dtype)
        changed = (made != array) & ~np.isnan(array)
        if changed.any():
            whole = array == np.rint(array)
            lost = changed & (whole | np.isinf(made) | (made == 0))
            if lost.any():
                place = tuple(int(i) for i in np.argwhere(lost)[0])
                before, after = float(array[place]), float(made[place])
                raise InputError(
                    f"the input {name!r} is {dtype.name}, and {before!r} at {list(place)} of a "
                    f"{array.dtype.name} array would become {after!r}. Scale the data, or convert "
                    f"it with astype({dtype.name!r}) if that is intended"
                )
    return made


def checksum(arrays: Sequence[Rows]) -> int:
    """Return a number by which data is known again; of large arrays, a few samples are read."""
    found = 0
    for array in arrays:
        is_small = math.prod(array.shape) * array.dtype.itemsize <= _SMALL
        count = len(array) if is_small else _LOOKED_AT
        places = np.unique(np.linspace(0, len(array) - 1, count).astype(np.int64))
        rows = np.asarray(array[places])
        content = repr(rows.tolist()).encode() if rows.dtype.kind == "O" else rows.tobytes()
        found = zlib.crc32(content, zlib.crc32(str(rows.dtype).encode(), found))
    return found
