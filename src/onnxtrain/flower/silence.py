"""Nodes that do not answer: they are passed over for a while, as long as others are there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flwr.serverapp import Grid


class Silence:
    """Who was asked in vain.

    A device that was switched off is taken to be there until its heartbeats are missed; a round
    that asks it waits in vain. So it is left alone for one round, then for two, and so on.
    """

    def __init__(self) -> None:
        self._missed: dict[int, int] = {}  # how many times in a row
        self._rest: dict[int, int] = {}  # for how many rounds to leave it alone

    def note(self, asked: set[int], answered: set[int]) -> list[int]:
        """Take account of a round; return who was asked in vain."""
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


class Part(Grid):
    """A grid without some of its nodes."""

    def __init__(self, grid: Grid, without: Mapping[int, int]) -> None:
        self._grid, self._without = grid, dict(without)

    def get_node_ids(self) -> Iterable[int]:
        """Return the numbers of the nodes that are left."""
        return [node for node in self._grid.get_node_ids() if node not in self._without]

    def set_run(self, run: Any) -> None:
        """As the whole grid does."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """As the whole grid has it."""
        return self._grid.run

    def create_message(self, *given: Any, **named: Any) -> Any:
        """As the whole grid does."""
        return self._grid.create_message(*given, **named)

    def push_messages(self, messages: Iterable[Any]) -> Any:
        """As the whole grid does."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Any:
        """As the whole grid does."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Any], *, timeout: float | None = None) -> Any:
        """As the whole grid does."""
        return self._grid.send_and_receive(messages, timeout=timeout)
