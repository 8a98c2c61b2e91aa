"""Ctrl-C while a command still gets ready: it ends at once.

Packages are imported that lose the exception which Python makes of Ctrl-C, for it may come up where
only C code could pass it on; and nothing has been begun that would have to be put in order.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

INTERRUPTED = 130


@contextlib.contextmanager
def ends_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process here, unless someone else takes care of it."""
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_ours or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)
