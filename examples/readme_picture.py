"""Draw docs/images/personalise.svg, the picture of the README, from a run of the demo.

    python examples/readme_picture.py

The demo uses fixed seeds, so the picture changes only when the results do.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("svg")
from matplotlib import pyplot as plt

from onnxtrain.cli.demo.digits import load

TARGET = Path(__file__).parents[1] / "docs" / "images" / "personalise.svg"
STYLE = {
    "svg.fonttype": "path", "svg.hashsalt": "onnxtrain", "font.family": "DejaVu Sans",
    "font.size": 11, "axes.spines.top": False, "axes.spines.right": False,
    "figure.facecolor": "white", "savefig.facecolor": "white",
}  # fmt: skip
BLUE, GREY, INK = "#0072B2", "#8c959f", "#24292f"
SHOWN = (1, 2, 4, 5, 7)


def run_demo(folder: Path) -> tuple[dict, list[float]]:
    """Return the figures of the demo, and the accuracy on the user's digits after each epoch."""
    command = [sys.executable, "-m", "onnxtrain", "demo", "--output", str(folder), "--json", "-q"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    device = json.loads((folder / "device" / "device.json").read_text())
    epochs = device["history"]["epochs"]
    return json.loads(done.stdout), [epoch["values"]["accuracy"] for epoch in epochs]


def draw_digits(figure) -> None:
    """Two rows of digits on the left, placed by hand: they are square."""
    digits, (width, height) = load(), figure.get_size_inches()
    names = ("what the model\nlearned from", "how this\nuser writes")
    side = 0.75
    for row, (name, samples) in enumerate(zip(names, (digits.people, digits.user), strict=True)):
        bottom = 1.75 - 1.05 * row
        for column, digit in enumerate(SHOWN):
            at = (1.4 + 0.82 * column) / width, bottom / height
            axes = figure.add_axes((*at, side / width, side / height), xticks=[], yticks=[])
            index = int(np.flatnonzero(samples.labels == digit)[0])
            axes.imshow(samples.images[index, 0], cmap="Greys", vmin=0, vmax=1)
            axes.spines[:].set(visible=True, color="#d0d7de")
        figure.text(1.3 / width, (bottom + side / 2) / height, name, ha="right", va="center",
                    color=INK)  # fmt: skip


def draw_accuracy(figure, before: float, after: list[float]) -> None:
    """The accuracy as shipped, and after each epoch of training on the device."""
    axes = figure.add_axes((0.62, 0.19, 0.36, 0.68))
    values = 100 * np.array([before, *after])
    last = len(after)
    axes.axhline(values[0], color=GREY, linestyle="--", linewidth=1.2)
    axes.plot(values, color=BLUE, marker="o", markersize=4.5, linewidth=2, clip_on=False)
    axes.axvline(last / 2, color=GREY, linewidth=0.8, linestyle=":")
    axes.text(last / 2 + 0.15, 61, "device switched off,\nrun resumed", color=INK, fontsize=9.5)
    axes.text(last, values[0] - 2, "as shipped", ha="right", va="top", color=INK, fontsize=9.5)
    axes.annotate(f"{values[0]:.0f} %", (0, values[0]), xytext=(8, -15),
                  textcoords="offset points", weight="bold", color=INK)  # fmt: skip
    axes.annotate(f"{values[-1]:.0f} %", (last, values[-1]), xytext=(0, 9), ha="right",
                  textcoords="offset points", weight="bold", color=BLUE)  # fmt: skip
    axes.set(ylim=(40, 100), xlim=(0, last), xlabel="epochs on the device")
    axes.set_title("this user's digits read correctly, %", fontsize=11, color=INK)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        figures, after = run_demo(Path(folder))
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(10, 3.2))
        draw_digits(figure)
        draw_accuracy(figure, figures["user_before"], after)
        figure.savefig(TARGET, metadata={"Date": None})
        if len(sys.argv) > 1:  # a bitmap to look at
            figure.savefig(sys.argv[1], dpi=110)


if __name__ == "__main__":
    main()
