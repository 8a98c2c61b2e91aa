"""Chooses channels by their gain for each byte, within a budget of bytes.

A channel needs bytes for its rows: their gradient and the states of the optimizer. A layer needs
its input in the backward pass, whatever the number of its channels. And a gradient that goes back
to a layer reads activations on its way. So each layer is tried as the first one that trains: the
way to it is paid for, and the rest of the budget goes to the layers from there on, where it gains
most.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onnxtrain.offline.passes.sparse.layers import Array


@dataclass(frozen=True)
class Cost:
    """The bytes that a layer needs."""

    channel: int  # for each channel that trains
    layer: int  # for any channel
    way: int  # for a gradient that comes to the layer


@dataclass(frozen=True)
class Choice:
    """The channels that train, and what they take and gain."""

    channels: Mapping[str, Array]  # by the name of the weight, in ascending order
    taken: int  # bytes
    gain: float


def choose_channels(
    gains: Mapping[str, Array], costs: Mapping[str, Cost], budget: int
) -> Choice | None:
    """Return the choice that gains most; None where the budget is too small for any channel.

    Layers come in the order of the model.
    """
    names = list(gains)
    best: Choice | None = None
    for first, name in enumerate(names):
        way = costs[name].way
        if way < budget:
            found = _fill(names[first:], gains, costs, budget - way)
            # Where the layer itself is not taken, a later one has a shorter way.
            if name in found.channels and (best is None or found.gain >= best.gain):
                best = Choice(found.channels, found.taken + way, found.gain)
    return best


def _fill(
    names: Sequence[str], gains: Mapping[str, Array], costs: Mapping[str, Cost], budget: int
) -> Choice:
    """Take the channels with the most gain for each byte, one group after the other."""
    names = [name for name in names if gains[name].max() > 0]
    order = {n: np.argsort(-gains[n], kind="stable")[: np.count_nonzero(gains[n])] for n in names}
    sums = {name: np.cumsum(gains[name][order[name]]) for name in names}
    taken, spent, gained = dict.fromkeys(names, 0), 0, 0.0
    heap = [(-density, name, count) for name in names
            for density, count in [_best_start(sums[name], costs[name])]]  # fmt: skip
    heapq.heapify(heap)
    while heap:
        _, name, count = heapq.heappop(heap)
        cost, before = costs[name], taken[name]
        price = (count - before) * cost.channel + (0 if before else cost.layer)
        if spent + price > budget:
            left = budget - spent - (0 if before else cost.layer)
            count = before + max(left // cost.channel, 0)
            if count <= before:
                continue
            price = (count - before) * cost.channel + (0 if before else cost.layer)
        total = sums[name]
        gained += float(total[count - 1] - (total[before - 1] if before else 0.0))
        spent, taken[name] = spent + price, count
        if count < len(total):
            step = min(max(len(total) // 32, 1), len(total) - count)
            more = float(total[count + step - 1] - total[count - 1]) / (step * cost.channel)
            heapq.heappush(heap, (-more, name, count + step))
    chosen = {name: np.sort(order[name][:count]) for name, count in taken.items() if count}
    return Choice(chosen, spent, gained)


def _best_start(sums: Array, cost: Cost) -> tuple[float, int]:
    """Return with how many channels a layer begins best, and the gain for each byte then."""
    counts = np.arange(1, len(sums) + 1)
    densities = sums / (cost.layer + counts * cost.channel)
    best = int(np.argmax(densities))
    return float(densities[best]), best + 1
