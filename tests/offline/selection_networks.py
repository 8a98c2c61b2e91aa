"""Torch networks with parameters and buffers of many kinds, to see which of them train."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn


class Convolutional(nn.Module):
    """BatchNorm, PReLU and a Linear with one output, behind mean and standard deviation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8)
        self.act, self.fc = nn.PReLU(8), nn.Linear(8, 1)
        self.register_buffer("pixel_mean", torch.rand(1, 3, 1, 1))
        self.register_buffer("pixel_std", torch.rand(1, 3, 1, 1) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x - self.pixel_mean) / self.pixel_std
        x = F.relu6(self.bn1(self.conv1(x)))
        return self.fc(self.act(self.bn2(self.conv2(x))).mean((2, 3)))


class Preactivated(nn.Module):
    """A fresh residual network: its scales and running variances are all ones, and merged."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv1, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.last = nn.Conv2d(8, 8, 3, padding=1), nn.LayerNorm(8)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem(x))
        h = self.conv1(F.relu(self.norm1(x)))
        x = x + self.conv2(F.relu(self.norm2(F.relu(h))))
        return self.fc(self.last(x.mean((2, 3))))


class Normalized(nn.Module):
    """Every normalization of torch, and a weight norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 3, padding=1))
        self.group, self.one = nn.GroupNorm(2, 8), nn.GroupNorm(1, 8)
        self.instance, self.layer = nn.InstanceNorm2d(8, affine=True), nn.LayerNorm([8, 6, 6])
        self.root, self.fc = RootNorm(8), nn.Linear(8, 5, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.instance(self.one(self.group(self.conv(x)))))
        return self.fc(self.root(x.mean((2, 3))))


class RootNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class OwnNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma, self.beta = (nn.Parameter(torch.randn(width)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True)
        return self.gamma * x / (x.std(-1, keepdim=True) + 1e-6) + self.beta


class Sinusoids(nn.Module):
    def __init__(self, width: int, length: int = 32) -> None:
        super().__init__()
        angles = torch.arange(length)[:, None] / 1e4 ** (torch.arange(0, width, 2) / width)
        table = torch.stack([angles.sin(), angles.cos()], -1).reshape(1, length, width)
        self.register_buffer("pe", table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.pe[:, : x.size(1)]


class Text(nn.Module):
    """A pre-norm transformer layer with a layer scale, a gate, a mask buffer and clamp bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 16, padding_idx=0), Sinusoids(16)
        self.norm1, self.norm2 = RootNorm(16), OwnNorm(16)
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16)
        self.layer_scale = nn.Parameter(torch.full((16,), 0.1))
        self.gate = nn.Parameter(torch.zeros(1))
        self.head = nn.Linear(16, 4)
        self.register_buffer("mask", torch.full((32, 32), -1e4).triu(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.places(self.words(tokens) * 4.0)
        h = self.norm1(x)
        batch, length, width = h.shape
        q, k, v = (
            f(h).view(batch, length, 2, 8).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(8) + self.mask[:length, :length]
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.gate * self.out(mixed)
        x = x + self.layer_scale * self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(x[:, 0].clamp(-5, 5))


class Vision(nn.Module):
    """Patches, a class token, learned positions and torch's own encoder, whose layers are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        self.positions = nn.Parameter(torch.randn(1, 17, 16))
        layer = nn.TransformerEncoderLayer(
            16, 2, 32, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 3)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter)  # the optimising exporter drops zeros

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.encoder(x))[:, 0])


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], bidirectional: bool) -> None:
        super().__init__()
        self.rnn = kind(6, 5, 2, batch_first=True, bidirectional=bidirectional)
        self.fc = nn.Linear(10 if bidirectional else 5, 3)
        self.register_buffer("input_scale", torch.rand(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.rnn(x * self.input_scale)[0][:, -1])


class Regression(nn.Module):
    """Clamped inputs, and outputs in the units of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        self.register_buffer("output_mean", torch.rand(2))
        self.register_buffer("output_std", torch.rand(2))
        self.register_buffer("lowest", torch.tensor(-1.0))
        self.register_buffer("highest", torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.minimum(torch.maximum(x, self.lowest), self.highest)
        return self.layers(x) * self.output_std + self.output_mean


class Rotary(nn.Module):
    """Frequencies are multiplied with positions, for sines and cosines."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.qk = nn.Embedding(40, 16), nn.Linear(16, 32, bias=False)
        self.value, self.head = nn.Linear(16, 16), nn.Linear(16, 3)
        self.register_buffer("frequencies", 1 / 1e4 ** (torch.arange(0, 16, 2) / 16))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, count = self.words(tokens), tokens.shape[0]
        places = torch.arange(tokens.shape[1], dtype=torch.float32)[None, None]
        angles = self.frequencies[None, :, None].expand(count, -1, 1) @ places.expand(count, 1, -1)
        angles = torch.cat([angles, angles], 1).transpose(1, 2)
        cos, sin = angles.cos(), angles.sin()

        def rotate(z: torch.Tensor) -> torch.Tensor:
            a, b = z.chunk(2, -1)
            return z * cos + torch.cat([-b, a], -1) * sin

        q, k = (rotate(z) for z in self.qk(x).chunk(2, -1))
        return self.head(((q @ k.transpose(1, 2) / 4).softmax(-1) @ self.value(x)).mean(1))


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.fc = nn.EmbeddingBag(30, 8, mode="mean"), nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.fc(self.bag(tokens))


class Products(nn.Module):
    """Einsum with a bias of two axes, a plain matmul, and a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.heads_bias = (
            nn.Parameter(torch.randn(6, 2, 4)),
            nn.Parameter(torch.randn(2, 4)),
        )
        self.out, self.out_bias = nn.Parameter(torch.randn(8, 3)), nn.Parameter(torch.randn(3))
        self.up = nn.ConvTranspose1d(2, 3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(torch.einsum("ne,ehd->nhd", x, self.heads) + self.heads_bias)
        wide = self.up(x[:, None].expand(-1, 2, -1)).mean(2)
        return torch.matmul(h.flatten(1), self.out) + self.out_bias + wide


def _images(size: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(2, 3, size, size)


def _sequences() -> torch.Tensor:
    return torch.randn(2, 7, 6)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "convolutional": (Convolutional, _images(8)),
    "preactivated": (Preactivated, _images(8)),
    "normalized": (Normalized, _images(6)),
    "text": (Text, lambda: torch.randint(1, 50, (2, 7))),
    "vision": (Vision, _images(16)),
    "LSTM": (lambda: Recurrent(nn.LSTM, False), _sequences),
    "GRU": (lambda: Recurrent(nn.GRU, True), _sequences),
    "regression": (Regression, lambda: torch.randn(2, 6)),
    "rotary": (Rotary, lambda: torch.randint(0, 40, (2, 9))),
    "bag": (Bag, lambda: torch.randint(0, 30, (2, 5))),
    "products": (Products, lambda: torch.randn(2, 6)),
}
