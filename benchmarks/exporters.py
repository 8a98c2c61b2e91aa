"""What folding by exporters costs: digits, learnt from scratch, exported by torch in several ways.

    python benchmarks/exporters.py          # needs torch, onnxscript and scikit-learn

Prints, for each export, how many BatchNormalizations are left and the accuracy on a third of the
data: mean and standard deviation of five runs. docs/exporting.md shows the figures.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import warnings
from typing import Any

import numpy as np
import onnx
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import onnxtrain

RUNS, EPOCHS, LEARNING_RATE = 5, 10, 0.003
TRAINING = {"training": torch.onnx.TrainingMode.TRAINING, "do_constant_folding": False}
# Arguments of the export, and of prepare.
WAYS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"dynamo": True}, {}),
    ({"dynamo": True, "optimize": False}, {}),
    ({"dynamo": True, "optimize": False}, {"bn": "batch"}),
    ({"dynamo": False}, {}),
    ({"dynamo": False, **TRAINING}, {}),
]


def network(seed: int) -> nn.Module:
    """Three convolutions with BatchNormalization, and a linear layer."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in ((1, 16), (16, 32), (32, 64)):
        stride = 1 if before == 1 else 2
        layers += [nn.Conv2d(before, after, 3, padding=1, stride=stride, bias=False),
                   nn.BatchNorm2d(after), nn.ReLU()]  # fmt: skip
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).eval()


def export(net: nn.Module, dynamo: bool, **options: Any) -> onnx.ModelProto:
    """Return a network as ONNX; what the exporters print is dropped."""
    names = {"input_names": ["image"], "output_names": ["scores"]}
    example, file = (torch.zeros(4, 1, 8, 8),), io.BytesIO()
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        if dynamo:
            made = torch.onnx.export(
                net, example, dynamo=True, dynamic_shapes=({0: "batch"},), **names, **options
            )
            return made.model_proto
        axes = {"image": {0: "batch"}, "scores": {0: "batch"}}
        torch.onnx.export(net, example, file, dynamo=False, dynamic_axes=axes, **names, **options)
    return onnx.load_from_string(file.getvalue())


def accuracy(model: onnx.ModelProto, options: dict[str, Any], seed: int) -> float:
    """Train a model, and return how much of the unseen digits it reads."""
    digits = load_digits()
    images = (digits.images[:, None] / 16).astype(np.float32)
    x, unseen, y, answers = train_test_split(
        images, digits.target, test_size=1 / 3, random_state=seed, stratify=digits.target
    )
    with tempfile.TemporaryDirectory() as folder:
        onnxtrain.prepare(model, folder, **options)
        session = onnxtrain.TrainingSession(folder)
        session.set_learning_rate(LEARNING_RATE)
        onnxtrain.fit(session, (x, y), EPOCHS, schedule="cosine", seed=seed, progress=False)
        return float((session.predict(unseen).argmax(axis=1) == answers).mean())


def main() -> None:
    warnings.simplefilter("ignore")
    for exported, prepared in WAYS:
        models = [export(network(seed), **exported) for seed in range(RUNS)]
        found = [100 * accuracy(model, prepared, seed) for seed, model in enumerate(models)]
        left = sum(node.op_type == "BatchNormalization" for node in models[0].graph.node)
        settings = ", ".join(f"{key}={value}" for key, value in (exported | prepared).items())
        print(f"{settings}: {left} left, {np.mean(found):.1f} ± {np.std(found):.1f} %")


if __name__ == "__main__":
    main()
