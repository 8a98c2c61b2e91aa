"""Sources of batches: arrays, an iterable, or a function that returns an iterator each epoch."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from onnxtrain.device.checks import fraction
from onnxtrain.device.loop.rows import (
    Rows,
    RowView,
    checksum,
    conversion,
    narrower,
    rounded,
    take_types,
)
from onnxtrain.errors import ArgumentError
from onnxtrain.format.model.file import ValueType

Array = npt.NDArray[Any]
_PASS = "pass a list of batches, arrays, or a function that returns a new iterator each time"


class Batch(NamedTuple):
    """The values of all inputs in the order of the model, and how many samples they have.

    `indices` says which samples of the arrays they are, where that is known.
    """

    values: Sequence[Any]
    samples: int
    indices: Array | None = None

    def split(self, size: int | None) -> Iterator[Batch]:
        """Yield parts of `size` samples, the last of which may be smaller; None: all at once."""
        if size is None or size >= self.samples:
            yield self
            return
        if not all(isinstance(v, np.ndarray) and len(v) == self.samples for v in self.values):
            raise ArgumentError(
                "micro_batch_size splits batches whose inputs all are arrays with one row a "
                "sample; pass smaller batches and accumulate= instead"
            )
        for start in range(0, self.samples, size):
            rows = slice(start, min(start + size, self.samples))
            indices = None if self.indices is None else self.indices[rows]
            yield Batch([value[rows] for value in self.values], rows.stop - start, indices)


class Source(ABC):
    """The batches of each epoch.

    `batches` is their number, if it is known beforehand. `order` has the settings that determine
    the order of batches; a run can be resumed within an epoch only with the same ones.
    """

    batches: int | None = None
    notes: Sequence[str] = ()  # what a user is told once

    @property
    def order(self) -> dict[str, Any]:
        """The settings that determine the order of batches."""
        return {"kind": type(self).__name__, "batches": self.batches}

    @abstractmethod
    def epoch(self, number: int, skip: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch, counted from 0, without the first `skip`."""


