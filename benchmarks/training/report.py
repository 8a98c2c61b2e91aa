"""The pages of a run: the summary for docs/performance.md, and everything for the method page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ratios import (
    ARTIFACTS,
    COMPILED,
    MEMORY,
    MEMORY_GROWTH,
    OURS,
    PLAIN,
    START,
    STEP,
    STEP_GROWTH,
    TORCH,
    Data,
    Ratio,
    best,
    row_peers,
    start_s,
    step_ms,
)

BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
BUSY = 0.5  # cores at work before the run


# ---- the summary ---------------------------------------------------------------------------------


def summary(run: Data, ratios: Sequence[Ratio], picture: str | None = None) -> str:
    """One table, one picture, three sentences, and the reasons where a step takes longer."""
    machine = run["machine"]
    place = f"{run['date']}, {machine['cpu']}, {run['threads']} threads for each"
    busy = f"; load {run['load'][0]:.1f} before the run" if run["load"][0] > BUSY else ""
    parts = [_summary_table(run), f"{place}{busy}. Less is better everywhere."]
    if picture:
        parts.append(f"![Step time, peak memory and start of all peers]({picture})")
    parts += ["\n".join(f"- {sentence}" for sentence in sentences(run, ratios))]
    if slower := [r for r in ratios if r.quantity == STEP and r.above_one]:
        parts += ["## Where a step takes longer, and why", _reasons(run, slower)]
    return "\n\n".join(parts) + "\n"


def _summary_table(run: Data) -> str:
    head = ["", "step, ms", "fastest other, ms", "ratio", "peak memory, MB", "torch, MB",
            "first step after, s", "torch, s"]  # fmt: skip
    has_plain = any(best(row, step_ms, [PLAIN]) for row in run["rows"])
    if has_plain:
        head.append("step without native kernels, ms")
    lines = []
    for row in run["rows"]:
        ours, other = best(row, step_ms, [OURS]), best(row, step_ms, row_peers(row))
        cells = ["—", "—", "—"]
        if ours:
            cells[0] = _number(ours[0])
        if other:
            cells[1] = f"{_number(other[0])} ({_title(run, other[1])})"
        if ours and other:
            cells[2] = f"**{ours[0] / other[0]:.2f}**"
        for peers in ([OURS], TORCH):
            found = best(row, lambda r: r["peak"] or None, peers)
            cells.append(f"{found[0] / 1e6:.0f}" if found else "—")
        for peers in ([OURS], TORCH):
            found = best(row, start_s, peers)
            cells.append(_number(found[0]) if found else "—")
        if has_plain:
            found = best(row, step_ms, [PLAIN])
            cells.append(_number(found[0]) if found else "—")
        lines.append([row["title"], *cells])
    return _table(head, lines)


def sentences(run: Data, ratios: Sequence[Ratio]) -> list[str]:
    """What a reader can conclude, with the figures of the run."""
    return [s for s in (_on_memory(run, ratios), _on_start(run), _on_steps(run, ratios)) if s]


def _on_memory(run: Data, ratios: Sequence[Ratio]) -> str:
    shares = [r.value for r in ratios if r.quantity == MEMORY and r.value is not None]
    if not shares:
        return ""
    sizes = [run["installed"].get(peer) for peer in (OURS, TORCH[0])]
    disk = ""
    if all(sizes):
        disk = f", and {sizes[0] / 1e6:.0f} MB of installed files instead of {sizes[1] / 1e6:.0f}"
    return (
        f"**Short of memory?** Training takes {_span(shares, '{:.0%}')} of the memory that torch "
        f"takes{disk}."
    )


def _on_start(run: Data) -> str:
    ours = [v[0] for row in run["rows"] if (v := best(row, start_s, [OURS]))]
    torch = [v[0] for row in run["rows"] if (v := best(row, start_s, TORCH))]
    if not ours or not torch:
        return ""
    return (
        f"**Short runs, often started?** The first step is done {_span(ours, '{:.1f}')} s after "
        f"the process starts; with torch it takes {_span(torch, '{:.1f}')} s."
    )


def _on_steps(run: Data, ratios: Sequence[Ratio]) -> str:
    steps = {r.row: r.value for r in ratios if r.quantity == STEP and r.value is not None}
    near = "; ".join(_net(run, row) for row, value in steps.items() if value <= 1.1)
    far = [value for value in steps.values() if value > 1.1]
    if not steps:
        return ""
    if not far:
        span = _span(list(steps.values()), "{:.2f}")
        return f"**Long runs?** A step takes {span} of the time that the fastest other takes."
    return (
        "**Long runs?** "
        + (f"A step takes at most 1.1 times the fastest other's time for {near}. " if near else "")
        + f"{'Elsewhere it' if near else 'A step'} takes {_span(far, '{:.2f}')} times as long: "
        "freeze the layers that need no training, or train with torch where it fits."
    )


def _reasons(run: Data, ratios: Sequence[Ratio]) -> str:
    return "\n".join(
        f"- {_row_title(run, r.row)}, {r.value:.2f} times {_title(run, r.against)}: "
        f"{r.reason or 'not explained yet'}."
        for r in ratios
    )


# ---- everything ----------------------------------------------------------------------------------


def details(run: Data, ratios: Sequence[Ratio], picture: str | None = None) -> str:
    """All figures of a run, with the machine, the settings and the growth."""
    parts = [_head(run), "### Ratios", ratio_table(run, ratios)]
    above = [r for r in ratios if r.above_one and r.quantity in (ARTIFACTS, MEMORY, START)]
    if above:
        parts.append(_grouped(run, above))
    parts += ["### All columns", table(run)]
    if any(r["error"] for row in run["rows"] for r in row["results"]):
        parts.append(_failures(run))
    if cold := _cold(run):
        parts.append(cold)
    parts += ["### Settings", _settings(run)]
    if run.get("curves"):
        parts += ["### Growth", *_growth(run, ratios, picture)]
    for compared in run.get("comparisons") or ():
        parts += [f"### {compared['title']}", _compared(compared)]
    return "\n\n".join(parts) + "\n"


def _head(run: Data) -> str:
    machine = run["machine"]
    lines = [
        f"{run['date']}, {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory'] / 1e9:.0f} GB, {machine['system']}; {run['threads']} threads for each "
        "peer."
    ]
    versions = "; ".join(f"{place}: {names}" for place, names in run["versions"].items())
    lines.append(f"Environments: {versions}.")
    if run["load"][0] > BUSY:
        lines.append(
            f"The machine had other load ({run['load'][0]:.1f} before the run), so ratios are more "
            "reliable than times."
        )
    if text := _cores(run.get("cores")):
        lines.append(text)
    return "\n".join(lines)


def _cores(cores: Data | None) -> str:
    """Say how close the cores were, which changes on a virtual machine; see cores.py."""
    if not cores:
        return ""
    text = f"256 KB travel from core to core and back in {cores['nearest_us']} µs at best"
    if not cores["waited_s"] and not cores["bursts_apart"]:
        return f"{text}, and the cores stayed close."
    text += (
        f", in {cores['farthest_us']} µs when the host had moved the two cores to different "
        f"caches; steps were timed when they were close ({cores['waited_s']} s of waiting)"
    )
    if cores["bursts_apart"]:
        text += f", except for {cores['bursts_apart']} bursts"
    return f"{text}."


def ratio_table(run: Data, ratios: Sequence[Ratio]) -> str:
    """A line for each workload: ours divided by the peer's, for each quantity."""
    columns = {
        STEP: "step time / fastest other", MEMORY: "peak memory / torch",
        START: "start / torch", ARTIFACTS: "artifacts / onnxruntime-training",
    }  # fmt: skip
    found = {(r.quantity, r.row): r.value for r in ratios}
    lines = [
        [row["title"], *(_ratio(found.get((quantity, row["name"]))) for quantity in columns)]
        for row in run["rows"]
    ]
    mean = next((r.value for r in ratios if r.quantity == f"{STEP}, geometric mean"), None)
    lines.append(["geometric mean", _ratio(mean), "", "", ""])
    return _table(["", *columns.values()], lines)


