"""How far apart the processor's cores are, which on a virtual machine changes while it runs.

The host moves the cores that it lends. When the two of a guest lie behind different last-level
caches, a line of memory takes five times as long from one to the other, and two threads that work
on the same tensors may be no faster than one, while a peer whose threads keep to their own parts
hardly notices. Nothing inside the guest tells of it (no steal, no switches), so it is measured:
two pinned processes hand a block of memory to and fro.
"""

from __future__ import annotations

import mmap
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

# A block of memory that fits into the caches, and how often it goes to and fro for one figure.
_FLOATS, _TURNS = 1 << 16, 150
# Apart: this many times the shortest time that was ever seen. Between neighbours the time varies
# by a third, between caches it is two and a half times as long.
_APART = 1.7


def handover_us() -> float | None:
    """The time in which a block goes from core to core and back; None where it cannot be told."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        return None
    shared = mmap.mmap(-1, mmap.PAGESIZE + 4 * _FLOATS)
    counter = memoryview(shared)[:8].cast("q")
    block = np.frombuffer(shared, np.float32, offset=mmap.PAGESIZE)
    child = os.fork()
    if child == 0:
        _answer(counter, block, allowed[1])
    try:
        os.sched_setaffinity(0, {allowed[0]})
        return statistics.median(_ask(counter, block))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.sched_setaffinity(0, set(allowed))


def _answer(counter: memoryview, block: np.ndarray, core: int) -> None:
    os.sched_setaffinity(0, {core})
    awaited = 1
    while True:
        while counter[0] != awaited:
            pass
        block += 1.0
        counter[0] = awaited + 1
        awaited += 2


def _ask(counter: memoryview, block: np.ndarray) -> Iterator[float]:
    began = time.perf_counter_ns()
    for given in range(1, 2 * _TURNS, 2):
        counter[0] = given
        while counter[0] == given:
            pass
        block += 1.0
        now = time.perf_counter_ns()
        yield (now - began) / 1e3
        began = now


class Cores:
    """Knows whether the cores are near each other, and waits for it, for so long in all."""

    def __init__(self, patience: float, measure: Callable[[], float | None] = handover_us) -> None:
        self.patience = patience
        self.nearest: float | None = None
        self.farthest: float | None = None
        self.waited = 0.0
        self.apart_bursts = 0
        self._measure = measure

    def near(self) -> bool:
        """Measure once; true as well where it cannot be told."""
        found = self._measure()
        if found is None:
            return True
        self.nearest = min(found, self.nearest or found)
        self.farthest = max(found, self.farthest or found)
        return found < _APART * self.nearest

    def wait(self) -> None:
        """Return when they are near, or when all patience is gone."""
        while not self.near() and self.waited < self.patience:
            time.sleep(0.5)
            self.waited += 0.5

    def burst(self, take: Callable[[], T]) -> T:
        """Let a burst of steps be taken, and taken again if the cores parted on the way."""
        while True:
            self.wait()
            began = time.monotonic()
            taken = take()
            if self.near():
                return taken
            self.waited += time.monotonic() - began
            if self.waited >= self.patience:
                self.apart_bursts += 1
                return taken

    def summary(self) -> dict[str, Any]:
        """What there is to say about it in a report; nothing where it cannot be told."""
        if self.nearest is None or self.farthest is None:
            return {}
        return {
            "nearest_us": round(self.nearest, 1),
            "farthest_us": round(self.farthest, 1),
            "waited_s": round(self.waited),
            "bursts_apart": self.apart_bursts,
        }
