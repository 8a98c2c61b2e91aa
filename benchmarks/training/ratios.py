"""Ratios within one run: ours to the others, quantity by quantity, and why some are above one.

Works on the plain data of a run (what is in the JSON file), so that pages can be written again
without measuring.
"""

from __future__ import annotations

import math
import statistics
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import plan

OURS, EAGER, COMPILED, UPSTREAM = (
    peer.name for peer in (plan.OURS, plan.EAGER, plan.COMPILED, plan.UPSTREAM)
)
PLAIN, MODULE = plan.PLAIN.name, plan.MODULE.name
OWN = (OURS, PLAIN, MODULE)
TORCH = (EAGER, COMPILED)
REASONS = Path(__file__).parent / "reasons.toml"
STEP, MEMORY, START, ARTIFACTS = "step time", "peak memory", "start to first step", "artifacts"
STEP_GROWTH, MEMORY_GROWTH = "growth of step time", "growth of memory"

Data = Mapping[str, Any]


@dataclass(frozen=True)
class Ratio:
    """Ours divided by a peer's; `value` is None where a figure is missing.

    `comparable` is false if it is the peer's.
    """

    quantity: str
    row: str
    value: float | None
    against: str = ""
    reason: str = ""
    comparable: bool = True

    @property
    def above_one(self) -> bool:
        """Whether ours is more, as far as two decimals show."""
        return self.value is not None and round(self.value, 2) > 1


def compare(run: Data, reasons: Mapping[str, Mapping[str, str]] | None = None) -> list[Ratio]:
    """Return all ratios of a run, with the reasons for those where ours is more."""
    explained = read_reasons() if reasons is None else reasons
    return [
        replace(r, reason=r.reason or explained.get(r.quantity, {}).get(r.row, ""))
        if r.above_one
        else r
        for r in _all(run)
    ]


def read_reasons(path: Path = REASONS) -> dict[str, dict[str, str]]:
    """Read the known reasons: a table for each quantity, a line for each row."""
    return tomllib.loads(path.read_text()) if path.exists() else {}


def _all(run: Data) -> Iterator[Ratio]:
    rows = run["rows"]
    steps = [_against(STEP, row, step_ms, row_peers(row)) for row in rows]
    yield from steps
    yield _mean(steps)
    for row in rows:
        yield _against(MEMORY, row, _peak, TORCH)
    for row in rows:
        yield _against(START, row, start_s, TORCH)
    for row in rows:
        yield _against(ARTIFACTS, row, _smallest, [UPSTREAM])
    for curve in run.get("curves", ()):
        for key, quantity in (("step_ms", STEP_GROWTH), ("peak", MEMORY_GROWTH)):
            yield _steepness(curve, key, quantity)


def row_peers(row: Data) -> list[str]:
    """The peers of a row that are not ours."""
    return [r["peer"] for r in row["results"] if r["peer"] not in OWN]


def step_ms(result: Data) -> float | None:
    """The median of the repeats, if the peer ran."""
    return statistics.median(result["step_ms"]) if result["step_ms"] else None


def start_s(result: Data) -> float | None:
    """The median of the starts, if the peer ran."""
    return statistics.median(result["start_s"]) if result["start_s"] else None


def best(
    row: Data, value: Callable[[Data], float | None], peers: Iterable[str]
) -> tuple[float, str] | None:
    """Return the least value of some peers of a row, and whose it is."""
    by_peer = {r["peer"]: value(r) for r in row["results"]}
    found = [(v, peer) for peer in peers if (v := by_peer.get(peer)) is not None]
    return min(found) if found else None


def _peak(result: Data) -> float | None:
    return result["peak"] or None


def _smallest(result: Data) -> float | None:
    return result.get("smallest_artifacts") or result["artifacts"] or None


def _against(
    quantity: str,
    row: Data,
    value: Callable[[Data], float | None],
    peers: Iterable[str],
) -> Ratio:
    """Compare ours with the best of some peers."""
    ours, other = best(row, value, [OURS]), best(row, value, peers)
    if ours is None:
        return Ratio(quantity, row["name"], None, reason="our figure is missing")
    if other is None:
        return Ratio(quantity, row["name"], None, comparable=False)
    return Ratio(quantity, row["name"], ours[0] / other[0], other[1])


def _mean(steps: Sequence[Ratio]) -> Ratio:
    """The geometric mean of the rows that a peer runs; without a figure of ours there is none."""
    compared = [r.value for r in steps if r.comparable]
    found = [value for value in compared if value is not None]
    whole = bool(found) and len(found) == len(compared)
    mean = math.exp(statistics.fmean(map(math.log, found))) if whole else None
    reason = "" if whole else "our figure is missing in a row"
    return Ratio("step time, geometric mean", "all rows", mean, "best of each row", reason)


def slope(points: Sequence[Data], peer: str, quantity: str) -> float | None:
    """How much a quantity grows per unit, from the first to the last point."""
    ends = [points[0], points[-1]]
    values = [point["peers"].get(peer, {}).get(quantity) for point in ends]
    if None in values:
        return None
    return (values[1] - values[0]) / (ends[1]["n"] - ends[0]["n"])


def _steepness(curve: Data, key: str, quantity: str) -> Ratio:
    ours, theirs = (slope(curve["points"], peer, key) for peer in (OURS, EAGER))
    if ours is None:
        return Ratio(quantity, curve["name"], None, reason="one of our points is missing")
    if theirs is None or theirs <= 0:
        return Ratio(quantity, curve["name"], None, comparable=False)
    return Ratio(quantity, curve["name"], ours / theirs, EAGER)
