"""Stragglers: how long a round waits for clients, and when it asks silent ones again."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

from flwr.serverapp import Grid

_POLL_SECONDS = 0.2


class Stragglers:
    """Nodes that did not answer, which are skipped for a while.

    Flower lists a device that was switched off until its heartbeats are missed, and a round that
    includes it waits in vain. So a silent node is skipped for one round, then for two, and so on.
    """

    def __init__(self) -> None:
        self._missed: dict[int, int] = {}  # consecutive rounds without an answer
        self._skip: dict[int, int] = {}  # rounds for which a node is still skipped

    def record(self, asked: set[int], answered: set[int], *, round_ends: bool = True) -> list[int]:
        """Record who answered; return the nodes that did not."""
        if round_ends:
            self._skip = {node: left - 1 for node, left in self._skip.items() if left > 1}
        for node in answered:
            self._missed.pop(node, None)
        missing = sorted(asked - answered)
        for node in missing:
            self._missed[node] = self._missed.get(node, 0) + 1
            self._skip[node] = self._missed[node]
        return missing

    def exclude_from(self, grid: Grid, least: int) -> Grid:
        """Return the grid without the skipped nodes, if at least `least` others are left."""
        if not self._skip:
            return grid
        others = [node for node in grid.get_node_ids() if node not in self._skip]
        return ExcludingGrid(grid, self._skip) if len(others) >= least else grid


@Grid.register
class GridProxy:
    """A grid that forwards what it does not define to another one, `inner`."""

    def __init__(self, grid: Grid) -> None:
        self.inner = grid

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class ExcludingGrid(GridProxy):
    """A grid without some of its nodes."""

    def __init__(self, grid: Grid, excluded: Mapping[int, int]) -> None:
        super().__init__(grid)
        self._excluded = frozenset(excluded)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the remaining nodes."""
        return [node for node in self.inner.get_node_ids() if node not in self._excluded]


class DeadlineGrid(GridProxy):
    """A grid that stops waiting for stragglers.

    Once `least` clients have answered, it waits at most `patience` times as long as the slowest of
    them took, and never less than `seconds`.
    """

    def __init__(self, grid: Grid, patience: float, least: int, seconds: float = 5.0) -> None:
        super().__init__(grid)
        self._patience, self._least, self._seconds = patience, least, seconds

    def send_and_receive(self, messages: Iterable[Any], *, timeout: float | None = None) -> Any:
        """Send messages and wait for the replies until the deadline."""
        began = time.monotonic()
        waiting = set(self.inner.push_messages(messages))
        replies: list[Any] = []
        last = math.inf if timeout is None else began + timeout
        deadline = last
        while waiting and time.monotonic() < deadline:
            found = list(self.inner.pull_messages(waiting))
            replies += found
            waiting -= {reply.metadata.reply_to_message_id for reply in found}
            answers = sum(not reply.has_error() for reply in replies)
            if found and answers >= self._least:
                elapsed = time.monotonic() - began
                deadline = min(began + max(self._patience * elapsed, self._seconds), last)
            if waiting and not found:
                time.sleep(_POLL_SECONDS)
        return replies