@dataclass
class ArraySource(Source):
    """Batches of arrays, in an order that follows from the seed and the number of the epoch."""

    arrays: Sequence[Rows]
    batch_size: int
    shuffle: bool
    drop_last: bool
    seed: int

    def __post_init__(self) -> None:
        self.samples = len(self.arrays[0])
        left_over = bool(self.samples % self.batch_size) and not self.drop_last
        self.batches = self.samples // self.batch_size + left_over

    @property
    def order(self) -> dict[str, Any]:
        """The settings that determine the order of batches."""
        return super().order | {
            "samples": self.samples,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "seed": self.seed if self.shuffle else None,
            "data_checksum": checksum(self.arrays),
        }

    def epoch(self, number: int, skip: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch."""
        order = shuffled(self.samples, self.seed, number) if self.shuffle else None
        assert self.batches is not None
        for index in range(skip, self.batches):
            place = slice(index * self.batch_size, (index + 1) * self.batch_size)
            if order is None:
                values = [array[place] for array in self.arrays]
                indices = np.arange(*place.indices(self.samples))
            else:
                indices = order[place]
                # Rows of a memory-mapped array are in memory, but still of the type memmap.
                values = [np.asarray(array[indices]) for array in self.arrays]
            yield Batch(values, len(indices), indices)

    def take(self, rows: npt.NDArray[np.int64]) -> ArraySource:
        """Return a source of some of the samples."""
        return replace(self, arrays=[RowView(array, rows) for array in self.arrays])


def shuffled(samples: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return the order of the samples in an epoch.

    Sorted by random words of a generator whose stream numpy promises never to change, so that a run
    can be resumed with another version of numpy.
    """
    generator = np.random.PCG64(np.random.SeedSequence([seed, epoch]))
    words = generator.random_raw(samples)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


class IterableSource(Source):
    """Batches of something that can be iterated over again each epoch."""

    def __init__(
        self,
        data: Any,
        inputs: Sequence[ValueType],
        what: str,
        complete: Callable[[Any], Any] = lambda item: item,
    ) -> None:
        self._data = data
        self._inputs = inputs
        self._what = what
        self._complete = complete
        self.notes = self._notes = list[str]()
        try:
            self.batches = len(data)
        except TypeError:
            self.batches = None

    def epoch(self, number: int, skip: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch."""
        index = -1
        for index, item in enumerate(self._open(number)):
            if index >= skip:
                where = f"batch {index + 1} of epoch {number + 1} of {self._what}"
                yield self._batch(item, where)
        if index + 1 < skip:
            raise ArgumentError(
                f"epoch {number + 1} of {self._what} has {index + 1} batches, but {skip} were done "
                "before the run was interrupted: to resume, the same data are needed"
            )
        if index < 0:
            raise ArgumentError(f"{self._what} gave no batch in epoch {number + 1}")

    def _batch(self, item: Any, where: str) -> Batch:
        batch = to_batch(self._complete(item), [value.name for value in self._inputs], where)
        values = list(batch.values)
        for index, (value, data) in enumerate(zip(self._inputs, values, strict=True)):
            if isinstance(data, np.ndarray) and (narrow := narrower(value, data.dtype)):
                values[index] = rounded(data, narrow, value.name)
                note = conversion(value, data.dtype)
                if note not in self._notes:
                    self._notes.append(note)
        return batch._replace(values=values)

    def _open(self, number: int) -> Iterable[Any]:
        data: Iterable[Any] = self._data
        return data


class IteratorSource(IterableSource):
    """Batches of an iterator, which can be gone through once."""

    _used = False

    def _open(self, number: int) -> Iterable[Any]:
        if self._used:
            raise ArgumentError(
                f"{self._what} is an iterator that is used up: for several epochs {_PASS}"
            )
        self._used = True
        return super()._open(number)


class FunctionSource(IterableSource):
    """Batches of the iterator that a function returns each epoch.

    The function is called without arguments, or, if it takes one, with the number of the epoch,
    counted from 0.
    """

    @property
    def _takes_epoch(self) -> bool:
        return _takes_argument(self._data)

    def _open(self, number: int) -> Iterable[Any]:
        given = self._data(number) if self._takes_epoch else self._data()
        try:
            batches: Iterator[Any] = iter(given)
            return batches
        except TypeError:
            raise ArgumentError(
                f"the function that was passed as {self._what} must return an iterator of batches, "
                f"not {type(given).__name__}"
            ) from None


def _takes_argument(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(p.kind in kinds and p.default is inspect.Parameter.empty for p in parameters)


def to_batch(item: Any, names: Sequence[str], where: str) -> Batch:
    """Return an item of an iterable as the values of all inputs."""
    if isinstance(item, Mapping):
        values = _in_order(item, names, where)
    elif isinstance(item, tuple) or (
        # A model with one input also takes the bare array, which may be a list of rows.
        isinstance(item, list) and (len(names) > 1 or len(item) == 1)
    ):
        values = list(item)
    else:
        values = [item]
    _require_count(values, names, where)
    samples = count_samples(values)
    if samples == 0:
        raise ArgumentError(f"{where} has no samples")
    return Batch(values, samples)


def _require_count(values: Sequence[Any], names: Sequence[str], where: str) -> None:
    if len(values) != len(names):
        raise ArgumentError(
            f"{where} has {len(values)} arrays, and the model has {len(names)} inputs: "
            f"{', '.join(names)}"
        )


def count_samples(values: Sequence[Any]) -> int:
    """Return the length of the first axis of the first value that has one."""
    for value in values:
        own = getattr(value, "shape", None)
        shape = own() if callable(own) else np.shape(value) if own is None else own
        if len(shape):
            return int(shape[0])
    return 1


def loss_of(result: Any) -> float:
    """Return the loss of a step, which has one element, in whatever shape."""
    loss = as_array(result[0] if isinstance(result, tuple) else result)
    if loss.size != 1:
        raise ArgumentError(
            f"the loss has the shape {list(loss.shape)}, and training needs one number: reduce it "
            "in the model, for instance with reduction='mean'"
        )
    return float(loss.reshape(()))


def as_array(value: Any) -> Array:
    """Return a value as a numpy array; onnxruntime's have a method for that."""
    own = getattr(value, "numpy", None)
    return np.asarray(own() if callable(own) else value)


def _in_order(given: Mapping[str, Any], names: Sequence[str], where: str) -> list[Any]:
    missing = [name for name in names if name not in given]
    unknown = [name for name in given if name not in names]
    if missing or unknown:
        wrong = [
            f"{word} {', '.join(map(repr, found))}"
            for word, found in (("lacks", missing), ("has unknown", unknown))
            if found
        ]
        raise ArgumentError(
            f"{where} {' and '.join(wrong)}: the inputs of the model are {', '.join(names)}"
        )
    return [given[name] for name in names]


def make_source(
    data: Any,
    inputs: Sequence[ValueType],
    *,
    batch_size: int,
    shuffle: bool = False,
    drop_last: bool = False,
    seed: int = 0,
    what: str = "data",
    complete: Callable[[Any], Any] = lambda item: item,
) -> Source:
    """Return the source of batches for what a user passes as data.

    `complete` adds what items of an iterable may leave out.
    """
    names = [value.name for value in inputs]
    if isinstance(data, Mapping):
        data = tuple(_in_order(data, names, what))
    elif isinstance(data, np.ndarray):
        data = (data,)
    if isinstance(data, tuple):
        arrays = _arrays(data, names, what)
        views, notes = take_types(inputs, arrays)
        source = ArraySource(views, batch_size, shuffle, drop_last, seed)
        source.notes = notes
        if not source.batches:
            few = (
                f"{source.samples} samples, fewer than a batch of {batch_size}, and drop_last=True"
            )
            raise ArgumentError(f"{what} has {few if source.samples else 'no samples'}")
        return source
    bare = isinstance(data, list) and any(isinstance(item, np.ndarray) for item in data)
    if bare and len(names) > 1:
        raise ArgumentError(
            f"{what} is a list of arrays. Pass a tuple of arrays, one for each input of the model "
            f"({', '.join(names)}), or a list of batches, each of which is a tuple"
        )
    if isinstance(data, Iterable):
        one_shot = iter(data) is data
        return (IteratorSource if one_shot else IterableSource)(data, inputs, what, complete)
    if callable(data):
        return FunctionSource(data, inputs, what, complete)
    raise ArgumentError(
        f"{what} must be a tuple or dictionary of arrays, an iterable of batches, or a function "
        f"that returns one, not {type(data).__name__}"
    )


def _arrays(given: Sequence[Any], names: Sequence[str], what: str) -> list[Rows]:
    """Return what is given for the inputs as arrays with the same number of samples."""
    _require_count(given, names, what)
    arrays = [v if isinstance(v, np.ndarray | RowView) else np.asarray(v) for v in given]
    for name, array in zip(names, arrays, strict=True):
        if not array.shape:
            raise ArgumentError(f"{what}: the array for {name!r} has no axis of samples")
    if len({len(array) for array in arrays}) > 1:
        lengths = ", ".join(f"{n!r} has {len(a)}" for n, a in zip(names, arrays, strict=True))
        raise ArgumentError(f"the arrays of {what} differ in their number of samples: {lengths}")
    return arrays


def require_repeatable(source: Source, epochs: int, what: str) -> None:
    """Refuse an iterator where several epochs are asked for."""
    if epochs > 1 and isinstance(source, IteratorSource):
        raise ArgumentError(
            f"{what} is an iterator, which can be gone through once, and there are {epochs} "
            f"epochs: {_PASS} (for a generator function f, pass f and not f())"
        )


def split_off(source: Source, part: Any, names: Sequence[str]) -> tuple[Source, dict[str, Rows]]:
    """Divide the samples of arrays into those to train with, and validation data by name."""
    if not isinstance(source, ArraySource):
        raise ArgumentError("validation_split needs the data as arrays: pass validation= instead")
    count = round(fraction("validation_split", part) * source.samples)
    if not 0 < count < source.samples:
        raise ArgumentError(
            f"validation_split={part} of {source.samples} samples leaves none on one side"
        )
    # The order of an epoch that no run comes to.
    order = shuffled(source.samples, source.seed, 2**32)
    chosen = source.take(np.sort(order[:count]))
    return source.take(np.sort(order[count:])), dict(zip(names, chosen.arrays, strict=True))
