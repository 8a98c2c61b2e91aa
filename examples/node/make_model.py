"""Make the model that `personalise.mjs` starts from: it knows how most people move.

A window of two seconds from an accelerometer (three axes, 32 readings a second) is one of four
activities. The signals are made up: each activity shakes the axes with its own rhythm and strength.
All layers but the last two are frozen.

    pip install 'onnxtrain[offline]' torch
    python examples/node/make_model.py
"""

from __future__ import annotations

import io
import shutil
import tempfile
import warnings
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import nn

import onnxtrain

FOLDER = Path(__file__).parent / "model"
RATE, LENGTH = 32, 64
# Rhythm (per second) and strength on the three axes: still, walking, running, on stairs.
ACTIVITIES = ((0.3, (0.1, 0.1, 0.1)), (1.9, (0.5, 0.3, 1.0)), (2.9, (1.0, 0.5, 2.2)),
              (1.4, (0.3, 0.7, 0.8)))  # fmt: skip


def windows(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Make up windows of many people, each with a rhythm and strength of their own."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, len(ACTIVITIES), count)
    seconds = np.arange(LENGTH) / RATE
    signals = []
    for label in labels:
        rhythm, strength = ACTIVITIES[label]
        phase = rng.uniform(0, 2 * np.pi, (3, 1))
        wave = np.sin(2 * np.pi * rhythm * rng.normal(1, 0.06) * seconds + phase)
        level = np.array(strength)[:, None] * rng.normal(1, 0.12, (3, 1))
        signals.append(level * wave + rng.normal(0, 0.1, (3, LENGTH)))
    return np.stack(signals).astype(np.float32), labels


def network() -> onnx.ModelProto:
    """Convolutions over time and two dense layers."""
    torch.manual_seed(0)
    net = nn.Sequential()
    net.add_module("conv1", nn.Conv1d(3, 16, 7, stride=2))
    net.add_module("relu1", nn.ReLU())
    net.add_module("conv2", nn.Conv1d(16, 24, 7, stride=2))
    net.add_module("relu2", nn.ReLU())
    net.add_module("pool", nn.AdaptiveMaxPool1d(1))
    net.add_module("flat", nn.Flatten())
    net.add_module("hidden", nn.Linear(24, 32))
    net.add_module("relu3", nn.ReLU())
    net.add_module("head", nn.Linear(32, len(ACTIVITIES)))
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net, (torch.zeros(2, 3, LENGTH),), file, dynamo=False, opset_version=18,
            input_names=["window"], output_names=["scores"],
            dynamic_axes={"window": {0: "batch"}, "scores": {0: "batch"}},
        )  # fmt: skip
    return onnx.load_from_string(file.getvalue())


def main() -> None:
    """Train on many people, and write the folder that one person goes on from."""
    onnxtrain.set_seed(1)
    with tempfile.TemporaryDirectory() as scratch:
        onnxtrain.prepare(network(), scratch, loss="cross_entropy", optimizer="adamw")
        session = onnxtrain.TrainingSession(scratch)
        session.set_learning_rate(0.003)
        onnxtrain.fit(session, windows(2000, seed=1), 8, batch_size=64, schedule="cosine", seed=1)
        print(onnxtrain.evaluate(session, windows(500, seed=2), "accuracy"))
        session.set_metadata(classes=["still", "walking", "running", "on stairs"])
        model = onnx.load_from_string(session.export_model_for_inferencing(None, ["scores"]) or b"")
    shutil.rmtree(FOLDER, ignore_errors=True)
    onnxtrain.prepare(model, FOLDER, train=["hidden.*", "head.*"])


if __name__ == "__main__":
    main()
