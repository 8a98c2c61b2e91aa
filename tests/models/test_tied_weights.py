"""Weights that a network shares stay one parameter, however an exporter writes them."""

from __future__ import annotations

import copy
import io
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onnxtrain
from exporting import export

TOKENS, CLASSES, LENGTH = 50, 5, 6
EXPORTERS = ("torchscript-folded", "torchscript", "dynamo", "dynamo-optimized")


class Language(nn.Module):
    """The embedding is the output layer too."""

    def __init__(self, width: int, bias: bool = False) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(TOKENS, width), nn.Linear(width, width)
        self.head = nn.Linear(width, TOKENS, bias=bias)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mix(self.embed(x))))


class Repeated(nn.Module):
    """One layer that is called three times: as an attribute, or as all elements of a list."""

    def __init__(self, width: int, listed: bool = False) -> None:
        super().__init__()
        layer = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width, False))
        if listed:
            self.layers = nn.ModuleList([layer] * 3)
        else:
            self.layer = layer
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in getattr(self, "layers", None) or [self.layer] * 3:
            x = x + layer(x)
        return self.head(x)


class Copied(nn.Module):
    """Layers that begin as copies of one, and are parameters of their own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layer = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(3))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Encoder(nn.Module):
    """torch's own encoder, fresh: it copies its layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        nn.init.normal_(layer.self_attn.out_proj.bias)  # of zeros nothing is left in the file
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))


class Autoencoder(nn.Module):
    """The decoder is the encoder, transposed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder, self.bias = nn.Linear(width, 30), nn.Parameter(torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.t(), self.bias)


class PointwiseConvolution(nn.Module):
    """A linear layer is also a convolution of size one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.fc(x)).transpose(1, 2)
        return F.conv1d(y, self.fc.weight.unsqueeze(-1), self.fc.bias).transpose(1, 2)


class Positions(nn.Module):
    """Two layers that differ share one table."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(LENGTH, width))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(x + layer(x) @ self.table.t() @ self.table)
        return x


NETWORKS = {
    "language": Language,
    "language-bias": lambda width: Language(width, bias=True),
    "repeated": Repeated,
    "repeated-list": lambda width: Repeated(width, listed=True),
    "copied": Copied,
    "encoder": Encoder,
    "autoencoder": Autoencoder,
    "pointwise": PointwiseConvolution,
    "positions": Positions,
}


def _inputs(net: nn.Module, width: int) -> torch.Tensor:
    if isinstance(net, Language):
        return torch.randint(0, TOKENS, (4, LENGTH))
    return torch.randn(4, LENGTH, width)


def _export(net: nn.Module, x: torch.Tensor, exporter: str) -> onnx.ModelProto:
    if exporter != "torchscript-folded":
        return export(net, x, exporter)
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net.eval(), (x,), file, dynamo=False, input_names=["x"], output_names=["y"],
            opset_version=17, dynamic_axes={"x": {0: "batch"}},
        )  # fmt: skip
    return onnx.load_from_string(file.getvalue())


# The dynamo exporter merges equal tensors of up to 1,024 elements.
@pytest.mark.parametrize(("exporter", "width"), [*((e, 8) for e in EXPORTERS), (EXPORTERS[-1], 40)])
@pytest.mark.parametrize("name", NETWORKS)
def test_steps_equal_those_of_torch(name: str, exporter: str, width: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = NETWORKS[name](width)
    x = _inputs(net, width)
    model = _export(net, x, exporter)
    single = [t.name for t in model.graph.initializer if t.dims == [1]]  # the scale of attention
    artifacts = onnxtrain.prepare(
        model, tmp_path, loss="mse", optimizer="sgd:momentum=0.9", freeze=single
    )
    assert artifacts.parameter_count == sum(p.numel() for p in net.parameters())
    session = onnxtrain.TrainingSession.from_folder(tmp_path)
    session.set_learning_rate(0.1)
    reference = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        x = _inputs(net, width)
        target = torch.randn_like(net(x))
        session.step(x.numpy(), target.numpy())
        reference.zero_grad()
        F.mse_loss(net(x), target).backward()
        reference.step()
    exported = tmp_path / "exported.onnx"
    session.export_model_for_inferencing(exported, ["y"])
    (ours,) = ort.InferenceSession(exported).run(None, {"x": x.numpy()})
    theirs = net(x).detach().numpy()
    assert np.linalg.norm(ours - theirs) < 1e-4 * np.linalg.norm(theirs)
