"""The benchmark of training: `python benchmarks/training`, or `make bench`.

Prepares the workloads, measures all peers, and writes docs/performance.json and the figures in
docs/performance.md and docs/performance-method.md. `--quick` measures us and torch only, and
prints the figures; `--render` writes the pages from the JSON file, without measuring.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import installed
import measure
import ratios
import report
from cores import Cores
from plan import (
    COMPARISONS,
    CURVE_EFFORT,
    CURVE_PEERS,
    CURVES,
    EAGER,
    FULL,
    OURS,
    PEERS,
    QUICK,
    THREADS,
    UPSTREAM,
    WORKLOADS,
    Comparison,
    Curve,
    Effort,
    Peer,
    Workload,
    folder_of,
    settings,
    write_workload,
)
from processes import Site, bare_peak

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
DOCS = REPOSITORY / "docs"


def main() -> None:
    given = _arguments()
    if given.render:
        run = json.loads((DOCS / "performance.json").read_text())
        _publish(run, ratios.compare(run))
        return
    peers = [p for p in PEERS if p.name in given.peers] if given.peers else list(PEERS)
    if given.quick:
        peers = [p for p in peers if p in (OURS, EAGER)]
    rows = [w for w in WORKLOADS if not given.only or w.name in given.only]
    patience = 20.0 if given.quick else given.patience
    site = Site(given.work.resolve(), _interpreters(given, peers), Cores(patience))
    parts = (given.quick, given.only, given.peers, given.no_curves, given.repeats)
    whole = not any(parts)
    effort = QUICK if given.quick else FULL
    if given.repeats:
        effort = dataclasses.replace(effort, repeats=given.repeats, starts=given.repeats)
    run = _run(site, rows, peers, effort, curves=whole or given.curves)
    found = ratios.compare(run)
    (site.root / "last.json").write_text(json.dumps(run, indent=1))
    print(report.summary(run, found))
    print(report.details(run, found))
    if whole or given.write:
        _publish(run, found)
    for ratio in found:
        if ratio.above_one and not ratio.reason:
            print(f"{ratio.quantity}, {ratio.row}: {ratio.value:.3f}; reasons.toml has no reason")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="us and torch, in a few minutes")
    parser.add_argument("--only", type=_names, default=[], help="names of workloads")
    parser.add_argument("--peers", type=_names, default=[], help="names of peers")
    parser.add_argument("--repeats", type=int, default=0, help="how often, instead of 5")
    parser.add_argument("--no-curves", action="store_true", help="leave out the growth")
    parser.add_argument("--curves", action="store_true", help="measure the growth all the same")
    parser.add_argument("--write", action="store_true", help="write the pages")
    parser.add_argument(
        "--render",
        action="store_true",
        help="write the pages from the figures that are published, without measuring",
    )
    parser.add_argument(
        "--patience", type=float, default=1200.0, help="seconds to wait, in all, for close cores"
    )
    parser.add_argument("--work", type=Path, default=REPOSITORY / "build" / "bench")
    parser.add_argument("--python", action="append", default=[], metavar="PLACE=INTERPRETER")
    return parser.parse_args()


def _names(text: str) -> list[str]:
    return text.split(",")


def _interpreters(given: argparse.Namespace, peers: Sequence[Peer]) -> dict[str, str]:
    found = {
        place: str(REPOSITORY / f".venv-bench-{place}" / "bin" / "python")
        for place in {p.place for p in peers}
    }
    found |= dict(entry.split("=", 1) for entry in given.python)
    for place, interpreter in found.items():
        if not Path(interpreter).exists():
            raise SystemExit(
                f"there is no environment for {place} at {interpreter}: run make bench"
            )
    return found


# ---- a run ---------------------------------------------------------------------------------------


def _run(
    site: Site, rows: Sequence[Workload], peers: Sequence[Peer], effort: Effort, curves: bool
) -> dict[str, Any]:
    site.root.mkdir(parents=True, exist_ok=True)
    if effort.qualifying_seconds:
        # Compiled anew, to know what that takes; the starts that are compared find it compiled.
        shutil.rmtree(site.root / "torch-compiled", ignore_errors=True)
    points = [w for c in CURVES for _, w in c.points] if curves else []
    compared = [w for c in COMPARISONS for _, w, *_ in c.lines] if curves else []
    _prepare(site, [*rows, *compared], peers)
    _prepare(site, points, [p for p in CURVE_PEERS if p in peers])
    run = _circumstances(site, peers, effort)
    for python in site.interpreters.values():
        installed.evict(installed.ask(python)[0])
    run["load"] = [busy_cores(), 0.0]
    bare = {place: bare_peak(python) for place, python in site.interpreters.items()}
    run["rows"] = [_row(site, workload, peers, effort, bare) for workload in rows]
    run["curves"] = [_curve(site, c, peers, run["rows"]) for c in CURVES] if curves else []
    run["comparisons"] = [_comparison(site, c) for c in COMPARISONS] if curves else []
    run["load"][1] = busy_cores()
    run["cores"] = site.cores.summary()
    return run


def busy_cores(seconds: float = 2.0) -> float:
    """How many cores are at work now, by others; the average load tells of the past as well."""
    try:
        before = _core_ticks()
        time.sleep(seconds)
        busy, idle = (b - a for a, b in zip(before, _core_ticks(), strict=True))
    except OSError:
        return os.getloadavg()[0]
    return (os.cpu_count() or 1) * busy / max(busy + idle, 1)


def _core_ticks() -> tuple[int, int]:
    """The time that all cores together have worked, and rested."""
    numbers = list(map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]))
    idle = numbers[3] + numbers[4]
    return sum(numbers) - idle, idle


def _circumstances(site: Site, peers: Sequence[Peer], effort: Effort) -> dict[str, Any]:
    versions, sizes = {}, {}
    for peer in peers:
        folder, versions[peer.place] = installed.ask(site.interpreters[peer.place])
        # torch does without numpy; it is there because the data are made with it.
        sizes[peer.name] = installed.size(folder, ("numpy",) if peer.place == "torch" else ())
    return {
        "date": datetime.date.today().isoformat(),
        "machine": _machine(),
        "threads": THREADS,
        "effort": dataclasses.asdict(effort),
        "versions": versions,
        "installed": sizes,
        "titles": {p.name: p.title for p in PEERS},
    }


def _machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = lines[0].partition(":")[2].strip() if lines else cpu
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    system = f"{platform.system()} {platform.release()}"
    return {"cpu": cpu, "cores": os.cpu_count(), "memory": memory, "system": system}


def _row(
    site: Site, workload: Workload, peers: Sequence[Peer], effort: Effort, bare: dict[str, int]
) -> dict[str, Any]:
    _say(workload.title)
    began = time.monotonic()
    results = measure.measure_row(site, workload, peers, effort, bare, _say)
    found = [dataclasses.asdict(result) for result in results]
    for result in found:
        if result["peer"] == UPSTREAM.name and result["artifacts"]:
            folder = folder_of(site.root, workload)
            result["smallest_artifacts"] = min(
                measure.artifact_bytes(folder, UPSTREAM, s) for s in settings(UPSTREAM, workload)
            )
    odd = measure.disagreements(results)
    for line in odd:
        _say(f"  the loss differs: {line}")
    _say(f"  ({time.monotonic() - began:.0f} s)")
    return {
        "name": workload.name,
        "title": workload.title,
        "net": workload.net,
        "trains": workload.trains,
        "results": found,
        "different_losses": odd,
    }


def _curve(
    site: Site, curve: Curve, peers: Sequence[Peer], rows: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    points = []
    for number, workload in curve.points:
        _say(f"{curve.title}, {curve.along} {number}")
        entries = {
            p.name: (p, measure.usual_setting(p, workload, rows), workload)
            for p in CURVE_PEERS
            if p in peers
        }
        found = measure.measure_together(site, entries, CURVE_EFFORT)
        points.append({"n": number, "peers": found})
    named = {"name": curve.name, "title": curve.title, "along": curve.along}
    return {**named, "points": points}


def _comparison(site: Site, comparison: Comparison) -> dict[str, Any]:
    _say(comparison.title)
    entries = {label: (peer, s, workload) for label, workload, peer, s in comparison.lines}
    found = measure.measure_together(site, entries, CURVE_EFFORT)
    return {"name": comparison.name, "title": comparison.title, "lines": found}


# ---- files ---------------------------------------------------------------------------------------


def _prepare(site: Site, workloads: Sequence[Workload], peers: Sequence[Peer]) -> None:
    """Let each environment make what it is to train from."""
    distinct = {w.name: w for w in workloads}
    if not distinct:
        return
    _say(f"prepare {', '.join(distinct)}")
    _script(sys.executable, "prepare.py", str(site.root), *map(write_workload, distinct.values()))
    for workload in distinct.values():
        folder = folder_of(site.root, workload)
        for place in ("upstream", "onnxsim"):
            if any(p.place == place for p in peers) and not (folder / place).exists():
                script = f"prepare_{place}.py"
                _script(site.interpreters[place], script, str(folder), workload.trains)


def _script(interpreter: str, name: str, *arguments: str) -> None:
    run = subprocess.run(
        [interpreter, str(HERE / name), *arguments], capture_output=True, text=True
    )
    if run.returncode:
        raise SystemExit(f"{name} {arguments} failed:\n{run.stderr[-4000:]}")


def _publish(run: dict[str, Any], found: Sequence[ratios.Ratio]) -> None:
    from picture import draw, draw_growth

    growth = "performance-growth.svg" if run.get("curves") else None
    draw(run, DOCS / "performance.svg")
    if growth:
        draw_growth(run, DOCS / growth)
    (DOCS / "performance.json").write_text(json.dumps(run, indent=1) + "\n")
    report.insert(DOCS / "performance.md", report.summary(run, found, "performance.svg"))
    report.insert(DOCS / "performance-method.md", report.details(run, found, growth))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
