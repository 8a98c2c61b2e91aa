"""Calibration data, in the forms that training takes it: batches, or arrays of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from onnxtrain.errors import ArgumentError

Array = np.ndarray[Any, Any]
Batch = dict[str, Array]
MOST_BATCHES = 512
_SAMPLES = 32  # in a batch, where arrays of samples are given
_TYPES = {
    "tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16,
    "tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(int16)": np.int16,
    "tensor(int8)": np.int8, "tensor(uint8)": np.uint8, "tensor(bool)": np.bool_,
}  # fmt: skip


@dataclass(frozen=True)
class CalibrationInput:
    """An input of the model: its type as onnxruntime writes it, and its dimensions."""

    name: str
    kind: str
    dims: Sequence[int | str | None]


class Batches:
    """Batches by the names of inputs; what comes behind them, such as labels, is left out."""

    def __init__(self, data: Any, inputs: Sequence[CalibrationInput]) -> None:
        self._inputs, self._names = inputs, [value.name for value in inputs]
        self._data = self._as_batches(data() if callable(data) else data)
        self._constant: dict[str, Any] = {}  # inputs that have been the same number throughout

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches that fit the model, at most 512 of them."""
        number = -1
        for number, given in enumerate(islice(self._data, MOST_BATCHES)):
            batch = self._by_name(given, number)
            found = {v.name: _fitting(batch[v.name], v, number) for v in self._inputs}
            self._look_for_variety(found, number)
            yield found
        if number < 0:
            raise ArgumentError(
                "the calibration data have no batch: give some that are like those of training, "
                "a hundred samples in all will do"
            )

    def require_variety(self) -> None:
        """Refuse data that never change, from which nothing can be learned."""
        if self._names and len(self._constant) == len(self._names):
            name, first = next(iter(self._constant.items()))
            raise ArgumentError(
                f"all elements of {name!r} in the calibration data are {first}: give samples like "
                "those of training"
            )

    def _as_batches(self, data: Any) -> Iterable[Any]:
        if isinstance(data, str | bytes) or not isinstance(data, Iterable):
            raise ArgumentError(
                "calibration is a list of batches, or what makes one: each an array, a tuple of "
                f"the inputs {', '.join(self._names)}, or a dictionary; or arrays of all samples; "
                f"not {type(data).__name__}"
            )
        if isinstance(data, Mapping):
            return self._cut(dict(data), lambda rows: {n: a[rows] for n, a in data.items()})
        if isinstance(data, np.ndarray):
            return self._cut({"": data}, lambda rows: data[rows])
        if isinstance(data, tuple) and all(isinstance(a, np.ndarray) for a in data):
            return self._cut(dict(enumerate(data)), lambda rows: tuple(a[rows] for a in data))
        return data

    def _cut(self, arrays: Mapping[Any, Any], take: Callable[[slice], Any]) -> Iterator[Any]:
        """Cut arrays of samples into batches; a model of a fixed batch gets whole ones."""
        lengths = {len(a) if np.ndim(a) else 0 for a in arrays.values()}
        if len(lengths) > 1:
            raise ArgumentError(
                "the arrays of the calibration data have different numbers of samples: "
                f"{', '.join(map(str, sorted(lengths)))}"
            )
        samples = lengths.pop() if lengths else 0
        fixed = {v.dims[0] for v in self._inputs if v.dims and isinstance(v.dims[0], int)}
        size = next((int(d) for d in fixed if isinstance(d, int)), _SAMPLES)
        end = samples - samples % size if fixed and samples >= size else samples
        return (take(slice(start, start + size)) for start in range(0, end, size))

    def _by_name(self, batch: Any, number: int) -> Mapping[str, Any]:
        given = batch if isinstance(batch, Mapping) else self._by_position(batch)
        missing = [name for name in self._names if name not in given]
        if missing:
            raise ArgumentError(
                f"batch {number} of the calibration data has no {missing[0]!r}: it needs "
                f"{', '.join(self._names)}"
            )
        return given

    def _by_position(self, batch: Any) -> dict[str, Any]:
        given = batch if isinstance(batch, tuple | list) else [batch]
        return dict(zip(self._names, given, strict=False))

    def _look_for_variety(self, batch: Batch, number: int) -> None:
        for name, array in batch.items():
            first = self._constant.get(name) if number else array.flat[0]
            if first is not None and (array == first).all():
                self._constant[name] = first
            else:
                self._constant.pop(name, None)


def _fitting(given: Any, value: CalibrationInput, number: int) -> Array:
    """Return an array of the type and shape of an input, converted as a device does."""
    where = f"batch {number} of the calibration data"
    try:
        array = np.asarray(given)
    except (ValueError, TypeError) as error:
        raise ArgumentError(f"{where}: {value.name!r} is no array: {error}") from None
    wanted = np.dtype(_TYPES.get(value.kind, array.dtype))
    if array.dtype.kind not in "biuf" and array.dtype != wanted:
        raise ArgumentError(f"{where}: {value.name!r} is {array.dtype}, not {wanted.name}")
    shape, dims = array.shape, value.dims
    if len(shape) != len(dims) or any(
        isinstance(d, int) and d != s for s, d in zip(shape, dims, strict=True)
    ):
        expected = ", ".join("?" if d is None else str(d) for d in dims)
        raise ArgumentError(
            f"{where}: {value.name!r} has the shape {list(shape)}, and the model takes [{expected}]"
        )
    if not array.size:
        raise ArgumentError(f"{where} has no elements of {value.name!r}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ArgumentError(
            f"{where} has elements of {value.name!r} that are not finite (NaN or infinite): leave "
            "such samples out"
        )
    if wanted.kind in "iu" and array.dtype.kind == "f" and (array != np.trunc(array)).any():
        raise ArgumentError(
            f"{where}: {value.name!r} has fractions, and the model takes integers ({wanted.name})"
        )
    return np.ascontiguousarray(array, wanted)
