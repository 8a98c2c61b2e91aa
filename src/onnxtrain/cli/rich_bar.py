"""The progress of training on a terminal, drawn by rich where it is installed."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from onnxtrain.device.loop.history import EpochRecord
from onnxtrain.device.loop.progress import ProgressDisplay, describe
from onnxtrain.errors import printable


class RichBar(ProgressDisplay):
    """A bar for the epoch that is being trained, above it a line for each that is over."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bar: Progress | None = None

    def begin_epoch(self, epoch: int, epochs: int, steps: int | None, done: int = 0) -> None:
        """Begin a bar."""
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task(
            f"epoch {epoch}/{epochs}", total=steps, completed=done, loss=""
        )
        self._bar.start()

    def step(self, done: int, loss: float) -> None:
        """Move the bar; rich draws it some times a second."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, loss=f"loss {loss:.4g}")

    def evaluating(self) -> None:
        """Say that evaluation has begun."""
        if self._bar is not None:
            self._bar.update(self._task, loss="evaluating")

    def end_epoch(self, record: EpochRecord, epochs: int) -> None:
        """Replace the bar by the line of the epoch."""
        self.say(describe(record, epochs))

    def say(self, text: str) -> None:
        """Write a line in place of the bar."""
        self.close()
        self._console.print(printable(text), markup=False, soft_wrap=True)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
