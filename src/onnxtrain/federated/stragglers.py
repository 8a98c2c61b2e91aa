"""Nodes that do not answer: how long to wait for them, and when to ask them again."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

from flwr.serverapp import Grid

_PAUSE = 0.2  # seconds between looks at what has arrived


class Silence:
    """Who was asked in vain.

    A device that was switched off is taken to be there until its heartbeats are missed; a round
    that asks it waits in vain. So it is left alone for one round, then for two, and so on.
    """

    def __init__(self) -> None:
        self._missed: dict[int, int] = {}  # how many times in a row
        self._rest: dict[int, int] = {}  # for how many rounds to leave it alone

    def note(self, asked: set[int], answered: set[int], *, round_ends: bool = True) -> list[int]:
        """Take account of those who were asked; return who was asked in vain."""
        if round_ends:
            self._rest = {node: left - 1 for node, left in self._rest.items() if left > 1}
        for node in answered:
            self._missed.pop(node, None)
        missing = sorted(asked - answered)
        for node in missing:
            self._missed[node] = self._missed.get(node, 0) + 1
            self._rest[node] = self._missed[node]
        return missing

    def without(self, grid: Grid, least: int) -> Grid:
        """Return the grid without the silent nodes, if enough others are there."""
        if not self._rest:
            return grid
        others = [node for node in grid.get_node_ids() if node not in self._rest]
        return Part(grid, self._rest) if len(others) >= least else grid


class Through(Grid):
    """A grid that does what another one does."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    @property
    def inner(self) -> Grid:
        """The other one."""
        return self._grid

    def get_node_ids(self) -> Iterable[int]:
        """Return the numbers of the nodes."""
        return list(self._grid.get_node_ids())

    def set_run(self, run: Any) -> None:
        """Set the run."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """The run."""
        return self._grid.run

    def create_message(self, *given: Any, **named: Any) -> Any:
        """Make a message."""
        return self._grid.create_message(*given, **named)

    def push_messages(self, messages: Iterable[Any]) -> Any:
        """Send messages."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Any:
        """Take the replies that are there."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Any], *, timeout: float | None = None) -> Any:
        """Send messages and wait for the replies."""
        return self._grid.send_and_receive(messages, timeout=timeout)


class Part(Through):
    """A grid without some of its nodes."""

    def __init__(self, grid: Grid, without: Mapping[int, int]) -> None:
        super().__init__(grid)
        self._without = dict(without)

    def get_node_ids(self) -> Iterable[int]:
        """Return the numbers of the nodes that are left."""
        return [node for node in self._grid.get_node_ids() if node not in self._without]


class Patient(Through):
    """A grid that does not wait for the last reply for ever.

    Once `least` clients have answered, it waits at most `patience` times as long as the slowest of
    them took: whoever has not answered by then has died, or is far slower than all others.
    """

    def __init__(self, grid: Grid, patience: float, least: int, seconds: float = 5.0) -> None:
        super().__init__(grid)
        self._patience, self._least = patience, least
        self._seconds = seconds  # a round that takes less may wait so long

    def send_and_receive(self, messages: Iterable[Any], *, timeout: float | None = None) -> Any:
        """Send messages and wait for the replies, as long as it makes sense."""
        began = time.monotonic()
        waiting = set(self._grid.push_messages(messages))
        replies: list[Any] = []
        end = math.inf if timeout is None else began + timeout
        while waiting and time.monotonic() < end:
            found = list(self._grid.pull_messages(waiting))
            replies += found
            waiting -= {reply.metadata.reply_to_message_id for reply in found}
            now = time.monotonic()
            answers = sum(not reply.has_error() for reply in replies)
            if found and answers >= self._least:
                enough = max(self._patience * (now - began), self._seconds)
                end = min(began + enough, math.inf if timeout is None else began + timeout)
            if waiting and not found:
                time.sleep(_PAUSE)
        return replies
