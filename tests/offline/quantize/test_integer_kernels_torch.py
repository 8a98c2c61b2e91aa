"""Networks from both exporters of torch: all their products run on integers."""

from __future__ import annotations

import copy
import io
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from deploying import compare_with_trained, deploy, float_operators
from torch import nn
from torch.nn import functional as F

import zoo
from exporting import EXPORTERS


class SmallMobileNet(nn.Module):
    """Three blocks of MobileNetV2."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8))
        self.blocks = nn.Sequential(
            zoo.InvertedResidual(8, 8, 1, 1, nn.ReLU6),
            zoo.InvertedResidual(8, 12, 2, 3, nn.ReLU6),
            zoo.InvertedResidual(12, 12, 1, 3, nn.ReLU6),
        )
        self.fc = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.blocks(F.relu6(self.stem(x))).mean([2, 3]))


class SmallResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.layers = nn.Sequential(zoo.BasicBlock(8, 8, 1), zoo.BasicBlock(8, 16, 2))
        self.fc = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(F.max_pool2d(F.relu(self.bn(self.conv(x))), 3, 2, 1))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class SqueezeExcite(nn.Module):
    """A block of MobileNetV3: Hardswish, and channels that are weighed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.depth = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 1, 1, groups=8)
        self.squeeze, self.excite = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.last, self.fc = nn.Conv2d(8, 8, 1), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.depth(F.hardswish(self.conv(x))))
        s = self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1))))
        x = self.last(x * torch.sigmoid(s))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Dense(nn.Module):
    """A block that concatenates, with a norm that cannot be folded."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.a, self.b = nn.Conv2d(8, 4, 3, padding=1), nn.Conv2d(12, 4, 3, padding=1)
        self.norm, self.fc = nn.BatchNorm2d(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv(x))
        x = torch.cat([x, F.relu(self.a(x))], 1)
        x = torch.cat([x, F.relu(self.b(x))], 1)
        return self.fc(F.avg_pool2d(F.relu(self.norm(x)), 16).flatten(1))


class Audio(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, 8, 9, 4), nn.BatchNorm1d(8), nn.ReLU(), nn.MaxPool1d(2),
            nn.Conv1d(8, 16, 3), nn.BatchNorm1d(16), nn.ReLU(),
        )  # fmt: skip
        self.fc = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.layers(x).mean(2))


class Encoder(nn.Module):
    """Two layers of a transformer over vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(zoo.EncoderLayer(16, 2), zoo.EncoderLayer(16, 2))
        self.fc = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.layers(x)[:, 0])


LAYOUT = ("ReorderInput", "ReorderOutput")  # around operators of floats
IMAGE, WAVE, VECTORS = (8, 3, 16, 16), (8, 1, 128), (8, 6, 16)
NETWORKS: dict[str, tuple[Any, tuple[int, ...], set[str]]] = {
    "MobileNetV2": (SmallMobileNet, IMAGE, set()),
    "ResNet": (SmallResNet, IMAGE, set()),
    "SqueezeExcite": (SqueezeExcite, IMAGE, {"HardSwish", "HardSigmoid", "Mul"}),
    "Dense": (Dense, IMAGE, {"BatchNormalization", "Relu", "AveragePool", *LAYOUT}),
    "CNN": (zoo.CNN, (8, 1, 14, 14), set()),
    "UNet": (zoo.UNet, (4, 2, 16, 16), {"ConvTranspose", "Max", "Resize", *LAYOUT}),
    "Audio": (Audio, WAVE, set()),
    "Encoder": (
        Encoder, VECTORS,
        {"SkipLayerNormalization", "Softmax", "Gelu", "Div", "Cast", "Pow"},
    ),
}  # fmt: skip


def exported(net: nn.Module, x: torch.Tensor, exporter: str) -> onnx.ModelProto:
    net = copy.deepcopy(net).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if exporter != "torchscript":
            made = torch.onnx.export(
                net, (x,), dynamo=True, dynamic_shapes=({0: torch.export.Dim("batch")},),
                verbose=False, optimize=exporter == "dynamo-optimized",
            )  # fmt: skip
            assert made is not None
            return made.model_proto
        file = io.BytesIO()
        torch.onnx.export(
            net, (x,), file, dynamo=False, dynamic_axes={"x": {0: "batch"}}, input_names=["x"],
            output_names=["y"],
        )  # fmt: skip
    return onnx.load_from_string(file.getvalue())


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", NETWORKS)
def test_products_run_on_integers(name: str, exporter: str, tmp_path: Path) -> None:
    make, shape, in_floats = NETWORKS[name]
    torch.manual_seed(0)
    net, x = make(), torch.randn(shape)
    net.train()
    with torch.no_grad():
        for _ in range(5):
            net(torch.randn(shape))  # statistics of its norms
    model = exported(net, x, exporter)
    feeds = {model.graph.input[0].name: x.numpy()}
    path = deploy(model, tmp_path, feeds)
    left = Counter({op: n for op, n in float_operators(path).items() if op not in in_floats})
    assert not left, f"{name} computes in floats: {dict(left)}"
    wrong = {v: part for v, part in compare_with_trained(path, feeds).items() if part > 1e-3}
    assert not wrong, f"more than one step away from the trained graph: {wrong}"
