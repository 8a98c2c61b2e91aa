"""Gradients of whole networks, exported by torch, against torch's own."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch

import onnxtrain
from exporting import EXPORTERS, export, parameters_in
from gradcheck import check_emitted, run
from zoo import NETWORKS

# With the statistics of a small batch, rounding grows through fifty layers until it decides on
# which side of a kink some element lies, in torch as here; a smooth activation has no sides.
WITH_BATCH_NORM = ("ResNet18", "SmoothMobileNetV2")
CASES = [(name, exporter, False) for name in NETWORKS for exporter in EXPORTERS
         if not name.startswith("Smooth")] + [
    # The dynamo exporter writes BatchNormalization in inference mode whatever the module's mode;
    # bn="batch" puts it back. Its optimised form has folded BatchNormalization away.
    (name, exporter, True)
    for name in WITH_BATCH_NORM
    for exporter in ("torchscript", "dynamo")
]  # fmt: skip


def _network(name: str, training: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    net = NETWORKS[name][0]()
    for module in net.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # there is nothing to compare with chance
        if not name.startswith("Fresh"):
            _use(module)
    return net.train(training)


def _use(module: torch.nn.Module) -> None:
    """Make a normalization layer look trained.

    Fresh ones are nearly the identity, their parameters are equal (so that exporters store them
    once), and dead channels stay at exactly zero behind them.
    """
    if isinstance(module, torch.nn.BatchNorm2d | torch.nn.LayerNorm):
        torch.nn.init.uniform_(module.weight, 0.5, 1.5)
        torch.nn.init.normal_(module.bias, std=0.2)
    if isinstance(module, torch.nn.BatchNorm2d):
        module.running_mean.normal_(std=0.2)
        module.running_var.uniform_(0.5, 1.5)


def _torch_gradients(net, x, cotangent) -> dict[str, np.ndarray]:
    double = net.double()
    if x.is_floating_point():
        x = x.double().requires_grad_()
    wanted = dict(double.named_parameters()) | ({"x": x} if x.requires_grad else {})
    grads = torch.autograd.grad(double(x), list(wanted.values()), cotangent.double())
    net.float()
    return {name: g.numpy() for name, g in zip(wanted, grads, strict=True)}


@pytest.mark.parametrize(
    ("name", "exporter", "training"),
    CASES,
    ids=[f"{n}-{e}-{'training' if t else 'inference'}" for n, e, t in CASES],
)
def test_gradients_equal_those_of_torch(name: str, exporter: str, training: bool) -> None:
    net = _network(name, training)
    data = NETWORKS[name][1]
    model = export(net, data(3), exporter)
    found = parameters_in(model, net)
    if exporter != "dynamo-optimized":
        assert len(found) == len(list(net.named_parameters()))
    wrt = list(dict.fromkeys(initializer for initializer, _ in found.values()))
    if data(1).is_floating_point():
        wrt.append("x")
        found["x"] = ("x", False)
    extended = onnxtrain.gradient(model, wrt, bn="batch" if training else None)
    check_emitted(extended)
    assert_no_training_batch_norm(extended)
    for batch in (6, 9) if training else (2, 5):
        compare(net, extended, found, data(batch))


def compare(net, extended: onnx.ModelProto, found, x: torch.Tensor) -> None:
    with torch.no_grad():
        cotangent = torch.randn_like(net(x))
    expected = _torch_gradients(net, x, cotangent)
    feeds = {"x": x.numpy(), "y_grad": cotangent.numpy()}
    names = [o.name for o in extended.graph.output]
    actual = dict(zip(names, run(extended, feeds), strict=True))
    largest = max(np.linalg.norm(g) for g in expected.values())
    for name, (initializer, transposed) in found.items():
        ours = actual[f"{initializer}_grad"]
        theirs = expected[name].T if transposed else expected[name]
        # What is zero in exact arithmetic (the bias of a key in attention, a shift before
        # BatchNormalization) is noise in any: it is held against the largest gradient instead.
        scale = max(np.linalg.norm(theirs), 1e-3 * largest)
        error = np.linalg.norm(ours - theirs) / scale
        assert error < 1e-4, f"{name}: relative error {error:.2e}"


def assert_no_training_batch_norm(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        if node.op_type == "BatchNormalization":
            assert not any(a.name == "training_mode" and a.i for a in node.attribute)
