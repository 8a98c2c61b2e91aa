"""The networks of the study, in torch, trained in floats."""

from __future__ import annotations

import io
import logging
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from data import Array, Data


def _conv(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    )


class Inverted(nn.Module):
    """A block of MobileNetV2: wide in the middle, where each channel has a filter of its own."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = 4 * inputs
        self.expand, self.filter = _conv(inputs, wide, 1), _conv(wide, wide, 3, stride, wide)
        self.project = _conv(wide, outputs, 1)
        self.first, self.second = nn.ReLU6(), nn.ReLU6()
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x: Any) -> Any:
        y = self.project(self.second(self.filter(self.first(self.expand(x)))))
        return x + y if self.is_residual else y


class MobileNet(nn.Module):
    """MobileNetV2 in small, for images of 28 × 28."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.active = _conv(1, 16, 3, 2), nn.ReLU6()
        sizes = [(16, 16, 1), (16, 24, 2), (24, 24, 1), (24, 32, 1), (32, 32, 1)]
        self.blocks = nn.Sequential(*(Inverted(*size) for size in sizes))
        self.last, self.active_too = _conv(32, 128, 1), nn.ReLU6()
        self.pool, self.flat, self.head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)

    def forward(self, x: Any) -> Any:
        x = self.blocks(self.active(self.stem(x)))
        return self.head(self.flat(self.pool(self.active_too(self.last(x)))))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.heads, self.size = heads, width // heads

    def split(self, x: Any) -> Any:
        return x.view(-1, 28, self.heads, self.size).transpose(1, 2)

    def forward(self, x: Any) -> Any:
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        weights = torch.softmax(torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.size), -1)
        mixed = torch.matmul(weights, v).transpose(1, 2)
        return self.out(mixed.reshape(-1, 28, self.heads * self.size))


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(width), Attention(width, 4)
        self.between, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.active, self.down = nn.GELU(), nn.Linear(2 * width, width)

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.before(x))
        return x + self.down(self.active(self.up(self.between(x))))


class Transformer(nn.Module):
    """Two layers of attention over the rows of an image."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Linear(28, width)
        self.position = nn.Parameter(torch.randn(1, 28, width) * 0.02)
        self.layers = nn.Sequential(Layer(width), Layer(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Any) -> Any:
        return self.head(self.norm(self.layers(self.embed(x) + self.position)).mean(1))


class Separable(nn.Module):
    """A filter for each channel, then a mixture of the channels."""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.filter, self.mix = _conv(width, width, 3, stride, width), _conv(width, width, 1)
        self.first, self.second = nn.ReLU(), nn.ReLU()

    def forward(self, x: Any) -> Any:
        return self.second(self.mix(self.first(self.filter(x))))


class Audio(nn.Module):
    """A depthwise separable network over spectrograms, as keyword spotters are."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.stem, self.active = _conv(1, width, 5, 2), nn.ReLU()
        self.blocks = nn.Sequential(*(Separable(width, stride) for stride in (1, 2, 1, 1)))
        self.pool, self.flat, self.head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5)

    def forward(self, x: Any) -> Any:
        return self.head(self.flat(self.pool(self.blocks(self.active(self.stem(x))))))


# ---- training ------------------------------------------------------------------------------------


def train(
    net: nn.Module, data: Data, epochs: int, rate: float, seed: int, batch: int = 32,
    freeze: Callable[[nn.Module], None] | None = None,
) -> None:  # fmt: skip
    """Train all parameters; the rate falls to 0, and `freeze` is called for the last quarter."""
    x, labels = (torch.from_numpy(array) for array in data.train)
    optimizer = torch.optim.AdamW(net.parameters(), rate, weight_decay=0.0)
    total, step = epochs * math.ceil(len(labels) / batch), 0
    for epoch in range(epochs):
        order = np.random.default_rng([seed, epoch]).permutation(len(labels))
        for start in range(0, len(order), batch):
            if freeze is not None and step == 3 * total // 4:
                freeze(net)
            chosen = torch.from_numpy(order[start : start + batch])
            optimizer.param_groups[0]["lr"] = rate * (1 - step / total)
            loss = nn.functional.cross_entropy(net(x[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1


def folded(net: nn.Module) -> nn.Module:
    """Put BatchNorm into the convolution before it."""
    for module in list(net.modules()):
        if isinstance(module, nn.Sequential):
            for i in range(len(module) - 1):
                if isinstance(module[i], nn.Conv2d) and isinstance(module[i + 1], nn.BatchNorm2d):
                    module[i] = nn.utils.fuse_conv_bn_eval(module[i], module[i + 1])
                    module[i + 1] = nn.Identity()
    return net


def accuracy(net: Any, data: Data) -> float:
    """Return the part of the test samples that a module gets right."""
    x, labels = data.test
    with torch.no_grad():
        found = [net(torch.from_numpy(x[i : i + 250])).argmax(1) for i in range(0, len(x), 250)]
    return float(np.mean(torch.cat(found).numpy() == labels))


def export(net: nn.Module, sample: Array, path: Path) -> None:
    """Write the network as others would: for inference, with any size of batch."""
    logging.disable(logging.WARNING)
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net.eval(), (torch.from_numpy(sample),), file, dynamo=False, opset_version=17,
            input_names=["x"], output_names=["y"],
            dynamic_axes={"x": {0: "batch"}, "y": {0: "batch"}},
        )  # fmt: skip
    logging.disable(logging.NOTSET)
    path.write_bytes(file.getvalue())
