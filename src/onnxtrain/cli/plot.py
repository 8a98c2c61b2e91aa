"""Draw the course of a training run, with matplotlib."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from onnxtrain.device.loop import History
from onnxtrain.errors import OnnxTrainError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(history: History, path: str | os.PathLike[str] | None = None) -> Figure:
    """Draw losses and metrics over the steps; write the picture if a path is given.

    The ending of the path says in which format: `.png`, `.svg`, `.pdf`.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise OnnxTrainError(
            "to plot a history needs matplotlib: pip install 'onnxtrain[cli]'"
        ) from None
    epochs = history.epochs
    drawn: list[str] = [
        name
        for record in epochs[-1:]
        for name in record.values
        if all(isinstance(each.values.get(name), int | float) for each in epochs)
    ]
    losses: list[str] = [n for n in ("loss", "eval_loss") if epochs and n in ("loss", *drawn)]
    metrics = [name for name in drawn if name != "eval_loss"]
    size = (6.4, 3.6 + 2.4 * bool(metrics))
    if path is None:
        # pyplot knows how to show a figure in a window or a notebook.
        from matplotlib import pyplot

        figure: Figure = pyplot.figure(figsize=size, layout="constrained")
    else:
        figure = Figure(figsize=size, layout="constrained")
    groups: list[list[str]] = [losses, metrics] if metrics else [losses]
    panels = figure.subplots(len(groups), 1, sharex=True, squeeze=False)[:, 0]
    panels[0].plot(
        history.loss_steps, history.losses, color="0.8", linewidth=0.8, label="loss of a step"
    )
    panels[0].set_ylabel("loss")
    for number, names in enumerate(groups):
        for name in names:
            label = name.replace("_", " ") if names is losses else name
            values = history[name]
            panels[number].plot(history["steps"], values, marker="o", markersize=3, label=label)
        panels[number].legend(frameon=False)
    panels[-1].set_xlabel("step")
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


plot_history = plot  # its name in onnxtrain.plots
