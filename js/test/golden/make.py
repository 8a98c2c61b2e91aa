"""Write the artifact folders that Node and the browser are compared with Python on.

Each folder has `expected.json`: the inputs as a formula, the losses of twenty steps in Python, and
the loss of evaluation after them; and `at10`, the checkpoint after ten of the steps. Run this after
a deliberate change of the graphs: `python js/test/golden/make.py`.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2] / "tests" / "models"))

from exporting import export  # noqa: E402
from zoo import Bert, Recurrent  # noqa: E402

import onnxtrain  # noqa: E402
from onnxtrain import artifacts  # noqa: E402
from onnxtrain.api import TrainingSession  # noqa: E402

STEPS, SAVED_AT, BATCH = 20, 10, 6


class ConvNet(nn.Module):
    """Convolutions with BatchNorm, and Dropout that is switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        )  # fmt: skip
        self.dropout, self.head = nn.Dropout(0.0), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(self.features(x).mean((2, 3))))


def mlp() -> nn.Module:
    """Two layers."""
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))


# Name → the network, the shape of one sample, and the number of words if they are words.
NETWORKS = {
    "mlp": (mlp, (12,), 0),
    "cnn": (ConvNet, (1, 8, 8), 0),
    "bert": (lambda: Bert(layers=1, width=16, heads=2, words=20), (7,), 20),
    "lstm": (lambda: Recurrent(nn.LSTM, False), (5, 6), 0),
}


def batch(step: int, shape: tuple[int, ...], words: int, classes: int) -> list[np.ndarray]:
    """Return numbers that any language computes alike."""
    count = BATCH * int(np.prod(shape))
    drawn = (np.arange(count) * 7919 + step * 104729) % 1009
    x = drawn % words if words else (drawn / 1009 * 2 - 1).astype(np.float32)
    labels = (np.arange(BATCH) * 5 + step * 3) % classes
    return [x.reshape(BATCH, *shape), labels]


def write(name: str, folder: Path) -> None:
    """Write one folder."""
    make, shape, words = NETWORKS[name]
    torch.manual_seed(0)
    net = make().train()
    x = torch.zeros(BATCH, *shape, dtype=torch.int64 if words else torch.float32)
    classes = net(x).shape[-1]
    artifacts.generate_artifacts(
        export(net, x, "torchscript"),
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder,
        additional_output_names=["y"],
    )
    onnxtrain.set_seed(7)
    session = TrainingSession.from_folder(folder)
    session.set_learning_rate(0.01)
    losses = []
    for step in range(STEPS):
        if step == SAVED_AT:
            session.save_checkpoint(folder / "at10")
        loss, _ = session.step(*batch(step, shape, words, classes))
        losses.append(float(loss))
    evaluation, _ = session.eval_step(*batch(STEPS, shape, words, classes))
    expected = {
        "shape": [BATCH, *shape], "words": words, "classes": classes, "learning_rate": 0.01,
        "inputs": session.input_names(), "losses": losses, "evaluation": float(evaluation),
    }  # fmt: skip
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    logging.getLogger("onnxtrain").setLevel(logging.ERROR)
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for each in NETWORKS:
        write(each, target / each)
