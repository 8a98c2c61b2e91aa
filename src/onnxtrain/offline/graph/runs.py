"""Lists cut into runs of a limited size: what is computed, or kept, together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def in_runs(
    items: Iterable[Item], size_of: Callable[[Item], int], largest: int, most: int | None = None
) -> Iterator[list[Item]]:
    """Cut a list where the items together would be larger, or more; one alone may be larger."""
    run, total = list[Item](), 0
    for item in items:
        size = size_of(item)
        if run and (len(run) == most or total + size > largest):
            yield run
            run, total = [], 0
        run.append(item)
        total += size
    if run:
        yield run
