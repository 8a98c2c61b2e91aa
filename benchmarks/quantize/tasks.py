"""The tasks of the study: a network, its data, and how it was trained in floats."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networks
import torch
from torch import nn
from ways import Trained

import data

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Task:
    """A network to train in floats, and then for integers."""

    title: str
    network: Callable[[Path], Any]
    data: Callable[[Path, int], data.Data]
    epochs: int  # in floats
    rate: float
    more: int  # epochs for integers, of which int4 takes twice as many
    fine_rate: float
    keeps_statistics: bool = False  # of BatchNorm: those of a pretrained network stay

    def trained(self, folder: Path, seed: int) -> Trained:
        """Train the network, unless it was trained before."""
        folder.mkdir(parents=True, exist_ok=True)
        given = self.data(folder.parent, seed)
        weights, model = folder / "net.pth", folder / "float.onnx"
        if not model.exists():
            torch.manual_seed(seed)
            net = self.network(folder.parent)
            net.train(not self.keeps_statistics)
            networks.train(net, given, self.epochs, self.rate, seed)
            torch.save(net.state_dict(), weights)
            networks.export(net, given.train[0][:2], model)

        def again() -> Any:
            net = self.network(folder.parent)
            net.load_state_dict(torch.load(weights))
            return net

        return Trained(model, again, given, self.more, self.fine_rate, seed, self.keeps_statistics)


def pretrained(folder: Path) -> Any:
    """Return MobileNetV2 with its ImageNet weights, and a new last layer."""
    sys.path.insert(0, str(ROOT / "tests" / "models"))
    import zoo

    net = zoo.MobileNetV2(slim=1, classes=1000)
    stored = torch.load(data.mobilenet_weights(folder), map_location="cpu")
    net.load_state_dict(dict(zip(net.state_dict(), stored.values(), strict=True)))
    net.classifier = nn.Linear(1280, 10)
    return net


TASKS = {
    "mobilenet": Task(
        "small MobileNetV2, Fashion-MNIST", lambda _: networks.MobileNet(),
        lambda folder, _: data.fashion(folder, 12_000, 10_000), 6, 3e-3, 1, 5e-4,
    ),
    "transformer": Task(
        "transformer, MNIST digits", lambda _: networks.Transformer(),
        lambda _, seed: data.digits(seed, 1_500), 12, 2e-3, 3, 5e-4,
    ),
    "audio": Task(
        "keyword spotter's network, spoken languages", lambda _: networks.Audio(),
        lambda folder, _: data.sounds(folder), 4, 3e-3, 1, 5e-4,
    ),
    "pretrained": Task(
        "MobileNetV2 with ImageNet weights, Fashion-MNIST", pretrained,
        lambda folder, _: data.large_fashion(folder, 1_500, 1_000), 5, 3e-4, 2, 5e-5,
        keeps_statistics=True,
    ),
}  # fmt: skip
