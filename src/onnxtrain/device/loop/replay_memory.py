"""The samples that a memory keeps, which ones those are, and its record in a checkpoint."""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxtrain.device.checks import count_bad
from onnxtrain.device.loop.batches import Array
from onnxtrain.errors import ArgumentError, CheckpointError
from onnxtrain.format.strict_json import entry, mapping, shortened, whole

if TYPE_CHECKING:
    from onnxtrain.device.loop.replay import Replay

KEY = "replay"  # of the checkpoint's private record
_FORMAT = 1
_NONE = np.zeros(0, np.int64)


class ReplayMemory:
    """Samples of several runs, at most as many as fit.

    `names` are the inputs that `columns` have a row of for each sample; `runs` says which run a
    sample is of, and `seen` how many samples of each class, or in all (-1), there have been.
    """

    def __init__(self) -> None:
        self.run = 0
        self.mixes = False  # whether earlier runs left samples when this one began
        self.labels: int | None = None  # which of the inputs has the labels
        self.names: list[str] = []
        self.columns: list[Array] = []
        self.count = 0  # of samples; the rows of arrays behind them are free
        self.runs: Array = _NONE
        self.classes: Array = _NONE
        self.seen: Counter[int] = Counter()
        self._counts: Counter[int] = Counter()  # of the samples that are kept
        self._full: set[int] = set()  # classes that have been the largest

    def begin_run(self) -> None:
        """Count what there is as old from now on."""
        self.run += 1
        self.mixes = self.count > 0

    def require_inputs(self, names: Sequence[str]) -> None:
        """Refuse samples that are not like those in the memory."""
        if self.names and self.names != list(names):
            raise ArgumentError(
                f"the memory for replay keeps {', '.join(self.names)}, and this run takes "
                f"{', '.join(names)}: use cache_features as the run before did, or forget the "
                "samples with Replay.clear(session)"
            )
        self.names = list(names)

    # ---- what is drawn -------------------------------------------------------------------------

    def old(self) -> Array:
        """Return the samples of earlier runs; should none be left, all."""
        found = np.flatnonzero(self.runs[: self.count] < self.run)
        return found if found.size else np.arange(self.count)

    def draw(self, count: int, words: Array) -> list[Array]:
        """Return the rows of old samples, all different where there are as many."""
        old = self.old()
        shuffled = old[np.argsort(words[: len(old)], kind="stable")]
        places = np.resize(shuffled, count)
        return [column[places] for column in self.columns]

    # ---- what is kept --------------------------------------------------------------------------

    def offer(self, values: Sequence[Array], words: Array, settings: Replay) -> None:
        """Keep some of the samples of a batch; `words` has two random numbers for each."""
        labels = self._labels_of(values, settings.keep)
        self._make_room(values, settings)
        bad = [bool(count_bad(value)) for value in values]
        for row in range(len(values[0])):
            if any(b and count_bad(v[row : row + 1]) for b, v in zip(bad, values, strict=True)):
                continue  # a sample that is not finite would spoil later runs
            place = self._place(int(labels[row]), words[row])
            if place is None:
                continue
            self.runs[place], self.classes[place] = self.run, labels[row]
            self._counts[int(labels[row])] += 1
            for column, value in zip(self.columns, values, strict=True):
                column[place] = value[row]

    def _labels_of(self, values: Sequence[Array], keep: str) -> Array:
        """Return the class of each sample; all are of the same where classes do not matter."""
        if keep != "reservoir":
            given = None if self.labels is None else values[self.labels]
            if given is not None and given.ndim == 1 and given.dtype.kind in "iu":
                return given
            if keep == "balanced":
                raise ArgumentError(
                    "Replay(keep='balanced') needs the number of a class for each sample: use "
                    "keep='reservoir'"
                )
        return np.full(len(values[0]), -1)

    def _make_room(self, values: Sequence[Array], settings: Replay) -> None:
        """Bring the memory to its size, where it is not."""
        if any(len(value) != len(values[0]) for value in values):
            raise ArgumentError("replay needs inputs that all have a row for each sample")
        capacity = settings.capacity(sum(value[:1].nbytes for value in values))
        shapes = [value.shape[1:] for value in values]
        if self.columns and [column.shape[1:] for column in self.columns] != shapes:
            raise ArgumentError(
                f"replay keeps samples of the shapes {[c.shape[1:] for c in self.columns]}, and "
                f"these have {shapes}: pad them to the same ones"
            )
        held = self.columns or [np.empty((0, *v.shape[1:]), v.dtype) for v in values]
        if len(held[0]) == capacity:
            return
        kept = self._kept(capacity)
        arrays = [self.runs, self.classes, *held]
        self.runs, self.classes, *self.columns = (_resized(a, kept, capacity) for a in arrays)
        self.count = len(kept)
        self._counts = Counter(self.classes[: self.count].tolist())

    def _kept(self, capacity: int) -> list[int]:
        """Return which samples stay in a memory of some size: as many of each class."""
        places: dict[int, list[int]] = {}
        for place, label in enumerate(self.classes[: self.count].tolist()):
            places.setdefault(label, []).append(place)
        for _ in range(capacity, self.count):
            max(places.values(), key=len).pop(0)
        return sorted(place for found in places.values() for place in found)

    def _place(self, label: int, words: Array) -> int | None:
        """Return where to keep a sample, or None.

        Each class has a share of its own. Within it, every sample that there has been is kept with
        the same probability (a reservoir); a class that needs room takes it from the largest one.
        """
        self.seen[label] += 1
        if self.count < len(self.runs):
            self.count += 1
            return self.count - 1
        counts = self._counts
        most = max(counts.values())
        self._full.update(c for c, count in counts.items() if count == most)
        if label not in self._full:
            largest = min(c for c, count in counts.items() if count == most)
            return self._freed(largest, int(words[0]))
        if int(words[0]) % self.seen[label] < counts[label]:
            return self._freed(label, int(words[1]))
        return None

    def _freed(self, label: int, word: int) -> int:
        """Return the place of some sample of a class, which is given up."""
        places = np.flatnonzero(self.classes[: self.count] == label)
        self._counts[label] -= 1
        return int(places[word % len(places)])

    # ---- in a checkpoint -----------------------------------------------------------------------

    def to_record(self) -> dict[str, Any]:
        """Return the memory as plain data."""
        count = self.count
        return {
            "format": _FORMAT,
            "run": self.run,
            "mixes": self.mixes,
            "names": self.names,
            "columns": [_packed(column[:count]) for column in self.columns],
            "runs": self.runs[:count].tolist(),
            "classes": self.classes[:count].tolist(),
            "seen": [list(pair) for pair in sorted(self.seen.items())],
            "full": sorted(self._full),
        }

    @classmethod
    def from_record(cls, record: Any) -> ReplayMemory:
        """Read the record of a checkpoint, which is not trusted."""
        try:
            return cls._read(mapping(record, "it"))
        except (ValueError, TypeError, OverflowError) as wrong:
            raise CheckpointError(
                f"the checkpoint's memory for replay cannot be read: {wrong}. Forget it with "
                "Replay.clear(session)"
            ) from None

    @classmethod
    def _read(cls, saved: dict[str, Any]) -> ReplayMemory:
        if entry(saved, "format") != _FORMAT:
            raise ValueError(f"it has the format {shortened(saved['format'])}, not {_FORMAT}")
        made = cls()
        made.run, made.mixes = whole(saved, "run"), bool(entry(saved, "mixes"))
        made.names = [str(name) for name in _list(saved, "names")]
        runs, classes = _integers(saved, "runs"), _integers(saved, "classes")
        made.count = count = len(runs)
        made.runs, made.classes = np.array(runs, np.int64), np.array(classes, np.int64)
        made._counts, made._full = Counter(classes), set(_integers(saved, "full"))
        for label, number in (_pair(item) for item in _list(saved, "seen")):
            made.seen[label] = number
        made.columns = [_unpacked(mapping(c, "a column"), count) for c in _list(saved, "columns")]
        are_all = len(made.columns) in ((len(made.names),) if count else (0, len(made.names)))
        if len(classes) != count or not are_all or any(made.seen[c] < 1 for c in classes):
            raise ValueError("its parts do not fit each other")
        return made


