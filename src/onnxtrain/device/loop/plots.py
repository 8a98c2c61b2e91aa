"""Pictures of a training run, with matplotlib."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from onnxtrain.errors import OnnxTrainError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from onnxtrain.device.loop.history import History


def plot_history(history: History, path: str | os.PathLike[str] | None = None) -> Figure:
    """Draw losses and metrics over the steps; write the picture if a path is given."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise OnnxTrainError(
            "history.plot() needs matplotlib: pip install 'onnxtrain[demo]'"
        ) from None
    metrics = _plottable(history)
    size = (6.4, 3.6 + 2.4 * bool(metrics))
    if path is None:
        # pyplot knows how to show a figure in a window or a notebook.
        from matplotlib import pyplot

        figure: Figure = pyplot.figure(figsize=size, layout="constrained")
    else:
        figure = Figure(figsize=size, layout="constrained")
    top, *bottom = figure.subplots(1 + bool(metrics), 1, sharex=True, squeeze=False)[:, 0]
    _draw_losses(history, top)
    for axes in bottom:
        for name in metrics:
            axes.plot(history["steps"], history[name], marker="o", markersize=3, label=name)
        axes.legend(frameon=False)
    figure.axes[-1].set_xlabel("step")
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _plottable(history: History) -> list[str]:
    """The names of the metrics that are one number in each epoch."""
    if not history.epochs:
        return []
    return [
        name
        for name in history.epochs[-1].values
        if name != "eval_loss"
        and all(isinstance(record.values.get(name), int | float) for record in history.epochs)
    ]


def _draw_losses(history: History, axes: Axes) -> None:
    steps = range(1, len(history.losses) + 1)
    axes.plot(steps, history.losses, color="0.8", linewidth=0.8, label="loss of a step")
    if history.epochs:
        names = ["loss"]
        if all("eval_loss" in record.values for record in history.epochs):
            names.append("eval_loss")
        for name in names:
            label = name.replace("_", " ")
            axes.plot(history["steps"], history[name], marker="o", markersize=3, label=label)
    axes.set_ylabel("loss")
    axes.legend(frameon=False)
