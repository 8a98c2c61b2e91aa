"""What to keep for the backward pass, and what to compute again, so that a step fits into a budget.

The backward pass reads values of the forward pass, and all of them live until then. Those that are
not *kept* are computed again from the kept ones, right before they are read. Each choice is tried
out on the graph as numbers (`flow.py`): the order in which onnxruntime runs the nodes is known, and
so is what lives when.

The search is greedy. It looks at the moment when most bytes live, and at the values that live then
only because something later reads them. To drop one of them saves its bytes and costs the time to
compute it again; where several are cheap to compute from one that is not kept (all that a
normalization needs, from the output of the convolution before it), keeping that one instead is a
choice too. The choice that saves most bytes for the time comes first, and is taken if less is over
the budget then. So cheap layers go before costly ones, and costly ones only as far as needed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from onnxtrain.offline.graph.op_facts import COSTLY, ELEMENT_COST
from onnxtrain.offline.passes.remat.arena import resident_bytes
from onnxtrain.offline.passes.remat.blocks import Blocks
from onnxtrain.offline.passes.remat.copies import AGAIN, with_copies
from onnxtrain.offline.passes.remat.flow import Flow, Step, bytes_alive, execution_order
from onnxtrain.offline.passes.remat.layers import Layers

_SHARPNESS = 4
_PRODUCTS_PER_SECOND = 3e10  # of two numbers, added up: on two cores of these days
_NUMBERS_PER_SECOND = 1e9  # read or written
_MANY, _DEEP = 4000, 8  # nodes and blocks from which whole blocks are computed again
_TRIES = 250  # simulations; each takes some ten milliseconds
Shape = Sequence[int]


@dataclass(frozen=True)
class Plan:
    """The values of the forward pass that are kept beyond it, and what that comes to."""

    kept: frozenset[str]
    peak_bytes: int
    seconds: float = 0.0  # of computing again
    copies: int = 0  # nodes


@dataclass
class _Trial:
    kept: frozenset[str]
    over: float  # what is over the budget, over time; the peak counts for most of it
    peak: int
    waiting: set[str] = field(repr=False)  # lives at the peak, only to be read later
    again: set[str] = field(repr=False)  # was computed again, and lives at the peak


class _Move(NamedTuple):
    drop: frozenset[str]
    add: frozenset[str]
    gain: int
    worth: float  # the gain for the time


class Planner:
    """Searches what to keep for a graph of a training step."""

    def __init__(
        self, flow: Flow, layers: Layers, shapes: Mapping[str, Shape], sizes: Mapping[str, int]
    ) -> None:
        self._flow = flow
        self._layers = layers
        self._sizes = {**sizes, **{f"{name}{AGAIN}": size for name, size in sizes.items()}}
        self._seconds = [_seconds(step, shapes) for step in flow.steps]
        self.seconds = sum(self._seconds)  # of a step that computes nothing again
        self.tries = 0

    def search(self, budget: int, start: frozenset[str] | None = None) -> Plan:
        """Return a plan that fits, or the one that comes nearest to it.

        `start` is what a plan for a larger budget keeps; all that is read late by default.
        """
        self.tries = 0
        if len(self._flow.steps) > _MANY and len(self._blocks) >= _DEEP:
            return self._plan_blocks(budget)
        kept = frozenset(self._layers.read_late) if start is None else start
        now = self._drop_all(self._try(kept, budget), budget)
        while now.over > 0:
            better = self._keep_one(now, budget)
            if better is None:
                break
            now = better
        return self._plan(now)

    def _plan(self, now: _Trial) -> Plan:
        copied = self._layers.copied(now.kept)
        return Plan(now.kept, now.peak, self._time(copied), len(copied))

    def _time(self, places: Collection[int]) -> float:
        """Return how long nodes take, rounded alike in whatever order they come."""
        return math.fsum(self._seconds[i] for i in places)

    @cached_property
    def _blocks(self) -> Blocks:
        return Blocks(self._layers, self._sizes)

    def _plan_blocks(self, budget: int) -> Plan:
        """Keep as many blocks whole as fit, and of the others only where they begin."""
        now, fit, none_fits = self._try(self._blocks.kept(0), budget), 0, len(self._blocks) + 1
        while now.over == 0 and none_fits - fit > 1:
            middle = (fit + none_fits) // 2
            trial = self._try(self._blocks.kept(middle), budget)
            if trial.over > 0:
                none_fits = middle
            else:
                now, fit = trial, middle
        return self._plan(now)

    def _drop_all(self, now: _Trial, budget: int, held: str = "") -> _Trial:
        """Drop values as long as that helps."""
        while now.over > 0:
            moves = sorted(self._moves(now), key=lambda move: -move.worth)
            moves = [move for move in moves if held not in move.drop]
            better = self._drop_some(now, moves, budget) or self._drop_one(now, moves, budget)
            if better is None:
                break
            now = better
        return now

    def _drop_some(self, now: _Trial, moves: Sequence[_Move], budget: int) -> _Trial | None:
        """Take the best choices together, up to half of what is over the budget at the peak.

        Most of what is far over a budget goes in a few trials that way; the last of it is chosen
        value by value.
        """
        wanted, kept, taken = (now.peak - budget) / 2, now.kept, 0
        for move in moves:
            if move.gain > wanted:
                break
            if not (move.drop <= kept and move.add.isdisjoint(kept)):
                continue  # another choice has touched the same values
            kept, wanted, taken = (kept - move.drop) | move.add, wanted - move.gain, taken + 1
        if taken < 2:
            return None
        trial = self._try(kept, budget)
        return trial if trial.over < now.over else None

    def _drop_one(self, now: _Trial, moves: Sequence[_Move], budget: int) -> _Trial | None:
        """Take the first choice that helps, from the one that saves most for the time."""
        for move in moves:
            if self.tries < _TRIES:
                trial = self._try((now.kept - move.drop) | move.add, budget)
                if trial.over < now.over:
                    return trial
        return None

    def _keep_one(self, now: _Trial, budget: int) -> _Trial | None:
        """Keep a value after all, if what it is computed from takes more at the peak.

        It takes memory at other times then, so others are dropped in its place.
        """
        for name in sorted(now.again - now.kept, key=lambda name: (-self._sizes[name], name)):
            trial = self._drop_all(self._try(now.kept | {name}, budget), budget, held=name)
            if trial.over < now.over:
                return trial
        return None

    def resident(self, kept: frozenset[str]) -> int:
        """Return what a step takes from the system if these values are kept."""
        flow = with_copies(self._flow, self._layers, kept)
        return resident_bytes(flow, execution_order(flow.steps), self._sizes)

    def _try(self, kept: frozenset[str], budget: float) -> _Trial:
        self.tries += 1
        flow = with_copies(self._flow, self._layers, kept)
        order = execution_order(flow.steps)
        alive, life = bytes_alive(flow, order, self._sizes)
        when = max(range(len(alive)), key=alive.__getitem__)
        over = sum(((a - budget) / budget) ** _SHARPNESS for a in alive if a > budget)
        steps = [flow.steps[place] for place in order]
        again = {
            name.removesuffix(AGAIN)
            for name, (first, last) in life.items()
            if first <= when <= last and name.endswith(AGAIN)
        }
        waiting = self._waiting(kept, steps, life, when)
        return _Trial(kept, over, alive[when], waiting, again & self._layers.large)

    def _waiting(
        self,
        kept: Collection[str],
        steps: Sequence[Step],
        life: Mapping[str, tuple[int, int]],
        when: int,
    ) -> set[str]:
        """Return the kept values that the forward pass is done with, and nobody else has read."""
        layers = self._layers
        used: set[str] = set()
        for now, step in enumerate(steps):
            is_forward = step.makes[0] in layers.forward_names
            if (now >= when) == is_forward:
                used.update(layers.home.get(name, name) for name in step.reads)
        return {
            name
            for name in kept
            if name in layers.can_copy and name not in used
            and name in life and life[name][0] < when < life[name][1]
        }  # fmt: skip

    def _moves(self, now: _Trial) -> Iterator[_Move]:
        """Yield what could lower the number of bytes at the peak, in the order of the file."""
        copied, maker = self._layers.copied(now.kept), self._layers.maker
        for name in sorted(now.waiting, key=maker.__getitem__):
            yield self._move(now, frozenset({name}), frozenset(), copied)
        for name in sorted(self._layers.anchors - now.kept, key=maker.__getitem__):
            drop = frozenset(self._cheap_from(name, now))
            if drop:
                move = self._move(now, drop, frozenset({name}), copied)
                if move.gain > 0:
                    yield move

    def _move(
        self, now: _Trial, drop: frozenset[str], add: frozenset[str], copied: Collection[int]
    ) -> _Move:
        after = self._layers.copied((now.kept - drop) | add)
        cost = self._time(after) - self._time(copied)
        gain = sum(self._sizes[n] for n in drop) - sum(self._sizes[n] for n in add)
        return _Move(drop, add, gain, gain / (max(cost, 0.0) + 1e-6))

    def _cheap_from(self, anchor: str, now: _Trial) -> Iterator[str]:
        """Yield the waiting values that cheap nodes compute from an anchor and kept values."""
        layers = self._layers
        there = {anchor}
        for place in layers.cheap_after(anchor):
            step = layers.steps[place]
            if all(n in there or layers.is_there(n, now.kept) for n in step.reads):
                there.update(step.makes)
                yield from (n for n in step.makes if n in now.waiting)


def _seconds(step: Step, shapes: Mapping[str, Shape]) -> float:
    """Estimate how long a node takes on a small machine."""
    made = sum(math.prod(shapes.get(name, ())) for name in step.makes)
    read = sum(math.prod(shapes.get(name, ())) for name in step.reads)
    moved = (made + read) * ELEMENT_COST.get(step.op_type, 1) / _NUMBERS_PER_SECOND
    return 0.0 if step.is_view else moved + _products(step, shapes) / _PRODUCTS_PER_SECOND


def _products(step: Step, shapes: Mapping[str, Shape]) -> float:
    if step.op_type not in COSTLY:
        return 0.0
    made = math.prod(shapes.get(step.makes[0], ()))
    known = [shapes[name] for name in step.reads[:2] if name in shapes]
    if len(known) < 2 or not known[0] or not known[1]:
        return 100.0 * made
    first, second = known
    if step.op_type == "Conv":
        return float(made * math.prod(second[1:]))
    if step.op_type == "MatMul":
        return float(made * first[-1])
    if step.op_type == "Gemm":
        return float(made * math.prod(first) / max(1, shapes[step.makes[0]][0]))
    # Every number of the smaller one meets a row of the other: right for recurrent layers, and
    # an order of magnitude for the rest.
    return float(math.prod(first[:-1] or first) * math.prod(second))
