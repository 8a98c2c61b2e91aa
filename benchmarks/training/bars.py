"""The bars: what is to be reached, as ratios within one run, and why some are not.

Works on the plain data of a run (what is in the JSON file), so that a report can be made anew.
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
TORCH = (EAGER, COMPILED)
REASONS = Path(__file__).parent / "reasons.toml"

Data = Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """Whether a bar is reached; `ratio` is None where a figure is missing.

    If it is one of ours that is missing, the bar is not reached; without one of a peer there is
    nothing to compare with.
    """

    bar: str
    row: str
    limit: float
    ratio: float | None
    against: str = ""
    reason: str = ""
    comparable: bool = True

    @property
    def passed(self) -> bool:
        return self.ratio is not None and self.ratio <= self.limit

    @property
    def failed(self) -> bool:
        return self.comparable and not self.passed

    @property
    def outcome(self) -> str:
        """The word for it."""
        return "pass" if self.passed else "FAIL" if self.failed else "no comparison"


def judge(run: Data, reasons: Mapping[str, Mapping[str, str]] | None = None) -> list[Verdict]:
    """Compare a run with all bars."""
    explained = read_reasons() if reasons is None else reasons
    return [
        replace(v, reason=v.reason or explained.get(v.bar, {}).get(v.row, "")) if v.failed else v
        for v in _all(run)
    ]


def read_reasons(path: Path = REASONS) -> dict[str, dict[str, str]]:
    """Read what is known about bars that fail: a table for each bar, a line for each row."""
    return tomllib.loads(path.read_text()) if path.exists() else {}


def _all(run: Data) -> Iterator[Verdict]:
    rows = run["rows"]
    steps = [_against("step time", row, 1.0, step_ms, row_peers(row)) for row in rows]
    yield from steps
    yield _mean(steps)
    for row in rows:
        if row["name"] == plan.HEAD_ONLY.name:
            yield _against("step time, of torch eager", row, 0.25, step_ms, [EAGER])
            yield _against("step time, of torch.compile", row, 0.5, step_ms, [COMPILED])
    for row in rows:
        yield _against("peak memory, of torch", row, 0.6, _peak, TORCH)
    for row in rows:
        yield _against("start to first step, of torch", row, 0.25, start_s, TORCH)
    for row in rows:
        yield _against("artifacts, of upstream", row, 1.0, _smallest, [UPSTREAM])
    for curve in run.get("curves", ()):
        for quantity, name in (("step_ms", "growth of step time"), ("peak", "growth of memory")):
            yield _steepness(curve, quantity, name)


def row_peers(row: Data) -> list[str]:
    """The peers of a row that are not ours."""
    return [r["peer"] for r in row["results"] if r["peer"] != OURS]


def step_ms(result: Data) -> float | None:
    """The median of the repeats, if the peer ran."""
    return statistics.median(result["step_ms"]) if result["step_ms"] else None


def start_s(result: Data) -> float | None:
    """The median of the starts, if the peer ran."""
    return statistics.median(result["start_s"]) if result["start_s"] else None


def _peak(result: Data) -> float | None:
    return result["peak"] or None


def _smallest(result: Data) -> float | None:
    return result.get("smallest_artifacts") or result["artifacts"] or None


def _against(
    bar: str,
    row: Data,
    limit: float,
    value: Callable[[Data], float | None],
    peers: Iterable[str],
) -> Verdict:
    """Compare ours with the best of some peers."""
    by_peer = {r["peer"]: value(r) for r in row["results"]}
    ours = by_peer.get(OURS)
    others = [(v, peer) for peer in peers if (v := by_peer.get(peer)) is not None]
    if ours is None:
        return Verdict(bar, row["name"], limit, None, reason="there is no figure of ours")
    if not others:
        return Verdict(bar, row["name"], limit, None, comparable=False)
    best, name = min(others)
    return Verdict(bar, row["name"], limit, ours / best, name)


def _mean(steps: Sequence[Verdict]) -> Verdict:
    """The geometric mean of the rows that a peer runs; without a figure of ours there is none."""
    compared = [v.ratio for v in steps if v.comparable]
    found = [ratio for ratio in compared if ratio is not None]
    whole = bool(found) and len(found) == len(compared)
    mean = math.exp(statistics.fmean(map(math.log, found))) if whole else None
    reason = "" if whole else "a row has no figure of ours"
    return Verdict("step time, geometric mean", "all rows", 0.8, mean, "best of each row", reason)


def slope(points: Sequence[Data], peer: str, quantity: str) -> float | None:
    """How much a quantity grows per unit, from the first to the last point."""
    ends = [points[0], points[-1]]
    values = [point["peers"].get(peer, {}).get(quantity) for point in ends]
    if None in values:
        return None
    return (values[1] - values[0]) / (ends[1]["n"] - ends[0]["n"])


def _steepness(curve: Data, quantity: str, name: str) -> Verdict:
    ours, theirs = (slope(curve["points"], peer, quantity) for peer in (OURS, EAGER))
    if ours is None:
        return Verdict(name, curve["name"], 1.0, None, reason="a point of ours is missing")
    if theirs is None or theirs <= 0:
        return Verdict(name, curve["name"], 1.0, None, comparable=False)
    return Verdict(name, curve["name"], 1.0, ours / theirs, EAGER)
