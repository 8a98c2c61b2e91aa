"""What was measured, as tables and as a picture."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import ways

from data import Array

Results = dict[str, dict[str, list[dict[str, Any]]]]  # of a task, of a way, of each seed


def mean(rows: list[dict[str, Any]]) -> float:
    """Return the accuracy over all seeds, in points."""
    return 100 * statistics.fmean(row["accuracy"] for row in rows)


def accuracy_table(results: Results, titles: dict[str, str]) -> str:
    """Return a row for each way, and a column for each network: accuracy, and against floats."""
    tasks = list(results)
    lines = [f"| | {' | '.join(titles[task] for task in tasks)} |", "|---|" + "---:|" * len(tasks)]
    for name in ways.WAYS:
        cells = [_cell(results[task], name) for task in tasks]
        if any(cells):
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(found: dict[str, list[dict[str, Any]]], way: str) -> str:
    rows = found.get(way)
    if not rows:
        return ""
    if way == "float":
        return f"{mean(rows):.2f}"
    return f"{mean(rows):.2f} ({mean(rows) - mean(found['float'][: len(rows)]):+.2f})"


LEAST_SPAN = 3  # points of accuracy on an axis, so that chance does not look like much
# What is drawn for 32, 8 and 4 bits: the best of these.
LINES = {
    "rounded after training, best tool": ("#d1602c", "o--", (
        ["float"],
        ["int8: onnxruntime.quantization, best calibrator",
         "int8: onnxtrain, not trained, best calibrator"],
        ["int4: onnxruntime.quantization, best", "int4: onnxtrain, not trained"])),
    "trained for integers": ("#1f6feb", "o-", (
        ["float"],
        ["int8: onnxtrain, trained, moving averages"],
        ["int4: onnxtrain, trained, learned scales"])),
}  # fmt: skip


def best(found: dict[str, list[dict[str, Any]]], names: list[str]) -> float | None:
    """Return the accuracy of the best of some ways, if any was measured."""
    return max((mean(found[name]) for name in names if name in found), default=None)


def draw(results: Results, titles: dict[str, str], path: Path) -> None:
    """Draw accuracy against the bits of weights, with and without training for them."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    with plt.rc_context({"svg.fonttype": "path", "svg.hashsalt": "onnxtrain", "font.size": 9}):
        figure, all_axes = plt.subplots(1, len(results), figsize=(2.6 * len(results), 3.2))
        for axes, (task, found) in zip(np.atleast_1d(all_axes), results.items(), strict=True):
            for label, (color, style, choices) in LINES.items():
                points = [(x, best(found, names)) for x, names in enumerate(choices)]
                drawn = [(x, y) for x, y in points if y is not None]
                axes.plot(*zip(*drawn, strict=True), style, color=color, label=label)
            axes.set_xticks(range(3), ["32", "8", "4"])
            axes.set_xlabel("bits of a weight")
            axes.set_title(titles[task].replace(", ", "\n", 1), fontsize=8)
            axes.margins(x=0.15, y=0.15)
            low, high = axes.get_ylim()
            missing = max(0, LEAST_SPAN - (high - low))
            axes.set_ylim(low - 0.8 * missing, high + 0.2 * missing)
            axes.spines[["top", "right"]].set_visible(False)
        np.atleast_1d(all_axes)[0].set_ylabel("accuracy, %")
        handles, labels = np.atleast_1d(all_axes)[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower center", ncols=2, frameon=False)
        figure.tight_layout(rect=(0, 0.08, 1, 1))
        figure.savefig(path, metadata={"Date": None})


# ---- size and speed ------------------------------------------------------------------------------

COMPARED = {
    "float": "float",
    "int8: onnxruntime": "int8: onnxruntime.quantization, best calibrator",
    "int8: onnxtrain": "int8: onnxtrain, trained, moving averages",
    "int4: onnxtrain": "int4: onnxtrain, trained, learned scales",
    "int4: onnxtrain, expanded when loaded": "int4: onnxtrain, trained, learned scales",
}


def speed_table(results: Results, titles: dict[str, str], folder: Path, samples: Any) -> str:
    """Return the size of each model, and its time as a part of the float model's."""
    lines = ["| | | size, kB | batch of 1 | batch of 32 |", "|---|---|---:|---:|---:|"]
    for task, found in results.items():
        files = {label: folder / f"{task}-0" / found[way][0]["file"]
                 for label, way in COMPARED.items() if way in found}  # fmt: skip
        ratios = [_ratios(files, samples(task)[:batch]) for batch in (1, 32)]
        for label, path in files.items():
            parts = " | ".join(f"{ratio[label]:.2f}" for ratio in ratios)
            lines.append(
                f"| {titles[task]} | {label} | {path.stat().st_size / 1e3:.0f} | {parts} |"
            )
    return "\n".join(lines)


def _ratios(files: dict[str, Path], x: Array, rounds: int = 20) -> dict[str, float]:
    """Return the time of each model against the first, run in turns by one thread."""
    runs = {label: ways.open_model(path, "expanded" in label) for label, path in files.items()}
    times: dict[str, list[float]] = {label: [] for label in runs}
    for _ in range(rounds):
        for label, run in runs.items():
            run.run(None, {"x": x})
            began = time.process_time()
            for _ in range(3):
                run.run(None, {"x": x})
            times[label].append(time.process_time() - began)
    first = min(times["float"])
    return {label: min(taken) / first for label, taken in times.items()}
