"""The picture of a run: step time, memory and start of all peers, and how they grow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from bars import EAGER, OURS, start_s, step_ms

Data = Mapping[str, Any]
# Colours that can also be told apart by those who do not see all of them, and a mark for each.
LOOKS = {
    "onnxtrain": ("#0072B2", "o"),
    "torch": ("#D55E00", "s"),
    "torch.compile": ("#E69F00", "D"),
    "upstream": ("#009E73", "^"),
    "onnxsim": ("#999999", "v"),
}


def draw(run: Data, target: Path) -> None:
    """Draw a run."""
    style = {
        "svg.fonttype": "none", "svg.hashsalt": "onnxtrain", "font.size": 8,
        "font.family": "sans-serif", "axes.spines.top": False, "axes.spines.right": False,
        "axes.grid": True, "grid.color": "#e5e5e5", "axes.axisbelow": True,
    }  # fmt: skip
    curves = run.get("curves") or []
    with plt.rc_context(style):
        figure = plt.figure(figsize=(11, 7.5 if curves else 3.4), layout="constrained")
        parts = figure.subfigures(2, 1, height_ratios=[1, 1.4]) if curves else [figure]
        _dots(run, parts[0])
        if curves:
            _growth(run, curves, parts[1])
        figure.savefig(target, metadata={"Date": None})
        plt.close(figure)


def _dots(run: Data, part: Any) -> None:
    rows = list(reversed(run["rows"]))
    panels: Sequence[Axes] = part.subplots(1, 3, sharey=True)
    for axes, (title, value) in zip(
        panels,
        (
            ("step time, relative to torch eager", _relative_step),
            ("peak memory, MB", lambda row, r: r["peak"] / 1e6 if r["peak"] else None),
            ("start to first step, s", lambda row, r: start_s(r)),
        ),
        strict=True,
    ):
        for peer, (colour, mark) in LOOKS.items():
            found = [
                (v, y)
                for y, row in enumerate(rows)
                for r in row["results"]
                if r["peer"] == peer and (v := value(row, r)) is not None
            ]
            if found:
                xs, ys = zip(*found, strict=True)
                label = run["titles"].get(peer, peer)
                axes.scatter(xs, ys, c=colour, marker=mark, s=34 if peer == OURS else 22,
                             label=label, zorder=3 if peer == OURS else 2)  # fmt: skip
        axes.set_title(title, fontsize=9)
        if axes is panels[1]:
            axes.set_xlim(left=0)
        else:
            _logarithmic(axes)
    panels[0].axvline(1, color="#666666", linewidth=0.8)
    panels[0].set_yticks(range(len(rows)), [row["title"] for row in rows])
    handles, labels = panels[0].get_legend_handles_labels()
    part.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)


def _relative_step(row: Data, result: Data) -> float | None:
    torch = next((step_ms(r) for r in row["results"] if r["peer"] == EAGER), None)
    own = step_ms(result)
    return own / torch if own and torch else None


def _growth(run: Data, curves: Sequence[Data], part: Any) -> None:
    panels = part.subplots(2, len(curves), squeeze=False, sharex="col")
    for column, curve in enumerate(curves):
        for line, (quantity, unit, scale) in enumerate((("step_ms", "ms", 1), ("peak", "MB", 1e6))):
            axes = panels[line][column]
            for peer, (colour, mark) in LOOKS.items():
                found = [
                    (point["n"], point["peers"][peer][quantity] / scale)
                    for point in curve["points"]
                    if quantity in point["peers"].get(peer, {})
                ]
                if found:
                    axes.plot(*zip(*found, strict=True), color=colour, marker=mark, markersize=4,
                              linewidth=1.4)  # fmt: skip
            # Not logarithmic: the slope is what is compared.
            axes.set_xlim(left=0)
            axes.set_ylim(bottom=0)
            if column == 0:
                axes.set_ylabel(("step time, " if line == 0 else "peak memory, ") + unit)
            if line == 0:
                axes.set_title(curve["title"], fontsize=9)
            else:
                axes.set_xlabel(curve["along"])


def _logarithmic(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
