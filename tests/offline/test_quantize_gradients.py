"""Gradients of quantization-aware training against torch's own fake quantization."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from torch.nn import functional as F

from graphs import model, value
from onnxtrain import Quantize, TrainingSession, prepare

node = helper.make_node
RNG = np.random.default_rng(3)
X = RNG.standard_normal((16, 3, 6, 6)).astype(np.float32)
LABELS = RNG.integers(0, 5, 16)
SHAPES = {
    "w1": (8, 3, 3, 3), "b1": (8,), "w2": (8, 1, 3, 3), "b2": (8,), "w3": (8, 8, 1, 1), "b3": (8,),
    "wf": (5, 8), "bf": (5,),
}  # fmt: skip
WEIGHTS = {
    name: (RNG.standard_normal(shape) / math.sqrt(math.prod(shape[1:]))).astype(np.float32)
    for name, shape in SHAPES.items()
}
BIASES = ("b1", "b2", "b3", "bf")


def network() -> onnx.ModelProto:
    """Relu, ReLU6, a depthwise layer, a residual sum, an average."""
    return model(
        [
            node("Conv", ["x", "w1", "b1"], ["c1"], pads=[1] * 4),
            node("Relu", ["c1"], ["r1"]),
            node("Conv", ["r1", "w2", "b2"], ["c2"], pads=[1] * 4, group=8),
            node("Clip", ["c2", "zero", "six"], ["r2"]),
            node("Conv", ["r2", "w3", "b3"], ["c3"]),
            node("Add", ["c3", "r1"], ["s"]),
            node("GlobalAveragePool", ["s"], ["g"]),
            node("Flatten", ["g"], ["f"]),
            node("Gemm", ["f", "wf", "bf"], ["y"], transB=1),
        ],
        [value("x", ["batch", 3, 6, 6])],
        [value("y", ["batch", 5])],
        {**WEIGHTS, "zero": np.float32(0), "six": np.float32(6)},
    )


class Fake:
    """The same network in torch, with its fake quantization where onnxtrain quantizes."""

    def __init__(self, ranges: dict[str, tuple[float, float]] | None, learned: bool) -> None:
        self.weights = {n: torch.tensor(w, requires_grad=True) for n, w in WEIGHTS.items()}
        self.ranges, self.learned = ranges, learned
        self.seen: dict[str, torch.Tensor] = {}
        self.shifts: dict[str, torch.Tensor] = {}

    def quantized(self, name: str, x: torch.Tensor) -> torch.Tensor:
        self.seen[name] = x
        if self.ranges is None:
            return x
        low, high = (np.float32(v) for v in self.ranges[name])
        scale = np.float32(high - low) / np.float32(255)
        zero = int(np.clip(np.rint(-low / scale), 0, 255))
        if not self.learned:
            return torch.fake_quantize_per_tensor_affine(x, float(scale), zero, 0, 255)
        share = 1 / math.sqrt(math.prod(x.shape[1:]) * 255)
        step = self._step(name, np.array([scale]))
        point = torch.tensor([float(zero)], requires_grad=True)
        return torch._fake_quantize_learnable_per_tensor_affine(x, step, point, 0, 255, share)

    def weight(self, name: str) -> torch.Tensor:
        w = self.weights[name]
        if self.ranges is None:
            return w
        largest = w.detach().abs().flatten(1).max(1).values
        scale = (largest * np.float32(1 / 127)).numpy()
        zeros = torch.zeros(len(scale))
        if not self.learned:
            zeros = zeros.to(torch.int32)
            steps = torch.tensor(scale)
            return torch.fake_quantize_per_channel_affine(w, steps, zeros, 0, -128, 127)
        share = 1 / math.sqrt(w[0].numel() * 127)
        step = self._step(name, scale)
        return torch._fake_quantize_learnable_per_channel_affine(
            w, step, zeros.requires_grad_(), 0, -128, 127, share
        )

    def _step(self, name: str, scale: np.ndarray) -> torch.Tensor:
        """A scale s·exp(t), as a tensor with a gradient for t."""
        shift = torch.zeros(len(scale), requires_grad=True)
        self.shifts[name] = shift
        return torch.tensor(scale) * torch.exp(shift)

    def __call__(self, x: np.ndarray) -> torch.Tensor:
        q, w, b = self.quantized, self.weight, self.weights
        r1 = q("r1", F.relu(F.conv2d(q("x", torch.tensor(x)), w("w1"), b["b1"], padding=1)))
        r2 = q("r2", F.relu6(F.conv2d(r1, w("w2"), b["b2"], padding=1, groups=8)))
        s = q("s", q("c3", F.conv2d(r2, w("w3"), b["b3"])) + r1)
        g = q("g", s.mean((2, 3)))
        return F.linear(g, w("wf"), b["bf"])


def ranges_of(x: np.ndarray) -> dict[str, tuple[float, float]]:
    """The least and largest element of each activation of the float network."""
    net = Fake(None, False)
    net(x)
    return {n: (min(0.0, v.min().item()), max(0.0, v.max().item())) for n, v in net.seen.items()}


def gradients(folder: Path, settings: Quantize, x: np.ndarray, **more: Any) -> dict[str, Any]:
    """The loss and the gradient of each parameter."""
    prepare(network(), folder, quantize=settings, calibration=[X[:8]], **more)
    session = TrainingSession(folder)
    loss = session.train_step(x, LABELS)
    found = {n: p.grad.copy() for n, p in session.state.parameters if p.requires_grad}
    return {"": np.asarray(loss[0] if isinstance(loss, tuple) else loss), **found}


def assert_near(found: np.ndarray, wanted: np.ndarray, name: str) -> None:
    """A few elements at a rounding boundary may be rounded the other way."""
    scale = np.abs(wanted).max()
    error = np.abs(found.reshape(wanted.shape) - wanted) / scale
    assert error.max() < 2e-3, (name, error.max())


@pytest.mark.parametrize("scales", ["average", "fixed"])
def test_a_network_has_the_gradients_of_torch(tmp_path, scales) -> None:
    found = gradients(tmp_path, Quantize(scales=scales), X)
    net = Fake(ranges_of(X[:8]), learned=False)
    loss = F.cross_entropy(net(X), torch.tensor(LABELS))
    loss.backward()
    assert found[""] == pytest.approx(loss.item(), rel=1e-4)
    for name in WEIGHTS:
        assert_near(found[name], net.weights[name].grad.numpy(), name)


def test_learned_scales_have_the_gradients_of_torch(tmp_path) -> None:
    found = gradients(tmp_path, Quantize(scales="learned"), X)
    net = Fake(ranges_of(X[:8]), learned=True)
    F.cross_entropy(net(X), torch.tensor(LABELS)).backward()
    for name in WEIGHTS:
        assert_near(found[name], net.weights[name].grad.numpy(), name)
        if name not in BIASES:
            assert_near(found[f"{name}.scale_shift"], net.shifts[name].grad.numpy(), name)
    rows = np.concatenate([net.shifts[name].grad.numpy() for name in order(tmp_path / "average")])
    assert_near(found["activations.scale_shift"], rows, "activations")


def order(folder: Path) -> list[str]:
    """The activations in the order of their ranges."""
    prepare(network(), folder, quantize="int8", calibration=[X[:8]])
    rows = TrainingSession(folder).get_parameter("quantization.ranges")
    known = ranges_of(X[:8])
    assert len(rows) == len(known)
    return [min(known, key=lambda n: np.abs(np.subtract(known[n], row)).sum()) for row in rows]


def test_ranges_move_by_the_momentum(tmp_path) -> None:
    prepare(network(), tmp_path, quantize=Quantize(momentum=0.25), calibration=[X[:8]])
    session = TrainingSession(tmp_path)
    before = session.get_parameter("quantization.ranges").copy()
    session.step(X * 2, LABELS)
    after = session.get_parameter("quantization.ranges").copy()
    row = np.abs(before - [X[:8].min(), X[:8].max()]).sum(1).argmin()
    seen = np.array([X.min() * 2, X.max() * 2])
    np.testing.assert_allclose(after[row], before[row] + 0.25 * (seen - before[row]), rtol=1e-5)
    session.freeze_ranges()
    session.step(X, LABELS)
    np.testing.assert_array_equal(session.get_parameter("quantization.ranges"), after)


def test_a_batch_of_zeros_leaves_the_ranges(tmp_path) -> None:
    prepare(network(), tmp_path, quantize=Quantize(momentum=0.5), calibration=[X[:8]])
    session = TrainingSession(tmp_path)
    before = session.get_parameter("quantization.ranges").copy()
    session.step(X * 0, LABELS)
    after = session.get_parameter("quantization.ranges")
    row = np.abs(before - [X[:8].min(), X[:8].max()]).sum(1).argmin()
    np.testing.assert_array_equal(after[row], before[row])


def test_nan_in_an_input_changes_nothing(tmp_path) -> None:
    """Quantizing makes a number of NaN, so the loss alone would not tell."""
    prepare(network(), tmp_path, quantize="int8", calibration=[X[:8]])
    session = TrainingSession(tmp_path)
    before = {n: p.data.copy() for n, p in session.state.parameters}
    wrong = X.copy()
    wrong[3, 1, 2, 2] = np.nan
    session.step(wrong, LABELS)
    for name, parameter in session.state.parameters:
        np.testing.assert_array_equal(parameter.data, before[name])


# ---- one pair at a time --------------------------------------------------------------------------


def identity(bound: str = "") -> onnx.ModelProto:
    """A product with the identity, so that the gradient of the input is that of its quantizer."""
    nodes = [node(bound, ["x"], ["a"])] if bound else []
    return model(
        [*nodes, node("MatMul", ["a" if bound else "x", "w"], ["y"])],
        [value("x", ["batch", 4])],
        [value("y", ["batch", 4])],
        {"w": np.eye(4, dtype=np.float32)},
    )


STEP = 1 / 64  # exact, so that ties are ties in both


def edges(low: float) -> tuple[np.ndarray, int]:
    """Numbers at and around the bounds of a range, and ties between levels; its zero point."""
    zero = int(-low / STEP)
    bounds = np.array([-0.5 - zero, 255.5 - zero]) * STEP
    near = [bounds * (1 + e) for e in (-0.1, -1e-5, 0.0, 1e-5, 0.1)]
    ties = np.array([-1.5, -0.5, 0.5, 1.5, 2.5, 3.5, 100.5, 101.5]) * STEP
    values = np.concatenate([*near, ties, [0.0, low, low + 255 * STEP, 1e-9]])
    return np.resize(values.astype(np.float32), (6, 4)), zero


@pytest.mark.parametrize("bound", ["", "Relu"])
@pytest.mark.parametrize("low", [-1.0, 0.0, -0.25])
@pytest.mark.parametrize("scales", ["average", "fixed"])
def test_the_bounds_of_an_activation(tmp_path, scales, low, bound) -> None:
    low = 0.0 if bound else low
    data = np.linspace(low, low + 255 * STEP, 40, dtype=np.float32).reshape(10, 4)
    prepare(
        identity(bound), tmp_path, train=["x", "w"], loss="mse", optimizer=None,
        quantize=Quantize(scales=scales), calibration=[data],
    )  # fmt: skip
    x, zero = edges(low)
    target = RNG.standard_normal(x.shape).astype(np.float32)
    session = TrainingSession(tmp_path)
    session.train_step(x, target)
    leaf = torch.tensor(x, requires_grad=True)
    passed = F.relu(leaf) if bound else leaf
    y = torch.fake_quantize_per_tensor_affine(passed, STEP, zero, 0, 255)
    F.mse_loss(y, torch.tensor(target)).backward()
    found = session.module.input_gradients["x"]
    np.testing.assert_allclose(found, leaf.grad.numpy(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("inputs", [64, 40])
def test_scales_by_block_have_the_gradients_of_torch(tmp_path, inputs) -> None:
    """Blocks of 32 inputs of each output, the last of which may be shorter."""
    w = RNG.standard_normal((inputs, 6)).astype(np.float32)
    given = model(
        [node("MatMul", ["x", "w"], ["y"])],
        [value("x", ["batch", inputs])],
        [value("y", ["batch", 6])],
        {"w": w},
    )
    prepare(given, tmp_path, loss="mse", quantize="int4-weights")
    session = TrainingSession(tmp_path)
    x, target = RNG.standard_normal((5, inputs)).astype(np.float32), np.ones((5, 6), np.float32)
    session.train_step(x, target)
    (name,) = (n for n, _ in session.state.parameters if n.endswith("scale_shift"))
    graph = onnx.load(tmp_path / "eval_model.onnx").graph
    blocks = -(-inputs // 32)
    (start,) = (
        onnx.numpy_helper.to_array(t) for t in graph.initializer
        if list(t.dims) == [blocks, 6] and t.data_type == onnx.TensorProto.FLOAT
    )  # fmt: skip
    leaf, shift = torch.tensor(w, requires_grad=True), torch.zeros(blocks, 6, requires_grad=True)
    # One row for each block of an output; what is missing in the last ones is zero.
    rows = F.pad(leaf, (0, 0, 0, blocks * 32 - inputs)).reshape(blocks, 32, 6)
    rows = rows.transpose(1, 2).reshape(blocks * 6, 32)
    scale = (torch.tensor(start) * torch.exp(shift)).reshape(-1)
    zero, share = torch.zeros(blocks * 6, requires_grad=True), 1 / math.sqrt(inputs / blocks * 7)
    made = torch._fake_quantize_learnable_per_channel_affine(rows, scale, zero, 0, -8, 7, share)
    back = made.reshape(blocks, 6, 32).transpose(1, 2).reshape(blocks * 32, 6)[:inputs]
    F.mse_loss(torch.tensor(x) @ back, torch.tensor(target)).backward()
    assert_near(session.state.parameters["w"].grad, leaf.grad.numpy(), "w")
    assert_near(session.state.parameters[name].grad, shift.grad.numpy(), name)