def _grouped(run: Data, ratios: Sequence[Ratio]) -> str:
    """Why figures other than step times are above one; rows with one reason share a line."""
    rows: dict[tuple[str, str], list[str]] = {}
    for r in ratios:
        rows.setdefault((r.quantity, r.reason), []).append(_row_title(run, r.row))
    return "\n".join(
        f"- {quantity}, {'; '.join(titles)}: {reason or 'not explained yet'}."
        for (quantity, reason), titles in rows.items()
    )


def table(run: Data) -> str:
    """A line for each workload and peer, with everything that was measured."""
    head = ["workload", "peer", "step, ms (spread)", "peak above interpreter, MB", "peak, MB",
            "start to first step, s (spread)", "installed, MB", "artifacts, MB"]  # fmt: skip
    lines = [
        _line(run, row, result, first=index == 0)
        for row in run["rows"]
        for index, result in enumerate(row["results"])
    ]
    return _table(head, lines)


def _line(run: Data, row: Data, result: Data, first: bool) -> list[str]:
    peer = result["peer"]
    name = [row["title"] if first else "", _title(run, peer)]
    installed = run["installed"].get(peer)
    size = f"{installed / 1e6:.0f}" if installed else "—"
    if not result["step_ms"]:
        return [*name, f"fails: {_short(result['error'])}", "—", "—", "—", size, "—"]
    return [
        *name,
        _with_spread(result["step_ms"], step_ms(result)),
        f"{(result['peak'] - result['bare']) / 1e6:.0f}",
        f"{result['peak'] / 1e6:.0f}",
        _with_spread(result["start_s"], start_s(result)),
        size,
        f"{result['artifacts'] / 1e6:.2f}",
    ]


