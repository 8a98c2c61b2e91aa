"""The networks that gradients are compared on: small in width, whole in structure."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(20, 30), nn.Linear(30, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.relu(self.fc1(x)))


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(16 * 6 * 6, 32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = F.max_pool2d(x, 2).flatten(1)
        return self.fc2(F.relu(self.fc1(x)))


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet18(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        widths = [width, 2 * width, 4 * width, 8 * width]
        layers, inputs = [], width
        for index, outputs in enumerate(widths):
            stride = 1 if index == 0 else 2
            layers += [BasicBlock(inputs, outputs, stride), BasicBlock(outputs, outputs, 1)]
            inputs = outputs
        self.layers = nn.Sequential(*layers)
        self.fc = nn.Linear(inputs, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(F.relu(self.bn1(self.conv1(x))))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class InvertedResidual(nn.Module):
    def __init__(
        self, inputs: int, outputs: int, stride: int, expansion: int, act: type[nn.Module]
    ) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.residual = stride == 1 and inputs == outputs
        expand = [nn.Conv2d(inputs, hidden, 1, bias=False), nn.BatchNorm2d(hidden), act()]
        self.conv = nn.Sequential(
            *(expand if expansion != 1 else []),
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            act(),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(x) if self.residual else self.conv(x)


class MobileNetV2(nn.Module):
    """The 17 blocks of MobileNetV2 with every width divided by `slim`."""

    SETTINGS = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1),
                (6, 160, 3, 2), (6, 320, 1, 1))  # fmt: skip

    def __init__(self, act: type[nn.Module] = nn.ReLU6, slim: int = 4, classes: int = 10) -> None:
        super().__init__()
        inputs, last = 32 // slim, 1280 // slim
        layers: list[nn.Module] = [
            nn.Conv2d(3, inputs, 3, 2, 1, bias=False), nn.BatchNorm2d(inputs), act(),
        ]  # fmt: skip
        for expansion, width, repeats, stride in self.SETTINGS:
            for index in range(repeats):
                step = stride if index == 0 else 1
                layers.append(InvertedResidual(inputs, width // slim, step, expansion, act))
                inputs = width // slim
        layers += [nn.Conv2d(inputs, last, 1, bias=False), nn.BatchNorm2d(last), act()]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(last, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x).mean([2, 3]))


class Bert(nn.Module):
    """Embeddings and a stack of post-norm encoder layers, attention written out."""

    def __init__(self, layers: int = 2, width: int = 32, heads: int = 4, words: int = 100) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(64, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(EncoderLayer(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.words(tokens) + self.places(places))
        for layer in self.layers:
            x = layer(x)
        return self.head(torch.tanh(x[:, 0]))


class EncoderLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            f(x).reshape(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width)
        x = self.norm1(x + self.out(mixed))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class UNet(nn.Module):
    """Two levels; one way up is Resize, the other ConvTranspose."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up1 = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.join1, self.join2 = nn.Conv2d(16, 6, 3, padding=1), nn.Conv2d(12, 4, 3, padding=1)
        self.out = nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = F.relu(self.down1(x))
        b = F.relu(self.down2(F.max_pool2d(a, 2)))
        c = F.relu(self.middle(F.avg_pool2d(b, 2)))
        b = F.relu(self.join1(torch.cat([self.up1(c), b], 1)))
        b = F.interpolate(b, scale_factor=2, mode="bilinear", align_corners=False)
        return self.out(F.relu(self.join2(torch.cat([b, a], 1))))


class Recurrent(nn.Module):
    """A classifier on the last state of two recurrent layers."""

    def __init__(self, kind: type[nn.RNNBase], bidirectional: bool) -> None:
        super().__init__()
        self.rnn = kind(6, 10, num_layers=2, batch_first=True, bidirectional=bidirectional)
        self.fc = nn.Linear(20 if bidirectional else 10, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.rnn(x)
        return self.fc(y[:, -1] + y.mean(1))


def images(channels: int, size: int):
    return lambda batch: torch.randn(batch, channels, size, size)


NETWORKS = {
    "MLP": (MLP, lambda batch: torch.randn(batch, 20)),
    "CNN": (CNN, images(1, 14)),
    "ResNet18": (ResNet18, images(3, 16)),
    "MobileNetV2": (MobileNetV2, images(3, 64)),
    "SmoothMobileNetV2": (lambda: MobileNetV2(nn.SiLU), images(3, 64)),
    "FreshBert": (Bert, lambda batch: torch.randint(0, 100, (batch, 12))),
    "Bert": (Bert, lambda batch: torch.randint(0, 100, (batch, 12))),
    "UNet": (UNet, images(2, 16)),
    "BidirectionalLSTM": (lambda: Recurrent(nn.LSTM, True), lambda batch: torch.randn(batch, 7, 6)),
    "GRU": (lambda: Recurrent(nn.GRU, False), lambda batch: torch.randn(batch, 7, 6)),
}
