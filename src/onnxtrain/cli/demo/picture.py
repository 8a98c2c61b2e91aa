"""The figure of the demo: the loss, and confusion matrices before and after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain.cli.demo.digits import Digits
from onnxtrain.device.loop.history import History


def draw(path: Path, digits: Digits, history: History, before: Any, after: Any) -> None:
    """Draw the digits, the loss and the two matrices."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.4), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=[1, 2.4])
    top, bottom = parts
    _draw_digits(top, digits)
    loss, first, second = bottom.subplots(1, 3, width_ratios=[1.25, 1, 1])
    _draw_loss(loss, history)
    for axes, title, values in ((first, "before", before), (second, "after", after)):
        _draw_matrix(axes, f"accuracy {title}: {values['accuracy']:.1%}", values["confusion"])
    figure.savefig(path, dpi=110)


def _draw_digits(figure: Any, digits: Digits) -> None:
    rows = figure.subplots(2, 10)
    for row, (name, samples) in enumerate((("people", digits.people), ("the user", digits.user))):
        for digit in range(10):
            axes = rows[row][digit]
            index = int(np.flatnonzero(samples.labels == digit)[0])
            axes.imshow(samples.images[index, 0], cmap="Greys", vmin=0, vmax=1)
            axes.set_xticks([])
            axes.set_yticks([])
        rows[row][0].set_ylabel(name)


def _draw_loss(axes: Any, history: History) -> None:
    axes.plot(history.losses, color="0.8", label="training step")
    axes.plot(history["steps"], history["eval_loss"], marker="o", markersize=4, label="test data")
    axes.set(title="training on the device", xlabel="step", ylabel="loss", ylim=(0, None))
    axes.legend(frameon=False)


def _draw_matrix(axes: Any, title: str, rows: Any) -> None:
    matrix = np.array(rows)
    axes.imshow(matrix, cmap="Blues")
    for (row, column), count in np.ndenumerate(matrix):
        if count:
            light = count > matrix.max() / 2
            axes.text(column, row, int(count), ha="center", va="center", fontsize=7,
                      color="white" if light else "black")  # fmt: skip
    axes.set(title=title, xlabel="predicted", ylabel="digit")
    axes.set_xticks(range(10))
    axes.set_yticks(range(10))
