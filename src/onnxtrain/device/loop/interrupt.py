"""Ctrl-C, taken at a moment at which the state of the training is whole."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """Lets Ctrl-C end a run between two steps and not in the middle of one.

    While `busy`, the signal is only noted (`asked`). Otherwise, and if it comes a second time, it
    is a KeyboardInterrupt as ever. Outside the main thread, and in programs that have a handler of
    their own, nothing is changed.
    """

    def __init__(self) -> None:
        self.busy = False
        self.asked = False
        self._before: Any = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.busy or self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def end(self) -> None:
        """The state is whole again: let an interrupt that was asked for happen."""
        self.busy = False
        if self.asked:
            raise KeyboardInterrupt

    def __enter__(self) -> Interrupts:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            try:
                self._before = signal.signal(signal.SIGINT, self._on_signal)
            except ValueError:
                # Not the main thread: signals do not arrive here.
                self._before = None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None
