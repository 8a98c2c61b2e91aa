"""Networks as torch's exporters write them: kernels find their places and change no number."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onnxtrain
from exporting import EXPORTERS, export
from onnxtrain.errors import OnnxTrainError

Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def needs_library(native_library: object) -> None:
    if native_library is None:
        pytest.skip("there is no compiler to build the native library")


class Parallel(nn.Module):
    """Two normalizations of one value, as in GPT-NeoX."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.a, self.b = nn.Linear(8, 16), nn.LayerNorm(16), nn.LayerNorm(16)
        self.p, self.q = nn.Linear(16, 24), nn.Linear(16, 24)
        for layer in (self.a, self.b):
            nn.init.uniform_(layer.weight, 0.5, 2.0)
            nn.init.normal_(layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.e(x)
        return self.p(self.a(h)) + torch.sin(self.q(self.b(h)))


def rotated(x: torch.Tensor, angles: torch.Tensor, chunks: bool) -> torch.Tensor:
    half = x.shape[-1] // 2
    a, b = x.chunk(2, -1) if chunks else (x[..., :half], x[..., half:])
    return x * angles.cos() + torch.cat([-b, a], -1) * angles.sin()


class Block(nn.Module):
    """Attention with fused projections, cut by `chunk`, and with rotary positions if asked for."""

    def __init__(self, *, rotary: str = "", heads: int = 4, width: int = 32) -> None:
        super().__init__()
        self.heads, self.rotary = heads, rotary
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        steps = torch.arange(12.0)[:, None] * torch.arange(1.0, 5.0).repeat(2) / 4
        self.register_buffer("angles", steps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        cut = self.qkv(x).chunk(3, -1)
        shape = batch, length, self.heads, width // self.heads
        q, k, v = (part.view(shape).transpose(1, 2) for part in cut)
        if self.rotary:
            q, k = (rotated(each, self.angles, self.rotary == "chunk") for each in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(mixed.transpose(1, 2).reshape(x.shape))


def fixed(net: nn.Module, x: torch.Tensor, opset: int = 17) -> onnx.ModelProto:
    """Export with the older exporter, all sizes fixed."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, (x,), file, dynamo=False, opset_version=opset)
    return onnx.load_from_string(file.getvalue())


def compare(model: Any, x: Array, target: Array, folder: Path, **how: Any) -> set[str]:
    """Take steps with kernels and without them; return the kernels that are used."""
    onnxtrain.prepare(model, folder, loss="mse", optimizer="sgd", **how)
    results = []
    kinds: set[str] = set()
    for native in (True, False):
        session = onnxtrain.TrainingSession(folder, native=native)
        session.set_learning_rate(0.05)
        losses = [float(np.ravel(session.step(x, target)[0])[0]) for _ in range(3)]
        results.append((losses, {n: p.data.copy() for n, p in session.state.parameters}))
        kinds.update(session.native)
    (native_losses, native_values), (losses, values) = results
    np.testing.assert_allclose(native_losses, losses, rtol=1e-5)
    for name, value in values.items():
        np.testing.assert_allclose(native_values[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    return kinds


def numbers(*shape: int) -> Array:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_two_normalizations_of_one_value(exporter: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = numbers(4, 6, 8)
    model = export(Parallel().eval(), torch.tensor(x), exporter)
    assert "LayerNormGradAgain" in compare(model, x, numbers(4, 6, 24), tmp_path / "a")


@pytest.mark.parametrize("opset", [13, 16])
def test_normalizations_of_before_opset_17(opset: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 3))
    x = numbers(4, 6, 8)
    kinds = compare(fixed(net.eval(), torch.tensor(x), opset), x, numbers(4, 6, 3), tmp_path / "a")
    assert {"LayerNormOnce", "LayerNormGradAgain"} <= kinds


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_attention_with_a_symbolic_batch(exporter: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = numbers(3, 12, 32)
    model = export(Block().eval(), torch.tensor(x), exporter)
    assert {"Attention", "AttentionGrad"} <= compare(model, x, x[::-1].copy(), tmp_path / "a")


@pytest.mark.parametrize("rotary", ["slice", "chunk"])
@pytest.mark.parametrize("is_fixed", [True, False], ids=["fixed", "symbolic"])
def test_rotary_positions(rotary: str, is_fixed: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, net = numbers(3, 12, 32), Block(rotary=rotary).eval()
    given = torch.tensor(x)
    model = fixed(net, given) if is_fixed else export(net, given, "torchscript")
    kinds = compare(model, x, x[::-1].copy(), tmp_path / "a")
    assert {"Attention", "AttentionGrad", "Rotary", "RotaryGrad"} <= kinds


@pytest.mark.parametrize("budget", [0.9, 0.8])
def test_a_budget_where_a_projection_is_cut(budget: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*[Block(width=64) for _ in range(2)])
    x = numbers(8, 64, 64)
    model = fixed(net.eval(), torch.tensor(x))
    compare(model, x, x[::-1].copy(), tmp_path / "a", memory_budget=budget)


class Projected(nn.Module):
    """The newer exporter writes it with tensors of sizes that onnxruntime refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rnn = nn.Linear(4, 4), nn.LSTM(4, 5, batch_first=True, proj_size=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(self.first(x))[0]


def test_a_body_that_onnxruntime_refuses_is_an_error_although_a_kernel_stands_in(
    tmp_path: Path,
) -> None:
    model = export(Projected().eval(), torch.ones(2, 6, 4), "dynamo")
    with pytest.raises(OnnxTrainError):
        onnxtrain.prepare(model, tmp_path / "a", loss="mse")