def _cold(run: Data) -> str:
    """Tell how long the first start of what compiles took, when nothing was compiled yet."""
    found = [
        f"{row['title']} {_number(result['cold_start_s'])} s"
        for row in run["rows"]
        for result in row["results"]
        if result["peer"] == COMPILED and result["cold_start_s"]
    ]
    if not found:
        return ""
    return f"`torch.compile`, start to first step with nothing compiled yet: {'; '.join(found)}."


def _settings(run: Data) -> str:
    """Which setting was the fastest of a peer, and what the others took."""
    lines = []
    for row in run["rows"]:
        for result in row["results"]:
            if result["step_ms"] and result["others"]:
                others = ", ".join(f"{k} {_number(v)}" for k, v in result["others"].items())
                peer = _title(run, result["peer"])
                lines.append([row["title"], peer, f"**{result['setting']}**", others])
    if not lines:
        return "Each peer ran in one setting."
    return _table(["workload", "peer", "fastest", "slower, ms"], lines)


def _failures(run: Data) -> str:
    lines = ["The errors in full:", ""]
    for row in run["rows"]:
        for result in row["results"]:
            if result["error"]:
                peer = _title(run, result["peer"])
                lines.append(f"- {row['title']}, {peer}: `{_one_line(result['error'])}`")
    return "\n".join(lines)


def _growth(run: Data, ratios: Sequence[Ratio], picture: str | None) -> list[str]:
    parts = [f"![Step time and memory by batch size, length and depth]({picture})"] * bool(picture)
    for curve in run["curves"]:
        peers = list(dict.fromkeys(p for point in curve["points"] for p in point["peers"]))
        head = [f"{curve['title']}: {curve['along']}"]
        head += [f"{_title(run, p)}, ms / MB" for p in peers]
        lines = [
            [str(point["n"]), *(_point(point["peers"].get(p)) for p in peers)]
            for point in curve["points"]
        ]
        parts.append(_table(head, lines))
    grown = [r for r in ratios if r.quantity in (STEP_GROWTH, MEMORY_GROWTH) and r.comparable]
    titles = {c["name"]: f"{c['title']}, {c['along']}" for c in run["curves"]}
    head = ["growth per unit, ours / torch eager", "step time", "memory"]
    by_name = {(r.row, r.quantity): r.value for r in grown}
    lines = [
        [title, *(_ratio(by_name.get((name, q))) for q in (STEP_GROWTH, MEMORY_GROWTH))]
        for name, title in titles.items()
    ]
    parts.append(_table(head, lines))
    above = [
        f"- {r.quantity.removeprefix('growth of ')}, {titles[r.row]}: "
        f"{r.reason or 'not explained yet'}."
        for r in grown
        if r.above_one
    ]
    return [*parts, "\n".join(above)] if above else parts


def _compared(comparison: Data) -> str:
    head = ["", "step, ms", "peak, MB"]
    lines = []
    for label, found in comparison["lines"].items():
        if "error" in found:
            lines.append([label, f"fails: {_short(found['error'])}", "—"])
        else:
            lines.append([label, _number(found["step_ms"]), f"{found['peak'] / 1e6:.0f}"])
    return _table(head, lines)


def _point(found: Data | None) -> str:
    if found is None:
        return "—"
    if "error" in found:
        return f"fails: {_short(found['error'], 60)}"
    return f"{_number(found['step_ms'])} / {found['peak'] / 1e6:.0f}"


# ---- text ----------------------------------------------------------------------------------------


def _title(run: Data, peer: str) -> str:
    title: str = run["titles"].get(peer, peer)
    return title


def _row_title(run: Data, name: str) -> str:
    return next((row["title"] for row in run["rows"] if row["name"] == name), name)


def _net(run: Data, name: str) -> str:
    """The title of a row without the sizes of its data."""
    return re.sub(r", (batch|T) \d+", "", _row_title(run, name))


def _span(values: Sequence[float], form: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low.removesuffix('%')} to {high}".replace("%", " %")


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [list(head), ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(_cell(c) for c in row) + " |" for row in rows)


def _cell(text: str) -> str:
    return _one_line(text).replace("|", "\\|")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _short(text: str, most: int = 160) -> str:
    text = _one_line(text)
    return text if len(text) <= most else text[: most - 1] + "…"


def _ratio(value: float | None) -> str:
    return "—" if value is None else f"{value:.2f}"


def _number(value: float | None) -> str:
    if value is None:
        return "—"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _with_spread(values: Sequence[float], median: float | None) -> str:
    return f"{_number(median)} ({_number(min(values))}–{_number(max(values))})"


def insert(page: Path, text: str) -> None:
    """Put a report between the markers of a page."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{page} has no lines '{BEGIN}' and '{END}'")
    page.write_text(f"{before}{BEGIN}\n{text}{END}{after}")
