"""Measures: step times of processes that take turns, start and memory of fresh ones."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from plan import EAGER, Effort, Peer, Setting, Workload, folder_of, settings
from processes import Child, PeerFailed, Site, borrow_memory

T = TypeVar("T")
Say = Callable[[str], None]
# How much slower in the trial a setting may be and still take part: a trial is short.
_NEAR = 1.1
# The losses of the first steps, by which it is checked that all do the same work.
COMPARED_STEPS = 4


@dataclass
class Result:
    """What was measured of one peer and one workload; times in ms and s, sizes in bytes."""

    peer: str
    setting: str = ""
    error: str = ""
    step_ms: list[float] = field(default_factory=list)
    steps: int = 0
    start_s: list[float] = field(default_factory=list)
    cold_start_s: float | None = None
    peak: int = 0
    bare: int = 0
    artifacts: int = 0
    losses: list[float] = field(default_factory=list)
    others: dict[str, float] = field(default_factory=dict)

    @property
    def step(self) -> float:
        return statistics.median(self.step_ms)

    @property
    def start(self) -> float:
        return statistics.median(self.start_s)


def measure_row(
    site: Site,
    workload: Workload,
    peers: Sequence[Peer],
    effort: Effort,
    bare: Mapping[str, int],
    say: Say,
) -> list[Result]:
    """Measure one workload with each peer."""
    results = {peer.name: Result(peer.name, bare=bare[peer.place]) for peer in peers}
    chosen = _step_times(site, workload, peers, effort, results, say)
    _starts(site, workload, chosen, effort, results, say)
    for peer, setting in chosen:
        results[peer.name].artifacts = artifact_bytes(folder_of(site.root, workload), peer, setting)
    return list(results.values())


# ---- step times ----------------------------------------------------------------------------------


def _step_times(
    site: Site,
    workload: Workload,
    peers: Sequence[Peer],
    effort: Effort,
    results: dict[str, Result],
    say: Say,
) -> list[tuple[Peer, Setting]]:
    """Fill in the step times; return the setting that was the fastest of each peer."""
    children: list[Child] = []
    try:
        for peer in peers:
            children += _qualified(site, workload, peer, effort, results[peer.name], say)
        times = take_turns(site, children, effort)
    finally:
        for child in children:
            child.close()
    chosen = []
    for peer in peers:
        mine = [c for c in children if c.peer is peer]
        own = [(statistics.median(times[c]), i, c) for i, c in enumerate(mine) if c in times]
        if not own:
            if mine:
                results[peer.name].error = mine[0].failure
            continue
        best = min(own)[2]
        result = results[peer.name]
        result.setting, result.step_ms = best.setting.name, times[best]
        result.steps = len(best.losses)
        result.losses = best.losses[:COMPARED_STEPS]
        result.others |= {c.setting.name: ms for ms, _, c in own if c is not best}
        chosen.append((peer, best.setting))
        say(f"  {peer.title}: {result.step:.2f} ms ({best.setting.name})")
    return chosen


def _qualified(
    site: Site, workload: Workload, peer: Peer, effort: Effort, result: Result, say: Say
) -> list[Child]:
    """Start a process for each setting; keep the fastest, and one that is nearly as fast."""
    offered = settings(peer, workload)
    tried: list[tuple[float, int, Child]] = []
    for number, setting in enumerate(offered[:1] if effort.qualifying_seconds == 0 else offered):
        try:
            child = Child(site, peer, setting, workload)
        except PeerFailed as failure:
            result.error = result.error or str(failure)
            say(f"  {peer.title} ({setting.name}) fails: {str(failure)[:120]}")
            continue
        if number == 0:
            result.cold_start_s = child.start_seconds
        try:
            child.burst(0.0, COMPARED_STEPS)
            steps = _burst(site, child, effort.qualifying_seconds, effort.least_steps)
            trial = statistics.median(steps)
        except PeerFailed as failure:
            result.error = result.error or str(failure)
            child.close()
            continue
        result.others[setting.name] = trial
        tried = _keep(tried, (trial, number, child))
    if tried:
        result.error = ""
    for _, _, child in tried:
        result.others.pop(child.setting.name)
    return [child for _, _, child in tried]


def _keep(
    tried: list[tuple[float, int, Child]], new: tuple[float, int, Child]
) -> list[tuple[float, int, Child]]:
    ordered = sorted([*tried, new], key=lambda entry: entry[:2])
    limit = ordered[0][0] * _NEAR
    for entry in ordered[2:]:
        entry[2].close()
    if len(ordered) > 1 and ordered[1][0] > limit:
        ordered[1][2].close()
        return ordered[:1]
    return ordered[:2]


def take_turns(site: Site, children: Sequence[Child], effort: Effort) -> dict[Child, list[float]]:
    """Let the processes take steps in turn; return the median of each burst of those that live.

    Each round begins with another one, so that nobody always comes behind the same.
    """
    times: dict[Child, list[float]] = {child: [] for child in children}
    for number in range(effort.repeats):
        for child in _rotated(list(times), number):
            try:
                steps = _burst(site, child, effort.burst_seconds, effort.least_steps)
                times[child].append(statistics.median(steps))
            except PeerFailed as failure:
                child.failure = str(failure)
                del times[child]
    return times


def _rotated(entries: Sequence[T], number: int) -> list[T]:
    """Return the order of a round, which begins with another entry than the round before."""
    shift = number % max(len(entries), 1)
    return [*entries[shift:], *entries[:shift]]


def _burst(site: Site, child: Child, seconds: float, least: int) -> list[float]:
    return site.cores.burst(lambda: child.burst(seconds, least))


# ---- start and memory ----------------------------------------------------------------------------


def _starts(
    site: Site,
    workload: Workload,
    chosen: Sequence[tuple[Peer, Setting]],
    effort: Effort,
    results: dict[str, Result],
    say: Say,
) -> None:
    """Fill in the time to the end of the first step, and the peak after more of them."""
    for number in range(effort.starts):
        for peer, setting in _rotated(chosen, number):
            result = results[peer.name]
            site.cores.wait()
            borrow_memory()
            try:
                with contextlib.closing(Child(site, peer, setting, workload)) as child:
                    result.start_s.append(child.start_seconds)
                    if number == 0:
                        child.burst(0.0, effort.memory_steps - 1, effort.memory_steps - 1)
                        result.peak = child.peak
            except PeerFailed as failure:
                result.error = str(failure)
    for result in results.values():
        if result.peak:
            say(f"  {result.peer}: {result.peak >> 20} MB, starts in {result.start:.2f} s")


# ---- curves --------------------------------------------------------------------------------------


def measure_together(
    site: Site, entries: Mapping[str, tuple[Peer, Setting, Workload]], effort: Effort
) -> dict[str, dict[str, Any]]:
    """Measure step time and peak memory only, each entry in one process, all in turns."""
    children: dict[Child, str] = {}
    found: dict[str, dict[str, Any]] = {}
    try:
        for key, entry in entries.items():
            try:
                child = Child(site, *entry)
                children[child] = key
                child.burst(0.0, 4)
            except PeerFailed as failure:
                found[key] = {"error": str(failure)}
        running = [child for child, key in children.items() if key not in found]
        times = take_turns(site, running, effort)
        for child in running:
            if child in times:
                step = statistics.median(times[child])
                found[children[child]] = {"step_ms": step, "peak": child.peak}
            else:
                found[children[child]] = {"error": child.failure}
    finally:
        for child in children:
            child.close()
    return found


def usual_setting(peer: Peer, workload: Workload, rows: Sequence[dict[str, Any]]) -> Setting:
    """The setting that was best for the same network in the table, or the plainest."""
    offered = settings(peer, workload)
    best = {
        r["setting"]
        for row in rows
        if row["net"] == workload.net and row["trains"] == workload.trains
        for r in row["results"]
        if r["peer"] == peer.name
    }
    return next((s for s in offered if s.name in best), offered[0])


# ---- artifacts -----------------------------------------------------------------------------------


def artifact_bytes(folder: Path, peer: Peer, setting: Setting) -> int:
    """The size of all files that a peer needs, beside its own code, to begin to train."""
    if peer.module == "torch_peer":
        files = [folder / "weights.pt"]
    elif peer.module == "onnxsim_peer":
        used = ["model.onnx"] if setting.options["run"] == "loop" else ["step.onnx", "params.npz"]
        files = [folder / "onnxsim" / name for name in used]
    else:
        files = [*(folder / str(setting.options.get("artifacts", "ours"))).iterdir()]
    return sum(file.stat().st_size for file in files)


def disagreements(results: Sequence[Result], tolerance: float = 5e-3) -> list[str]:
    """Name the peers whose first losses are not those of torch: they do something else."""
    reference = next((r.losses for r in results if r.peer == EAGER.name), [])
    found = []
    for result in results:
        for ours, theirs in zip(result.losses, reference, strict=False):
            if abs(ours - theirs) > tolerance * abs(theirs):
                found.append(f"{result.peer}: {ours:.5f} instead of {theirs:.5f}")
                break
    return found
