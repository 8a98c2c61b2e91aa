"""Training on the device equals torch's: each optimizer, and whole networks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from exporting import export
from onnxtrain import artifacts
from onnxtrain.api import CheckpointState, Module, Optimizer, TrainingSession
from onnxtrain.onnxblock.optim import SGD, AdamW, ParameterGroup
from optimizer_cases import RATE, STEPS, Case, of_cases
from zoo import MLP, Bert, MobileNetV2, Recurrent

LOSS = artifacts.LossType.CrossEntropyLoss


def batches(count: int, size: int = 8) -> list[tuple[np.ndarray, np.ndarray]]:
    """What the small network is trained with."""
    rng = np.random.default_rng(0)
    return [
        (rng.standard_normal((size, 20)).astype(np.float32), rng.integers(0, 5, size))
        for _ in range(count)
    ]


@pytest.fixture(autouse=True)
def one_thread():
    """Let torch and onnxruntime not wait for each other's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def exported() -> tuple[nn.Module, onnx.ModelProto]:
    torch.manual_seed(0)
    net = MLP()
    return net, export(net, torch.randn(2, 20), "torchscript")


def values(session_or_module) -> dict[str, np.ndarray]:
    return {n: np.array(p.data) for n, p in session_or_module.state.parameters}


def torch_gradients(net: nn.Module, parameters, x, labels) -> tuple[float, dict[str, np.ndarray]]:
    net.load_state_dict({n: torch.from_numpy(v) for n, v in parameters.items()})
    net.zero_grad()
    loss = F.cross_entropy(net(torch.from_numpy(x)), torch.from_numpy(labels))
    loss.backward()
    return loss.item(), {n: p.grad.numpy() for n, p in net.named_parameters()}


# ---- optimizers ----------------------------------------------------------------------------------


@of_cases
def test_ten_steps_of_each_optimizer(case: Case, exported, tmp_path: Path) -> None:
    """Gradients are torch's; what is made of them is the reference's; fused steps do the same."""
    net, model = exported
    artifacts.generate_artifacts(
        model, loss=LOSS, optimizer=case.optimizer, artifact_directory=tmp_path
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(RATE)
    fused = TrainingSession.from_folder(tmp_path)
    fused.set_learning_rate(RATE)
    start, gradients = values(module), []
    for x, labels in batches(STEPS):
        before = values(module)
        loss = module(x, labels)
        gradients.append({n: p.grad.copy() for n, p in state.parameters})
        expected, theirs = torch_gradients(net, before, x, labels)
        assert loss == pytest.approx(expected, rel=1e-5)
        for name, gradient in theirs.items():
            np.testing.assert_allclose(gradients[-1][name], gradient, rtol=1e-4, atol=1e-6)
        optimizer.step()
        module.lazy_reset_grad()
        assert fused.step(x, labels) == loss
    reference = case.reference(start, gradients)
    for name, value in values(module).items():
        np.testing.assert_allclose(value, reference[name], rtol=3e-6, atol=1e-6, err_msg=name)
        assert np.array_equal(value, fused.get_parameter(name)), name
    assert optimizer.step_count == fused.optimizer.step_count == STEPS


def test_ten_steps_with_parameter_groups(exported, tmp_path: Path) -> None:
    net, model = exported
    groups = (ParameterGroup("*.bias", weight_decay=0.0), ParameterGroup("fc2.*", lr_scale=0.1))
    optimizer = AdamW.torch(weight_decay=0.2, groups=groups)
    artifacts.generate_artifacts(model, loss=LOSS, optimizer=optimizer, artifact_directory=tmp_path)
    session = TrainingSession.from_folder(tmp_path)
    session.set_learning_rate(RATE)
    start = {n: torch.from_numpy(v) for n, v in values(session).items()}
    net.load_state_dict(start)
    theirs = torch.optim.AdamW([
        {"params": net.fc1.weight, "lr": RATE, "weight_decay": 0.2},
        {"params": net.fc1.bias, "lr": RATE, "weight_decay": 0.0},
        {"params": net.fc2.weight, "lr": 0.1 * RATE, "weight_decay": 0.2},
        # The first group whose pattern fits is the parameter's.
        {"params": net.fc2.bias, "lr": RATE, "weight_decay": 0.0},
    ])  # fmt: skip
    for x, labels in batches(STEPS):
        session.step(x, labels)
        theirs.zero_grad()
        F.cross_entropy(net(torch.from_numpy(x)), torch.from_numpy(labels)).backward()
        theirs.step()
    for name, parameter in net.named_parameters():
        found = session.get_parameter(name)
        np.testing.assert_allclose(found, parameter.detach().numpy(), rtol=1e-4, atol=1e-5)


# ---- networks ------------------------------------------------------------------------------------


class Normalized(nn.Module):
    """A convolution with BatchNorm, and Dropout, which may be of nothing."""

    def __init__(self, dropped: float = 0.0) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.drop, self.fc = nn.Dropout(dropped), nn.Linear(6 * 4 * 4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.bn(self.conv(x))), 2)
        return self.fc(self.drop(x.flatten(1)))


def images(channels: int, size: int):
    return lambda: torch.randn(6, channels, size, size)


