"""The pictures of a run: step time, memory and start of all peers, and how they grow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from ratios import EAGER, OURS, start_s, step_ms

Data = Mapping[str, Any]
# Colours that stay distinct in every common form of colour blindness, and a mark for each.
LOOKS = {
    "onnxtrain": ("#0072B2", "o"),
    "onnxtrain-plain": ("#56B4E9", "o"),
    "torch": ("#D55E00", "s"),
    "torch.compile": ("#E69F00", "D"),
    "upstream": ("#009E73", "^"),
    "onnxsim": ("#999999", "v"),
}


STYLE = {
    "svg.fonttype": "path", "svg.hashsalt": "onnxtrain", "font.size": 9,
    "font.family": "DejaVu Sans", "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.color": "#e5e5e5", "axes.axisbelow": True, "figure.facecolor": "white",
}  # fmt: skip


def draw(run: Data, target: Path) -> None:
    """Draw step time, memory and start."""
    _save(target, (11, 3.8), lambda figure: _dots(run, figure))


def draw_growth(run: Data, target: Path) -> None:
    """Draw how step time and memory grow along the curves of a run."""
    _save(target, (11, 5), lambda figure: _growth(run, run["curves"], figure))


def _save(target: Path, size: tuple[float, float], fill: Callable[[Figure], None]) -> None:
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=size, layout="constrained")
        fill(figure)
        figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)
        plt.close(figure)


def _dots(run: Data, part: Figure) -> None:
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
    _legend(part, panels[0])


def _relative_step(row: Data, result: Data) -> float | None:
    torch = next((step_ms(r) for r in row["results"] if r["peer"] == EAGER), None)
    own = step_ms(result)
    return own / torch if own and torch else None


def _growth(run: Data, curves: Sequence[Data], part: Figure) -> None:
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
                              linewidth=1.4, label=run["titles"].get(peer, peer))  # fmt: skip
            # Not logarithmic: the slope is what is compared.
            axes.set_xlim(left=0)
            axes.set_ylim(bottom=0)
            if column == 0:
                axes.set_ylabel(("step time, " if line == 0 else "peak memory, ") + unit)
            if line == 0:
                axes.set_title(curve["title"], fontsize=9)
            else:
                axes.set_xlabel(curve["along"])
    _legend(part, panels[0][0])


def _legend(part: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    part.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)


def _logarithmic(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
