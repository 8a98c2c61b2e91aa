"""`fit(replay=...)`: samples of earlier runs are mixed into the batches of this one.

A model that learns new classes forgets old ones, unless it sees some of their samples again. The
memory keeps a few samples of every run, or their features where `cache_features` computes them. It
is a part of the checkpoint, so that a run that is resumed draws the same samples.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from onnxtrain.device.checks import at_least, choice, fraction
from onnxtrain.device.loop.batches import Array, Batch, Source, as_array
from onnxtrain.device.loop.replay_memory import KEY, ReplayMemory
from onnxtrain.errors import ArgumentError

if TYPE_CHECKING:
    from onnxtrain.device.session import TrainingSession

_DRAW, _KEEP = 1, 2  # streams of random numbers
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class Replay:
    """A memory of old samples: its size, how much of a batch it makes, and what it keeps.

    Args:
        size: how many samples it keeps; or how many bytes, such as "5MB".
        share: the part of each batch that is drawn from it, once there are samples of earlier runs.
        keep: "balanced" keeps as many samples of each class as it can; "reservoir" keeps each
            sample with the same probability; "auto" balances classes where labels are such.

    """

    size: int | str = 200
    share: float = 0.5
    keep: Literal["auto", "balanced", "reservoir"] = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.size, str):
            _bytes(self.size)
        else:
            at_least(1, "the size of Replay", self.size)
        if not 0 < fraction("the share of Replay", self.share) < 1:
            raise ArgumentError(f"the share of Replay must be between 0 and 1, not {self.share}")
        choice("keep of Replay", self.keep, ("auto", "balanced", "reservoir"))

    def capacity(self, sample_bytes: int) -> int:
        """Return how many samples of some size the memory keeps."""
        if not isinstance(self.size, str):
            return self.size
        count = _bytes(self.size) // max(1, sample_bytes)
        if count < 1:
            raise ArgumentError(f"a sample has {sample_bytes} bytes, and replay keeps {self.size}")
        return count

    def drawn(self, batch_size: int) -> int:
        """Return how many samples of a batch are old."""
        if batch_size < 2:
            raise ArgumentError("replay mixes old samples into batches: pass batch_size=2 or more")
        return min(batch_size - 1, max(1, round(batch_size * self.share)))

    @staticmethod
    def clear(session: TrainingSession) -> None:
        """Forget all samples that a session, and its next checkpoint, keep."""
        session.module.training_state.private.pop(KEY, None)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?(KB|MB|GB)", text.strip(), re.IGNORECASE)
    if found is None:
        raise ArgumentError(f"replay takes a number of samples, or a size like '5MB', not {text!r}")
    return int(float(found[1]) * _UNITS[found[2].upper()])


class RunReplay:
    """The memory in a run: what is drawn from it, and what goes into it."""

    def __init__(
        self, settings: Replay, session: TrainingSession, labels: str, seed: int, resumed: bool
    ) -> None:
        self.settings = settings
        self._private = session.module.training_state.private
        self._labels, self._seed = labels, seed
        record = self._private.get(KEY)
        self._memory = ReplayMemory() if record is None else ReplayMemory.from_record(record)
        if not resumed:
            self._memory.begin_run()
        self.mixes = self._memory.mixes
        self._parts = (0, 0)  # new and old samples of a whole batch of arrays
        self._pending: tuple[int, Sequence[Array]] | None = None

    @classmethod
    def of(
        cls, given: Any, session: TrainingSession, labels: str, seed: int, resumed: bool
    ) -> RunReplay | None:
        """Return the memory that was asked for, if one was."""
        if given is None or given is False:
            return None
        is_size = isinstance(given, int | str) and not isinstance(given, bool)
        if not (is_size or isinstance(given, Replay)):
            raise ArgumentError(
                "replay is a number of samples, a size like '5MB' or a Replay(...), not "
                f"{type(given).__name__}"
            )
        settings = Replay(given) if isinstance(given, int | str) else given
        return cls(settings, session, labels, seed, resumed)

    def new_in_batch(self, batch_size: int) -> int:
        """Return how many samples of a batch are new."""
        old = self.settings.drawn(batch_size) if self.mixes else 0
        self._parts = (batch_size - old, old)
        return batch_size - old

    def saved_settings(self) -> dict[str, Any]:
        """What a resumed run has to have in common."""
        return asdict(self.settings)

    def mixed(self, source: Source, names: Sequence[str]) -> ReplaySource:
        """Return the batches of a source with old samples in them."""
        if self._labels in names:
            self._memory.labels = list(names).index(self._labels)
        self._memory.require_inputs(names)
        return ReplaySource(source, self)

    def with_old(self, batch: Batch, epoch: int, index: int) -> Batch:
        """Add old samples to a batch."""
        if not self.mixes:
            return batch
        new, count = self._parts
        if batch.samples != new:  # the last one, or one of an iterable
            share = self.settings.share
            count = max(1, round(batch.samples * share / (1 - share)))
        words = _words(self._seed, _DRAW, epoch, index, max(count, len(self._memory.old())))
        old = self._memory.draw(count, words)
        values = [
            np.concatenate([_rows(value), rows.astype(_rows(value).dtype, copy=False)])
            for value, rows in zip(batch.values, old, strict=True)
        ]
        return Batch(values, batch.samples + count)

    # ---- what goes into the memory -------------------------------------------------------------

    def note(self, index: int, batch: Batch) -> None:
        """Keep a batch in mind, which goes into the memory once it has been trained with."""
        self._pending = (index, [_rows(value) for value in batch.values])

    def take_in(self) -> None:
        """Put the batch into the memory."""
        if self._pending is None:
            return
        index, values = self._pending
        self._pending = None
        count = len(values[0])
        words = _words(self._seed, _KEEP, self._memory.run, index, 2 * count)
        self._memory.offer(values, words.reshape(count, 2), self.settings)

    def record(self, epoch: int, batch: int) -> None:
        """Put the memory into the checkpoint, as it is after some epochs and batches."""
        if self._pending is not None and (epoch, batch) > (0, self._pending[0]):
            self.take_in()
        self._private[KEY] = self._memory.to_record()


class ReplaySource(Source):
    """The batches of another source, with old samples mixed in."""

    def __init__(self, source: Source, replay: RunReplay) -> None:
        self._source, self._replay = source, replay
        self.batches = source.batches
        self.notes = source.notes

    @property
    def order(self) -> dict[str, Any]:
        """The settings that determine the order of batches."""
        return self._source.order

    def epoch(self, number: int, skip: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch; those of the first one go into the memory."""
        for index, batch in enumerate(self._source.epoch(number, skip), skip):
            mixed = self._replay.with_old(batch, number, index)
            if number == 0:
                self._replay.note(index, batch)
            yield mixed
            self._replay.take_in()


def _rows(value: Any) -> Array:
    array = as_array(value)
    if array.dtype.kind not in "fiub" or not array.ndim:
        raise ArgumentError(
            f"replay keeps arrays of numbers with a row for each sample, not {array.dtype.name} of "
            f"the shape {list(array.shape)}"
        )
    return array


def _words(seed: int, stream: int, first: int, second: int, count: int) -> Array:
    """Return random words of a generator whose stream numpy promises never to change."""
    generator = np.random.PCG64(np.random.SeedSequence([seed, stream, first, second]))
    return np.asarray(generator.random_raw(count))
