"""Hessian-vector products of whole networks, against torch's double backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import onnxtrain
from gradcheck import check_emitted, run


class Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layer, self.head = kind(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        return self.head(self.layer(x)[0])


NETWORKS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)), (4, 5)),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.SiLU(), nn.AvgPool2d(2), nn.GroupNorm(2, 4),
            nn.Conv2d(4, 3, 3, stride=2), nn.GELU(), nn.MaxPool2d(1), nn.Flatten(),
            nn.Linear(3, 2), nn.LogSoftmax(-1),
        ),
        (2, 2, 6, 6),
    ),
    "lstm": (lambda: Recurrent(nn.LSTM), (2, 5, 3)),
    "gru": (lambda: Recurrent(nn.GRU), (2, 5, 3)),
    "rnn": (lambda: Recurrent(nn.RNN), (2, 5, 3)),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 4, 8),
    ),
}  # fmt: skip


class SquaredNorm(nn.Module):
    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Any) -> Any:
        return (self.network(x) ** 2).sum()


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.filterwarnings("ignore")  # of the exporter
def test_hessian_vector_product(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    network = SquaredNorm(make())  # in training mode: torch has no fused kernels then
    x, v = torch.randn(shape, requires_grad=True), torch.randn(shape)
    weights = list(network.parameters())
    with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
        (slope,) = torch.autograd.grad(network(x), x, create_graph=True)
        expected = torch.autograd.grad((slope * v).sum(), [x, *weights], allow_unused=True)

    path = tmp_path / "model.onnx"
    torch.onnx.export(
        network, (x,), path, dynamo=False, input_names=["x"], output_names=["y"], opset_version=18,
        training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False,
    )  # fmt: skip
    first = onnxtrain.gradient(path, ["x"])
    names = [n for n, _ in network.named_parameters()]
    held = {tensor.name for tensor in first.graph.initializer}
    wrt = ["x", *(n for n in names if n in held)]
    second = onnxtrain.gradient(first, wrt, of="x_grad")
    check_emitted(second)
    results = run(second, {"x": x.detach().numpy(), "x_grad_grad": v.numpy()})
    found = dict(zip(wrt, results[len(first.graph.output) :], strict=True))
    for key, right in zip(["x", *names], expected, strict=True):
        if key in found and right is not None:
            scale = float(right.abs().max()) + 1e-6
            np.testing.assert_allclose(found[key] / scale, right / scale, atol=2e-4, err_msg=key)


def test_third_derivative() -> None:
    """X is used four times in x⁴, and the names of its gradients do not collide."""
    text = """
        <ir_version: 8, opset_import: ["" : 18]>
        agraph (float[3] x) => (float y) {
            a = Mul(x, x)
            b = Mul(x, a)
            c = Mul(b, x)
            y = ReduceSum<keepdims=0>(c)
        }
    """
    model, of = onnx.parser.parse_model(text), "y"
    x = np.array([1, 2, -3], np.float32)
    feeds = {"x": x}
    for factor, power in ((4, 3), (12, 2), (24, 1)):
        before = {v.name for v in model.graph.input}
        model = onnxtrain.gradient(model, ["x"], of=of)
        check_emitted(model)
        feeds |= {v.name: np.ones_like(x) for v in model.graph.input if v.name not in before}
        of = model.graph.output[-1].name
        np.testing.assert_allclose(run(model, feeds)[-1], factor * x**power, rtol=1e-5)