NETWORKS = {
    "MLP": (MLP, lambda: torch.randn(6, 20), 5),
    "CNN": (Normalized, images(3, 8), 5),
    "BERT-like": (Bert, lambda: torch.randint(0, 100, (6, 12)), 3),
    "LSTM": (lambda: Recurrent(nn.LSTM, False), lambda: torch.randn(6, 7, 6), 4),
}


def train_both(net, session, data, classes, parameters=None):
    """Ten steps here and in torch, with momentum; the losses of both."""
    optimizer = torch.optim.SGD(parameters or net.parameters(), lr=RATE, momentum=0.9)
    session.set_learning_rate(RATE)
    torch.manual_seed(1)
    losses = []
    for _ in range(STEPS):
        x, labels = data(), torch.randint(0, classes, (6,))
        ours = session.step(x.numpy(), labels.numpy())
        optimizer.zero_grad()
        theirs = F.cross_entropy(net(x), labels)
        theirs.backward()
        optimizer.step()
        losses.append((float(ours), theirs.item()))
    return np.array(losses)


def assert_trained_alike(net, session, start, losses) -> None:
    np.testing.assert_allclose(losses[:, 0], losses[:, 1], rtol=1e-4)
    assert np.ptp(losses[:, 0]) > 1e-3
    for name, parameter in net.named_parameters():
        moved = session.get_parameter(name) - start[name]
        theirs = parameter.detach().numpy() - start[name]
        largest = max(np.abs(theirs).max(), 1e-3)
        np.testing.assert_allclose(moved, theirs, atol=2e-3 * largest, rtol=0, err_msg=name)


@pytest.mark.parametrize("name", NETWORKS)
def test_ten_steps_of_each_network(name: str, tmp_path: Path) -> None:
    make, data, classes = NETWORKS[name]
    torch.manual_seed(0)
    net = make().train()
    artifacts.generate_artifacts(
        export(net, data(), "torchscript"), loss=LOSS, optimizer=SGD(momentum=0.9),
        artifact_directory=tmp_path,
    )  # fmt: skip
    session = TrainingSession.from_folder(tmp_path)
    start = values(session)
    if name == "CNN":  # exporting was a training step for it
        net.bn.reset_running_stats()
        for statistic, value in (("bn.running_mean", 0), ("bn.running_var", 1)):
            session.update_parameter(statistic, np.full(6, value, np.float32))
    losses = train_both(net, session, data, classes)
    assert_trained_alike(net, session, start, losses)
    if name == "CNN":
        assert_statistics(net.bn, session, samples=6 * 8 * 8)


def assert_statistics(bn: nn.BatchNorm2d, session: TrainingSession, samples: int) -> None:
    """The running mean is torch's. The variance is that of the population, as ONNX has it.

    Torch's running variance is that of a sample: of what a step adds to it, n / (n - 1) as much.
    """
    np.testing.assert_allclose(
        session.get_parameter("bn.running_mean"), bn.running_mean.numpy(), rtol=1e-3, atol=1e-5
    )
    kept = 0.9**STEPS  # of the ones that both began with
    added = session.get_parameter("bn.running_var") - kept
    theirs = bn.running_var.numpy() - kept
    np.testing.assert_allclose(added * samples / (samples - 1), theirs, rtol=1e-4)


def test_evaluation_uses_the_running_statistics(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Normalized(0.5).train()
    artifacts.generate_artifacts(
        export(net, images(3, 8)(), "torchscript"), loss=LOSS, optimizer=SGD(momentum=0.9),
        artifact_directory=tmp_path, additional_output_names=["y"],
    )  # fmt: skip
    session = TrainingSession.from_folder(tmp_path)
    x = images(3, 8)()
    for _ in range(3):
        session.step(x.numpy(), np.zeros(6, np.int64))
    held = values(session)
    net.load_state_dict({n: torch.from_numpy(held[n]) for n in held}, strict=False)
    scores = session.eval_step(x.numpy(), np.zeros(6, np.int64))[1]
    with torch.no_grad():
        expected = net.eval()(x).numpy()
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5)


def test_the_head_of_mobilenet(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = MobileNetV2(classes=4).eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.8, 1.2)
            module.running_mean.normal_(std=0.1)
    made = artifacts.generate_artifacts(
        export(net, images(3, 64)(), "torchscript"), requires_grad=["classifier.*"],
        loss=LOSS, optimizer=SGD(momentum=0.9), artifact_directory=tmp_path,
    )  # fmt: skip
    assert sorted(made.trainable) == ["classifier.1.bias", "classifier.1.weight"]
    session = TrainingSession.from_folder(tmp_path)
    start = values(session)
    head = list(net.classifier.parameters())
    for parameter in net.features.parameters():
        parameter.requires_grad_(False)
    losses = train_both(net, session, images(3, 64), 4, head)
    np.testing.assert_allclose(losses[:, 0], losses[:, 1], rtol=1e-3)
    np.testing.assert_allclose(
        session.get_parameter("classifier.1.weight"), head[0].detach().numpy(), rtol=1e-2, atol=1e-4
    )
    session.save_checkpoint(tmp_path / "after")
    after = CheckpointState.load_checkpoint(tmp_path / "after").parameters
    frozen = [name for name in start if not name.startswith("classifier.")]
    assert len(frozen) > 50
    for name in frozen:
        assert after[name].data.tobytes() == start[name].tobytes(), name
    assert not np.array_equal(after["classifier.1.weight"].data, start["classifier.1.weight"])
