"""The data of a comparison: batches of the inputs, with or without labels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from onnxtrain.device.loop.batches import ArraySource, Batch, Source, as_array, make_source
from onnxtrain.device.run.inputs import prepared
from onnxtrain.errors import ArgumentError, InputError
from onnxtrain.format.model.file import ValueType

Array = np.ndarray[Any, Any]


class Part(NamedTuple):
    """A batch: the inputs by name, and the labels if the data have them."""

    feeds: dict[str, Array]
    labels: Array | None
    samples: int


class Samples:
    """Data that can be gone through several times."""

    def __init__(
        self, data: Any, inputs: Sequence[ValueType], batch_size: int, fixed: int | None
    ) -> None:
        self._inputs, self._fixed = inputs, fixed
        self._given = _repeatable(data)
        names = [value.name for value in inputs]
        is_list = isinstance(self._given, list)
        labels = _labels_name(self._given[0] if is_list and self._given else self._given, names)
        self.has_labels = labels is not None
        self._declared = [*inputs, *([] if labels is None else [ValueType(labels, 0, None)])]
        self._source = self._made(self._given, fixed or batch_size)
        self.left_out = 0
        if fixed is not None and isinstance(self._source, ArraySource):
            self.left_out = self._source.samples % fixed
            if self.left_out == self._source.samples:
                raise InputError(
                    f"there are {self.left_out} samples, and the model takes {fixed} at once"
                )
            self._source = replace(self._source, drop_last=True)

    def _made(self, given: Any, batch_size: int) -> Source:
        return make_source(given, self._declared, batch_size=batch_size)

    def __iter__(self) -> Iterator[Part]:
        return map(self._part, self._source.epoch(0))

    def some(self, count: int, batch_size: int) -> Iterator[Part]:
        """Yield about `count` samples, from all over the data, in batches that may be smaller."""
        source = self._source
        if isinstance(source, ArraySource):
            size = self._fixed or batch_size
            rows = _spread(source.samples, max(count, size))
            source = replace(source.take(rows), batch_size=size)
        else:
            each = self.first().samples
            places = _spread(len(self._given), max(1, count // max(1, each)))
            source = self._made([self._given[i] for i in places], batch_size)
        return map(self._part, source.epoch(0))

    def first(self) -> Part:
        """Return the first batch."""
        return next(iter(self))

    def one(self) -> Part | None:
        """Return a single sample, where the model takes it and the inputs can be divided."""
        part = self.first()
        can_divide = all(a.ndim and len(a) == part.samples for a in part.feeds.values())
        if self._fixed is not None or part.samples == 1 or not can_divide:
            return None
        return Part({name: a[:1] for name, a in part.feeds.items()}, None, 1)

    def _part(self, batch: Batch) -> Part:
        count = len(self._inputs)
        held = prepared(self._inputs, batch.values[:count])
        feeds = {v.name: h.numpy() for v, h in zip(self._inputs, held, strict=True)}
        labels = as_array(batch.values[count]) if self.has_labels else None
        return Part(feeds, labels, batch.samples)


def _repeatable(data: Any) -> Any:
    """Return data that can be gone through again; an iterator of batches becomes a list."""
    if isinstance(data, str | bytes) or data is None:
        raise ArgumentError(
            "data is a tuple or dictionary of arrays, with the labels last, or a list of batches, "
            f"not {type(data).__name__}"
        )
    if isinstance(data, tuple | Mapping | np.ndarray) or not isinstance(data, Iterable):
        return data
    return list(data)


def _labels_name(item: Any, names: Sequence[str]) -> str | None:
    """Return what labels are called, if there is one array more than the models have inputs."""
    if isinstance(item, Mapping):
        others = [str(name) for name in item if name not in names]
        return others[0] if len(others) == 1 else None
    is_several = isinstance(item, tuple) or (isinstance(item, list) and len(names) > 1)
    if not is_several or len(item) != len(names) + 1:
        return None
    return "labels" if "labels" not in names else "labels of the data"


def _spread(total: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.unique(np.linspace(0, total - 1, min(total, count)).astype(np.int64))
