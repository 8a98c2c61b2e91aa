"""Graphs for WebGPU: the same numbers as the others, from operators that it covers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import pytest
import torch
from torch import nn

import onnxtrain
from exporting import export
from onnxtrain import artifacts
from onnxtrain.api import TrainingSession
from onnxtrain.offline.passes.webgpu import uncovered
from onnxtrain.onnxblock.optim import SGD, AdamW, ClipGradNorm
from zoo import CNN, MLP, Bert, Recurrent, ResNet18


class WithDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(20, 30), nn.Linear(30, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(nn.functional.dropout(torch.relu(self.fc1(x)), 0.3, self.training))


# Name → the network, the shape of a batch, how many words if they are words, what trains.
NETWORKS = {
    "mlp": (MLP, (6, 20), 0, None),
    "cnn": (CNN, (4, 1, 14, 14), 0, None),
    "resnet": (ResNet18, (4, 3, 16, 16), 0, None),
    "resnet head": (ResNet18, (4, 3, 16, 16), 0, ["fc.*"]),
    "bert": (lambda: Bert(layers=2, width=16, heads=2, words=20), (4, 7), 20, None),
    "lstm": (lambda: Recurrent(nn.LSTM, False), (4, 5, 6), 0, None),
    "gru in both directions": (lambda: Recurrent(nn.GRU, True), (4, 5, 6), 0, None),
    "dropout": (WithDropout, (6, 20), 0, None),
}
OPTIMIZERS = {
    "adamw": AdamW.torch(weight_decay=0.01),
    "clipped": AdamW(clip_grad=ClipGradNorm(0.5)),
    "sgd": SGD(momentum=0.9),
}


def artifacts_of(name: str, optimizer: str, folder: Path, target: str) -> artifacts.Artifacts:
    make, shape, words, trains = NETWORKS[name]
    torch.manual_seed(0)
    x = torch.zeros(*shape, dtype=torch.int64 if words else torch.float32)
    return artifacts.generate_artifacts(
        export(make().train(), x, "torchscript"),
        requires_grad=trains,
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=OPTIMIZERS[optimizer],
        artifact_directory=folder,
        additional_output_names=["y"],
        target=target,
    )


def losses_of(folder: Path, name: str, fused: bool) -> list[float]:
    """Train ten steps and evaluate."""
    _, shape, words, _ = NETWORKS[name]
    rng = np.random.default_rng(1)
    onnxtrain.set_seed(3)
    session = TrainingSession.from_folder(folder)
    session.set_learning_rate(0.01)
    losses = []
    for _ in range(10):
        x = rng.integers(0, words, shape) if words else rng.standard_normal(shape, np.float32)
        labels = rng.integers(0, 3, shape[0])
        if fused:
            losses.append(float(session.step(x, labels)[0]))
        else:
            losses.append(float(session.train_step(x, labels)[0]))
            session.optimizer_step()
            session.lazy_reset_grad()
    losses.append(float(session.eval_step(x, labels)[0]))
    return losses


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "three graphs"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_numbers_are_those_of_the_cpu(name: str, fused: bool, tmp_path: Path) -> None:
    # The first steps of Adam are as long for a gradient of 1e-9 as for one of 1, and behind
    # BatchNormalization some gradients are rounding alone.
    optimizer = "sgd" if name == "resnet" else "adamw"
    artifacts_of(name, optimizer, tmp_path / "cpu", "cpu")
    artifacts_of(name, optimizer, tmp_path / "gpu", "webgpu")
    expected = losses_of(tmp_path / "cpu", name, fused)
    np.testing.assert_allclose(losses_of(tmp_path / "gpu", name, fused), expected, rtol=2e-5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_do_without_doubles(optimizer: str, tmp_path: Path) -> None:
    artifacts_of("mlp", optimizer, tmp_path / "cpu", "cpu")
    artifacts_of("mlp", optimizer, tmp_path / "gpu", "webgpu")
    for file in (tmp_path / "gpu").glob("*.onnx"):
        model = onnx.load(file)
        inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
        types = {v.type.tensor_type.elem_type for v in (*inferred.value_info, *inferred.output)}
        assert onnx.TensorProto.DOUBLE not in types
    for fused in (True, False):
        expected = losses_of(tmp_path / "cpu", "mlp", fused)
        np.testing.assert_allclose(losses_of(tmp_path / "gpu", "mlp", fused), expected, rtol=2e-6)


@pytest.mark.parametrize(
    "name", [n for n in NETWORKS if n not in ("dropout", "gru in both directions")]
)
def test_every_node_on_floats_is_covered(name: str, tmp_path: Path) -> None:
    made = artifacts_of(name, "adamw", tmp_path, "webgpu")
    assert made.on_cpu == ()
    for file in tmp_path.glob("*.onnx"):
        assert "Scan" not in {node.op_type for node in onnx.load(file).graph.node}


def test_the_same_graphs_for_the_cpu_are_not_all_covered(tmp_path: Path) -> None:
    made = artifacts_of("mlp", "adamw", tmp_path, "cpu")
    assert made.on_cpu == ()  # nobody asked
    model = onnx.inliner.inline_local_functions(onnx.load(tmp_path / "step_model.onnx"))
    missing = {item.op_type for item in uncovered(model)}
    assert {"SoftmaxCrossEntropyLoss", "Cast"} <= missing