def _resized(array: Array, kept: Sequence[int], size: int) -> Array:
    made = np.zeros((size, *array.shape[1:]), array.dtype)
    made[: len(kept)] = array[list(kept)]
    return made


def _pair(item: Any) -> tuple[int, int]:
    if not isinstance(item, list) or [type(number) for number in item] != [int, int]:
        raise ValueError(f"'seen' has {shortened(item)}, not two whole numbers")
    return item[0], item[1]


def _list(record: dict[str, Any], name: str) -> list[Any]:
    value = entry(record, name)
    if not isinstance(value, list):
        raise ValueError(f"{name!r} is {shortened(value)}, not a list")
    return value


def _integers(record: dict[str, Any], name: str) -> list[int]:
    found = _list(record, name)
    if any(type(number) is not int for number in found):
        raise ValueError(f"{name!r} is {shortened(found)}, not whole numbers")
    return found


def _packed(array: Array) -> dict[str, Any]:
    stored = array.astype(array.dtype.newbyteorder("<"), copy=False)
    data = base64.b64encode(stored.tobytes()).decode("ascii")
    return {"type": stored.dtype.str, "shape": list(array.shape[1:]), "data": data}


def _unpacked(packed: dict[str, Any], count: int) -> Array:
    kind, text = entry(packed, "type"), entry(packed, "data")
    shape = _integers(packed, "shape")
    if not isinstance(kind, str) or not isinstance(text, str) or min(shape, default=0) < 0:
        raise ValueError(f"a column of type {shortened(kind)} and shape {shortened(shape)}")
    dtype = np.dtype(kind)
    data = base64.b64decode(text, validate=True)
    if dtype.kind not in "fiub" or len(data) != count * math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a column has {len(data)} bytes, and its shape is {shortened(shape)}")
    array = np.frombuffer(data, dtype).reshape(count, *shape)
    return array.astype(dtype.newbyteorder("="))
