"""Recurrent networks written as Python loops: gradients and training against torch.

torch.jit.script keeps the loop, and the torchscript exporter writes it as Loop; torch's `scan` is
written as Scan by the other exporter.
"""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

import onnxtrain

HERE = Path(__file__).parent
OLDEST = os.environ.get("ONNXTRAIN_OLDEST_PYTHON", str(HERE.parents[1] / ".venv-oldest/bin/python"))
T, B, D, H = 6, 3, 4, 5


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x, self.h = nn.Linear(D, H), nn.Linear(H, H, bias=False)
        self.out = nn.Linear(H, 2)


class Rnn(Cell):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(x.size(1), 5)
        for t in range(x.size(0)):
            h = torch.tanh(self.x(x[t]) + self.h(h))
        return self.out(h)


class Appends(Cell):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(x.size(1), 5)
        outs: list[torch.Tensor] = []
        for row in x.unbind(0):
            h = torch.tanh(self.x(row) + self.h(h))
            outs.append(h)
        return self.out(torch.stack(outs, 1))


class Concatenates(Cell):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(x.size(1), 5)
        y = torch.zeros(0, x.size(1), 5)
        for t in range(x.size(0)):
            h = torch.tanh(self.x(x[t]) + self.h(h))
            y = torch.cat([y, h.unsqueeze(0)], 0)
        return self.out(y)


class Breaks(Cell):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(x.size(1), 5)
        t = 0
        while t < x.size(0) and bool(h.abs().sum() < 4.0):
            h = torch.tanh(self.x(x[t]) + self.h(h)) if t % 2 == 0 else torch.sin(h)
            t += 1
        return self.out(h)


class Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x, self.h, self.out = nn.Linear(D, 3 * H), nn.Linear(H, 3 * H), nn.Linear(H, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(x.size(1), 5)
        outs: list[torch.Tensor] = []
        for t in range(x.size(0)):
            r, z, n = self.x(x[t]).chunk(3, 1)
            hr, hz, hn = self.h(h).chunk(3, 1)
            z = torch.sigmoid(z + hz)
            h = (1 - z) * torch.tanh(n + torch.sigmoid(r + hr) * hn) + z * h
            outs.append(h.unsqueeze(0))
        return self.out(torch.cat(outs, 0))


class Scan(Cell):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch._higher_order_ops.scan import scan

        def step(h: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            after = torch.tanh(self.x(row) + self.h(h))
            return after, after.clone()

        _, all_states = scan(step, torch.zeros(x.shape[1], H), x, dim=0)
        return self.out(all_states)


NETS = {net.__name__: net for net in (Rnn, Appends, Concatenates, Breaks, Gru, Scan)}


def exported(name: str) -> tuple[nn.Module, onnx.ModelProto]:
    torch.manual_seed(0)
    net = NETS[name]()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if name == "Scan":
                sizes = ({0: "T", 1: "B"},)
                program = torch.onnx.export(
                    net, (torch.randn(T, B, D),), dynamo=True, dynamic_shapes=sizes, verbose=False,
                    input_names=["x"], output_names=["y"],
                )  # fmt: skip
                assert program is not None
                return net, program.model_proto
            file = io.BytesIO()
            torch.onnx.export(
                torch.jit.script(net), (torch.randn(T, B, D),), file, dynamo=False,
                input_names=["x"], output_names=["y"], dynamic_axes={"x": {0: "T", 1: "B"}},
                opset_version=18,
            )  # fmt: skip
            return net, onnx.load_from_string(file.getvalue())
    finally:
        logging.disable(logging.NOTSET)


def batch() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((T, B, D)).astype(np.float32)
    return x, rng.standard_normal((T, B, D)).astype(np.float32)


def weights_of(model: onnx.ModelProto) -> list[str]:
    return [t.name for t in model.graph.initializer if t.data_type == 1 and len(t.dims)]


@pytest.mark.parametrize("name", NETS)
def test_gradients_are_those_of_torch(name: str) -> None:
    net, model = exported(name)
    x, _ = batch()
    given = torch.from_numpy(x).requires_grad_()
    y = net(given)
    ct = np.random.default_rng(2).standard_normal(y.shape).astype(np.float32)
    (y * torch.from_numpy(ct)).sum().backward()
    names = weights_of(model)
    extended = onnxtrain.gradient(model, [*names, "x"])
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(
        extended.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    results = session.run([o.name for o in session.get_outputs()], {"x": x, "y_grad": ct})
    found = dict(zip((o.name for o in session.get_outputs()), results, strict=True))
    np.testing.assert_allclose(found["y"], y.detach(), atol=1e-6)
    np.testing.assert_allclose(found["x_grad"], given.grad, atol=1e-6)
    expected = [p.grad.numpy() for p in net.parameters() if p.grad is not None]
    assert len(names) == len(expected)
    for weight in names:
        actual = found[f"{weight}_grad"]
        assert any(
            form.shape == actual.shape and np.allclose(form, actual, atol=1e-5)
            for grad in expected
            for form in (grad, grad.T)
        ), weight


@pytest.mark.parametrize("name", NETS)
def test_all_weights_train_as_in_torch(name: str, tmp_path: Path) -> None:
    """Three steps of gradient descent, a checkpoint, and an export that computes the same."""
    net, model = exported(name)
    x, _ = batch()
    target = np.random.default_rng(3).standard_normal(tuple(net(torch.from_numpy(x)).shape))
    target = target.astype(np.float32)
    onnxtrain.prepare(model, tmp_path / "a", loss="mse", optimizer="sgd")
    session = onnxtrain.TrainingSession(tmp_path / "a")
    assert session.get_parameters_size() == sum(p.numel() for p in net.parameters())
    session.set_learning_rate(0.1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(torch.from_numpy(x)), torch.from_numpy(target))
        loss.backward()
        optimizer.step()
        ours = session.step(x, target)
        np.testing.assert_allclose(np.ravel(ours[0] if isinstance(ours, list | tuple) else ours),
                                   [loss.item()], rtol=1e-5)  # fmt: skip
    session.save_checkpoint(tmp_path / "checkpoint")
    session.export_model_for_inferencing(tmp_path / "trained.onnx", ["y"])
    trained = ort.InferenceSession(tmp_path / "trained.onnx", providers=["CPUExecutionProvider"])
    with torch.no_grad():
        expected = net(torch.from_numpy(x))
    np.testing.assert_allclose(trained.run(None, {"x": x})[0], expected, atol=1e-5)


TRAIN = """
import sys, numpy as np, onnxtrain
session = onnxtrain.TrainingSession(sys.argv[1])
session.set_learning_rate(0.1)
data = np.load(sys.argv[2])
for _ in range(3):
    result = session.step(data["x"], data["target"])
    print(float(np.ravel(result[0] if isinstance(result, (list, tuple)) else result)[0]))
"""


@pytest.mark.parametrize("name", NETS)
def test_the_oldest_onnxruntime_trains_the_same(name: str, tmp_path: Path) -> None:
    if not Path(OLDEST).exists():
        pytest.skip(f"no environment with the oldest onnxruntime at {OLDEST}; `make test` makes it")
    net, model = exported(name)
    x, _ = batch()
    target = np.random.default_rng(3).standard_normal(tuple(net(torch.from_numpy(x)).shape))
    np.savez(tmp_path / "data.npz", x=x, target=target.astype(np.float32))
    onnxtrain.prepare(model, tmp_path / "a", loss="mse", optimizer="sgd")
    losses = []
    source = str(Path(onnxtrain.__file__).parents[1])
    for python in (sys.executable, OLDEST):
        result = subprocess.run(
            [python, "-c", TRAIN, str(tmp_path / "a"), str(tmp_path / "data.npz")],
            capture_output=True, text=True, env={**os.environ, "PYTHONPATH": source}, timeout=120,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr[-2000:]
        losses.append([float(line) for line in result.stdout.split()])
    np.testing.assert_allclose(*losses, rtol=1e-5)
