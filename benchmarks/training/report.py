"""The report: a Markdown table of a run, the bars, and where they go in the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bars import COMPILED, OURS, Verdict, row_peers, start_s, step_ms

BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
Data = Mapping[str, Any]


def markdown(run: Data, verdicts: Sequence[Verdict], picture: str | None = None) -> str:
    """Write the whole report."""
    parts = [_head(run)]
    if picture:
        parts.append(f"![step time, memory, start, growth]({picture})")
    parts += ["### Step time", summary(run), "### All columns", table(run)]
    if any(r["error"] for row in run["rows"] for r in row["results"]):
        parts.append(_failures(run))
    if cold := _cold(run):
        parts.append(cold)
    parts += ["### Settings", _settings(run), "### Bars", bars_table(verdicts, run)]
    if run.get("curves"):
        parts += ["### Growth", _curves(run)]
    if run.get("comparisons"):
        parts += [part for c in run["comparisons"] for part in (f"### {c['title']}", _compared(c))]
    return "\n\n".join(parts) + "\n"


def _head(run: Data) -> str:
    machine = run["machine"]
    lines = [
        f"{run['date']}, {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory'] / 1e9:.0f} GB, {machine['system']}; {run['threads']} threads each."
    ]
    versions = "; ".join(f"{place}: {names}" for place, names in run["versions"].items())
    lines.append(f"Environments: {versions}.")
    if run["load"][0] > 0.5:
        lines.append(
            f"**The machine was not quiet** (load {run['load'][0]:.1f} before the run): the times "
            "of this run mean little."
        )
    if text := _cores(run.get("cores")):
        lines.append(text)
    return "\n".join(lines)


def _cores(cores: Data | None) -> str:
    """Say how near the cores were, which on a borrowed machine changes; see cores.py."""
    if not cores:
        return ""
    text = f"256 KB go from core to core and back in {cores['nearest_us']} µs at best"
    if not cores["waited_s"] and not cores["bursts_apart"]:
        return f"{text}, and the cores stayed near."
    text += (
        f", {cores['farthest_us']} µs when the host had parted them; steps were taken when they "
        f"were near ({cores['waited_s']} s of waiting)"
    )
    if cores["bursts_apart"]:
        text += f", but {cores['bursts_apart']} bursts were taken with the cores apart"
    return f"{text}."


# ---- tables --------------------------------------------------------------------------------------


def summary(run: Data) -> str:
    """A line for each workload, a column for each peer; the ratio is ours to the best other."""
    peers = list(dict.fromkeys(r["peer"] for row in run["rows"] for r in row["results"]))
    head = ["ms", *(run["titles"].get(p, p) for p in peers), "ours / best other"]
    lines = []
    for row in run["rows"]:
        by_peer = {r["peer"]: r for r in row["results"]}
        values = {p: step_ms(r) for p, r in by_peer.items()}
        others = [v for p in row_peers(row) if (v := values[p]) is not None]
        ours = values.get(OURS)
        ratio = f"**{ours / min(others):.2f}**" if ours and others else "—"
        cells = [_number(values.get(p)) if values.get(p) else "fails" for p in peers]
        lines.append([row["title"], *cells, ratio])
    return _table(head, lines)


def table(run: Data) -> str:
    """A line for each workload and peer, with all that was measured."""
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
    name = [row["title"] if first else "", run["titles"].get(peer, peer)]
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
    return f"`torch.compile`, start to first step with nothing compiled: {'; '.join(found)}."


def _settings(run: Data) -> str:
    """Which setting stood for a peer, and what the others took."""
    lines = []
    for row in run["rows"]:
        for result in row["results"]:
            if result["step_ms"] and result["others"]:
                others = ", ".join(f"{k} {_number(v)}" for k, v in result["others"].items())
                peer = run["titles"].get(result["peer"], result["peer"])
                lines.append([row["title"], peer, f"**{result['setting']}**", others])
    if not lines:
        return "Each peer ran in one setting."
    return _table(["workload", "peer", "fastest", "slower, ms"], lines)


def _failures(run: Data) -> str:
    lines = ["What fails, in full:", ""]
    for row in run["rows"]:
        for result in row["results"]:
            if result["error"]:
                peer = run["titles"].get(result["peer"], result["peer"])
                lines.append(f"- {row['title']}, {peer}: `{_one_line(result['error'])}`")
    return "\n".join(lines)


def bars_table(verdicts: Sequence[Verdict], run: Data) -> str:
    """Pass or fail for each bar."""
    titles = {row["name"]: row["title"] for row in run["rows"]}
    titles |= {c["name"]: f"{c['title']}, {c['along']}" for c in run.get("curves", ())}
    head = ["bar", "row", "ratio", "at most", "against", "", "reason"]
    lines = [
        [
            v.bar, titles.get(v.row, v.row), "—" if v.ratio is None else f"{v.ratio:.3f}",
            f"{v.limit:g}", run["titles"].get(v.against, v.against),
            "**FAIL**" if v.failed else v.outcome,
            v.reason or ("not explained yet" if v.failed else ""),
        ]
        for v in verdicts
    ]  # fmt: skip
    return f"{count(verdicts)}.\n\n" + _table(head, lines)


def count(verdicts: Sequence[Verdict]) -> str:
    """Say how many bars are reached, of those that there is a comparison for."""
    passed, failed = sum(v.passed for v in verdicts), sum(v.failed for v in verdicts)
    return f"{passed} of {passed + failed} bars are reached"


def _curves(run: Data) -> str:
    parts = []
    for curve in run["curves"]:
        peers = list(dict.fromkeys(p for point in curve["points"] for p in point["peers"]))
        head = [f"{curve['title']}: {curve['along']}"]
        head += [f"{run['titles'].get(p, p)}, ms / MB" for p in peers]
        lines = [
            [str(point["n"]), *(_point(point["peers"].get(p)) for p in peers)]
            for point in curve["points"]
        ]
        parts.append(_table(head, lines))
    return "\n\n".join(parts)


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
