"""Write the artifacts of a network to a folder, or time steps with them.

`networks.py write NETWORK FOLDER`, `networks.py run NETWORK FOLDER STEPS`; the networks are `cnn`
and `mlp`.
"""

from __future__ import annotations

import io
import json
import sys
import time
import warnings

import numpy as np

from onnxtrain.api import TrainingSession

BATCH = 64
SHAPES = {"cnn": (1, 28, 28), "mlp": (784,)}


def write(name: str, folder: str) -> None:
    """Write the artifacts."""
    import onnx
    import torch
    from torch import nn

    from onnxtrain import artifacts

    torch.manual_seed(0)
    nets = {
        "cnn": nn.Sequential(
            nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10),
        ),
        "mlp": nn.Sequential(nn.Linear(784, 500), nn.ReLU(), nn.Linear(500, 10)),
    }  # fmt: skip
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            nets[name], (torch.zeros(BATCH, *SHAPES[name]),), file, dynamo=False, opset_version=18,
            input_names=["x"], output_names=["y"], dynamic_axes={"x": {0: "batch"}},
        )  # fmt: skip
    artifacts.generate_artifacts(
        onnx.load_from_string(file.getvalue()),
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder,
    )


def run(name: str, folder: str, steps: int) -> None:
    """Print the milliseconds of each step."""
    session = TrainingSession.from_folder(folder)
    rng = np.random.default_rng(0)
    x = rng.random((BATCH, *SHAPES[name]), np.float32)
    labels = rng.integers(0, 10, BATCH)
    times = []
    for _ in range(steps + 3):
        began = time.perf_counter()
        session.step(x, labels)
        times.append(1000 * (time.perf_counter() - began))
    print(json.dumps(times[3:]))


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(*sys.argv[2:])
    else:
        run(*sys.argv[2:4], int(sys.argv[4]))
