"""The networks of the benchmark, as a user of torch would write them.

There is no dropout in them: all peers shall compute the same numbers, so that the benchmark can
check that they do the same work.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Split(nn.Module):
    """A network in two parts: what is reused (`body`) and what a task brings (`head`)."""

    body: nn.Module
    head: nn.Module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class MLP(Split):
    """As many hidden layers of one width as asked for."""

    def __init__(self, inputs: int, width: int, classes: int, layers: int = 1) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for _ in range(layers):
            parts += [nn.Linear(inputs, width), nn.ReLU()]
            inputs = width
        self.body, self.head = nn.Sequential(*parts), nn.Linear(width, classes)


class LeNet(Split):
    """Two convolutions, pooling, two linear layers, for images of 28 × 28."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(64 * 12 * 12, 128), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(128, classes)


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x), inplace=True)


class ResNet18(Split):
    """With the stem for small images: a convolution 3 × 3 and no pooling."""

    def __init__(self, classes: int, width: int = 64) -> None:
        super().__init__()
        parts: list[nn.Module] = [
            nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
        ]  # fmt: skip
        inputs = width
        for stage in range(4):
            outputs = width << stage
            parts += [BasicBlock(inputs, outputs, 1 if stage == 0 else 2)]
            parts += [BasicBlock(outputs, outputs, 1)]
            inputs = outputs
        self.body = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(inputs, classes)


class InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.residual = stride == 1 and inputs == outputs
        parts: list[nn.Module] = []
        if expansion != 1:
            parts += conv_norm_relu6(inputs, hidden, 1)
        parts += conv_norm_relu6(hidden, hidden, 3, stride, groups=hidden)
        parts += [nn.Conv2d(hidden, outputs, 1, bias=False), nn.BatchNorm2d(outputs)]
        self.conv = nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(x) if self.residual else self.conv(x)


def conv_norm_relu6(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs), nn.ReLU6(inplace=True)]


class MobileNetV2(Split):
    # Expansion, width, how often, and the stride of the first.
    STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1),
              (6, 160, 3, 2), (6, 320, 1, 1))  # fmt: skip

    def __init__(self, classes: int) -> None:
        super().__init__()
        parts, inputs = conv_norm_relu6(3, 32, 3, 2), 32
        for expansion, width, count, stride in self.STAGES:
            for index in range(count):
                step = stride if index == 0 else 1
                parts.append(InvertedResidual(inputs, width, step, expansion))
                inputs = width
        parts += conv_norm_relu6(inputs, 1280, 1)
        self.body = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(1280, classes)


class EncoderLayer(nn.Module):
    """Attention and two linear layers, each with a norm behind it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (f(x).view(shape).transpose(1, 2) for f in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v)
        mixed = mixed.transpose(1, 2).reshape(batch, length, width)
        x = self.norm1(x + self.out(mixed))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Embeddings(nn.Module):
    def __init__(self, words: int, length: int, width: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("index", torch.arange(length), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.norm(self.words(tokens) + self.places(self.index[: tokens.shape[1]]))


class FirstPlace(nn.Module):
    """What the encoder says of the first token, and the classifier on it."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.pool, self.out = nn.Linear(width, width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.pool(x[:, 0])))


class Bert(Split):
    def __init__(
        self, words: int, length: int, classes: int, layers: int, width: int = 128, heads: int = 4
    ) -> None:
        super().__init__()
        encoder = (EncoderLayer(width, heads) for _ in range(layers))
        self.body = nn.Sequential(Embeddings(words, length, width), *encoder)
        self.head = FirstPlace(width, classes)


class LastState(nn.Module):
    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, hidden, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0][:, -1]


class LSTMClassifier(Split):
    def __init__(self, inputs: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.body, self.head = LastState(inputs, hidden), nn.Linear(hidden, classes)


def build(name: str, options: dict[str, Any]) -> Split:
    """Make a network by the name of its class."""
    made: Split = globals()[name](**options)
    return made
