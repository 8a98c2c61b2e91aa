"""A new last layer on networks as torch's exporters write them: what comes out trains."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

import onnxtrain
from exporting import EXPORTERS, export
from onnxtrain import TrainingSession
from onnxtrain.artifacts import LossType, OptimType, generate_artifacts
from onnxtrain.offline.passes.replace_classifier import replace_classifier


class Permuted(nn.Module):
    """The weight is the left operand."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.weight = nn.Linear(8, 6), nn.Parameter(torch.randn(10, 6))

    def forward(self, x):
        return (self.weight @ torch.relu(self.body(x)).T).T


class View(nn.Module):
    """A Conv over a map, pooled, and a view with a computed batch."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.body, self.head = (
            nn.Conv2d(3, 6, 3, padding=1),
            nn.Conv2d(6, 10, size, padding=size // 2),
        )
        self.classes = 10 if size > 1 else -1

    def forward(self, x):
        y = torch.relu(self.head(torch.relu(self.body(x))))
        return y.mean((2, 3), keepdim=True).view(y.size(0), self.classes)


NETS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 10)), (8,)),
    "no-bias-softmax": (
        lambda: nn.Sequential(
            nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 10, bias=False), nn.Softmax(1)
        ), (8,),
    ),
    "left-operand": (Permuted, (8,)),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Dropout(0.1), nn.Linear(6, 10), nn.LogSoftmax(1),
        ), (3, 8, 8),
    ),
    "squeezenet": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(6, 10, 1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        ), (3, 8, 8),
    ),
    "conv-on-pooled": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Conv2d(6, 10, 1),
            nn.Flatten(),
        ), (3, 8, 8),
    ),
    "view": (lambda: View(1), (3, 8, 8)),
    "conv3x3": (lambda: View(3), (3, 8, 8)),
}  # fmt: skip


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", NETS)
def test_exported_networks(name: str, exporter: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, shape = NETS[name]
    given = export(make().eval(), torch.randn(6, *shape), exporter)
    replaced = replace_classifier(given, 3)
    onnx.checker.check_model(replaced.model, full_check=True)
    (declared,) = replaced.model.graph.output
    batch, classes = declared.type.tensor_type.shape.dim
    assert (batch.dim_param, classes.dim_value) == ("batch", 3)
    x = np.random.default_rng(1).normal(size=(6, *shape)).astype(np.float32)
    session = ort.InferenceSession(replaced.model.SerializeToString())
    (scores,) = session.run([replaced.output], {"x": x})
    assert scores.shape == (6, 3) and np.ptp(scores) > 0
    generate_artifacts(
        replaced.model, loss=LossType.CrossEntropyLoss, optimizer=OptimType.AdamW,
        artifact_directory=tmp_path,
    )  # fmt: skip
    training = TrainingSession.from_folder(tmp_path)
    training.set_learning_rate(0.01)
    labels = np.array([0, 1, 2, 0, 1, 2])
    losses = [float(training.step(x, labels)) for _ in range(60)]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_the_new_layer_is_what_trains(name: str, exporter: str, tmp_path: Path) -> None:
    """It is not taken for the layer whose parameters the exporter's notes still name."""
    make, shape = NETS[name]
    model = export(make().eval(), torch.randn(6, *shape), exporter)
    onnxtrain.prepare(model, tmp_path / "artifacts", classes=3, train="head.*")
    training = TrainingSession(tmp_path / "artifacts")
    assert {n for n, p in training.state.parameters if p.requires_grad} == {
        "head.weight",
        "head.bias",
    }
    before = training.get_parameter("head.bias")
    training.step(np.ones((6, *shape), np.float32), np.array([0, 1, 2, 0, 1, 2]))
    assert (training.get_parameter("head.bias") != before).all()


class Gates(nn.Module):
    """Two vectors of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.tanh(x + self.first) + self.second)


class Gated(nn.Module):
    """A network all of whose zeros the exporter stores once, as the bias of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(8, 8)
        self.below = nn.Linear(6, 8)
        self.gates = Gates()
        nn.init.zeros_(self.top.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(self.gates(self.below(x)))


def test_parameters_stored_with_those_replaced_stay_apart(tmp_path: Path) -> None:
    given = export(Gated().eval(), torch.randn(6, 5, 6), "dynamo-optimized")
    gates = {f"gates.{name}" for name in ("first", "second")}
    whole = onnxtrain.prepare(given, tmp_path, loss="mse")
    assert gates < set(whole.trainable)
    replaced = onnxtrain.prepare(given, tmp_path, classes=3, train="*", loss="mse")
    assert {*gates, "head.weight", "head.bias"} < set(replaced.trainable)
