"""Blocks of a deep network, and how many of them to compute again as a whole.

A network of many equal layers has places where one value carries all that goes on: the sum behind
each layer of a transformer. What lies between two of them is a block. To keep nothing of a block
but where it begins saves nearly all that the backward pass keeps of it, and costs its forward pass.
For thousands of nodes this is found in seconds, where a search value by value takes many minutes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from onnxtrain.offline.passes.remat.layers import Layers

_COMMON = 0.5  # what lives for this part of the forward pass belongs to no block: masks, angles


class Blocks:
    """The blocks of a forward pass, by the values in them that the backward pass reads."""

    def __init__(self, layers: Layers, sizes: Mapping[str, int]) -> None:
        order = sorted(layers.forward)
        at = {place: i for i, place in enumerate(order)}
        made: dict[str, int] = {}
        last: dict[str, int] = {}
        for place in order:
            step, now = layers.steps[place], at[place]
            for name in step.makes:
                if name in layers.large:
                    made[name] = now
            for name in step.reads:
                home = layers.home.get(name, name)
                if home in made:
                    last[home] = now
        span = _COMMON * len(order)
        self._common = {n for n in made if last.get(n, made[n]) - made[n] > span}
        inner = {n: first for n, first in made.items() if n not in self._common}
        self.boundaries = list(_alone(inner, last))
        self._inside = self._divided(layers, inner)
        self._sizes = sizes

    def _divided(self, layers: Layers, made: Mapping[str, int]) -> list[frozenset[str]]:
        """Return what the backward pass reads of each block."""
        starts = [made[name] for name in self.boundaries]
        parts: list[set[str]] = [set() for _ in range(len(starts) + 1)]
        bounds = set(self.boundaries)
        for name in layers.read_late:
            if name in made and name not in bounds:
                parts[sum(start < made[name] for start in starts)].add(name)
        return [frozenset(part) for part in parts]

    def __len__(self) -> int:
        """How many blocks keep something that could be computed again."""
        return sum(bool(part) for part in self._inside)

    def kept(self, whole: int) -> frozenset[str]:
        """Return what is kept if so many blocks are kept whole: the last ones, used up first."""
        parts = [part for part in self._inside if part]
        kept = parts[len(parts) - whole :] if whole else []
        return frozenset(self._common).union(self.boundaries, *kept)


def _alone(made: Mapping[str, int], last: Mapping[str, int]) -> Iterator[str]:
    """Yield each value behind which nothing else goes on."""
    begins: dict[int, list[str]] = {}
    ends: dict[int, list[str]] = {}
    for name, now in made.items():
        if name in last:
            begins.setdefault(now, []).append(name)
            ends.setdefault(last[name], []).append(name)
    alive: set[str] = set()
    for now in range(max(ends, default=-1) + 1):
        alive.difference_update(ends.get(now, ()))
        alive.update(begins.get(now, ()))
        if len(alive) == 1 and (name := next(iter(alive))) in begins.get(now, ()):
            yield name
