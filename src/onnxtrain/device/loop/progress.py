"""How training is shown while it runs: a line that updates on a terminal, quiet lines elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Any, Literal, TextIO

from onnxtrain.device.loop.history import EpochRecord
from onnxtrain.errors import ArgumentError, printable

# Between two drawings of the bar: often enough to look alive, too rarely to slow training down.
_PAUSE = 0.1


class ProgressDisplay:
    """Shows nothing; the others tell the same events."""

    def begin_epoch(self, epoch: int, epochs: int, steps: int | None, done: int = 0) -> None:
        """An epoch begins: its number, from 1, and that of its steps, if it is known."""

    def step(self, done: int, loss: float) -> None:
        """So many steps of the epoch are done; their mean loss so far."""

    def evaluating(self) -> None:
        """Training of the epoch is over, evaluation has begun."""

    def end_epoch(self, record: EpochRecord, epochs: int) -> None:
        """The epoch is over."""

    def say(self, text: str) -> None:
        """Something that a person who waits wants to know."""

    def close(self) -> None:
        """The run is over, in one way or another."""


class Lines(ProgressDisplay):
    """Writes a line for each epoch."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    def _write(self, text: str) -> None:
        # Looked up each time, since programs replace it. None: a program without a console.
        stream = self._stream if self._stream is not None else sys.stderr
        try:
            stream.write(text)
            stream.flush()
        except (AttributeError, OSError, ValueError):
            # Closed, or gone: training does not depend on being watched.
            pass

    def end_epoch(self, record: EpochRecord, epochs: int) -> None:
        """Write the line of an epoch."""
        self.say(describe(record, epochs))

    def say(self, text: str) -> None:
        """Write a line."""
        self._write(printable(text) + "\n")


class Bar(Lines):
    """Updates one line during an epoch: bar, steps, loss, rate and the time that is left."""

    def __init__(self, stream: TextIO | None = None, width: int | None = None) -> None:
        super().__init__(stream)
        self._width = width
        self._drawn = 0
        self._title = ""
        self._total: int | None = None
        self._first = 0
        self._began = self._last = 0.0

    def begin_epoch(self, epoch: int, epochs: int, steps: int | None, done: int = 0) -> None:
        """Begin a bar; `done` steps of the epoch were done before, in a run that was resumed."""
        self._title = f"epoch {epoch}/{epochs}"
        self._total = steps
        self._first = done
        self._began = time.monotonic()
        self._last = 0.0

    def step(self, done: int, loss: float) -> None:
        """Draw the bar, unless it was just drawn."""
        now = time.monotonic()
        if now - self._last < _PAUSE and done != self._total:
            return
        self._last = now
        speed = (done - self._first) / max(now - self._began, 1e-9)
        self._draw(bar_line(self._title, done, self._total, loss, speed, self._columns()))

    def _columns(self) -> int:
        # Some terminals go to the next line when the last column is written.
        return (self._width or shutil.get_terminal_size().columns) - 1

    def _draw(self, line: str) -> None:
        self._write("\r" + line.ljust(self._drawn))
        self._drawn = len(line)

    def evaluating(self) -> None:
        """Say that evaluation has begun."""
        self._draw(f"{self._title}  evaluating ..."[: self._columns()])

    def say(self, text: str) -> None:
        """Write a line in place of the bar."""
        if self._drawn:
            self._write("\r" + " " * self._drawn + "\r")
            self._drawn = 0
        super().say(text)

    def close(self) -> None:
        """Leave the last bar on its line, if an epoch was not finished."""
        if self._drawn:
            self._write("\n")
            self._drawn = 0


def bar_line(
    title: str, done: int, total: int | None, loss: float, speed: float, columns: int
) -> str:
    """Return the line of the bar, with as much as the columns have room for."""
    count = f"{done}/{total}" if total else f"{done}"
    parts = [f"loss {loss:.4g}", f"{speed:{'.0f' if speed >= 10 else '.2g'}} steps/s"]
    if total and speed > 0:
        parts.append(f"{duration((total - done) / speed)} left")
    # From the least important on, what does not fit is left out.
    while parts and len("  ".join([title, count, *parts])) > columns:
        parts.pop()
    text = "  ".join([title, count, *parts])
    room = columns - len(text) - 4
    if total and room >= 5:
        cells = min(room, 30)
        full = min(cells, cells * done // total)
        text = "  ".join([title, f"[{'=' * full}{' ' * (cells - full)}]", count, *parts])
    return text[:columns]


def duration(seconds: float) -> str:
    """Return a time as people read it: 8s, 3:05, 2:00:41."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02}"
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def describe(record: EpochRecord, epochs: int) -> str:
    """Return the line of an epoch that is over."""
    shown: dict[str, Any] = {"loss": record.loss, **record.values}
    numbers = [f"{name} {value:.4g}" for name, value in shown.items() if isinstance(value, float)]
    rate = f"lr {record.learning_rate:.3g}"
    return "  ".join([f"epoch {record.epoch}/{epochs}", *numbers, rate, duration(record.seconds)])


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


def make_progress(
    progress: bool | Literal["bar", "lines"] | ProgressDisplay | None, stream: TextIO | None = None
) -> ProgressDisplay:
    """Return how to show progress: a bar on a terminal and lines elsewhere, unless told so."""
    if isinstance(progress, ProgressDisplay):
        return progress
    if progress is False:
        return ProgressDisplay()
    if progress is None or progress is True:
        progress = "bar" if _is_terminal(stream if stream is not None else sys.stderr) else "lines"
    if progress not in ("bar", "lines"):
        raise ArgumentError(
            f"progress must be None, True, False, 'bar' or 'lines', not {progress!r}"
        )
    return Bar(stream) if progress == "bar" else Lines(stream)
