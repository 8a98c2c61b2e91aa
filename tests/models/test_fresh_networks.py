"""Fresh networks, full of ones and zeros that exporters merge, train as in torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import onnxtrain
from exporting import EXPORTERS, export


class Preactivated(nn.Module):
    """No normalization follows a convolution directly, so that no exporter folds one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm1 = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.conv, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.last, self.fc = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        x = x + self.conv(torch.tanh(self.norm1(x)))
        return self.fc(self.last(self.norm2(torch.relu(x)).mean((2, 3))))


def merged(model: onnx.ModelProto) -> onnx.ModelProto:
    """Store equal tensors once and drop all notes, as tools that shrink files do."""
    kept: dict[tuple[tuple[int, ...], bytes], str] = {}
    names = {}
    for tensor in list(model.graph.initializer):
        array = numpy_helper.to_array(tensor)
        names[tensor.name] = kept.setdefault((array.shape, array.tobytes()), tensor.name)
        if names[tensor.name] != tensor.name:
            model.graph.initializer.remove(tensor)
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        del node.metadata_props[:]
    return model


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_steps_of_a_fresh_network_are_those_of_torch(exporter: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x, labels = Preactivated(), torch.randn(6, 3, 7, 7), torch.arange(6) % 4
    model = export(net.eval(), x, exporter)
    onnxtrain.prepare(model, tmp_path / "a", optimizer="sgd", bn="batch")
    session = onnxtrain.TrainingSession(tmp_path / "a")
    session.set_learning_rate(0.1)
    optimizer = torch.optim.SGD(net.train().parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), labels)
        loss.backward()
        optimizer.step()
        found = session.step(x.numpy(), labels.numpy())[0]
        assert np.isclose(found, loss.item(), rtol=1e-4)
    session.export_model_for_inferencing(tmp_path / "trained.onnx", ["y"])
    runtime = ort.InferenceSession(tmp_path / "trained.onnx")  # with the running statistics
    found = runtime.run(None, {"x": x.numpy()})[0]
    np.testing.assert_allclose(found, net.eval()(x).detach(), rtol=1e-3, atol=1e-4)


def test_statistics_that_a_tool_has_merged_are_told_apart(tmp_path: Path) -> None:
    """Scales and variances were all ones; a second layer with another scale has its own."""
    net = Preactivated()
    nn.init.normal_(net.norm2.weight)
    model = merged(export(net.eval(), torch.randn(6, 3, 7, 7), "dynamo"))
    made = onnxtrain.prepare(model, tmp_path, optimizer="sgd", bn="batch")
    norms = [n for n in model.graph.node if n.op_type == "BatchNormalization"]
    assert norms[0].input[4] == norms[0].input[1] == norms[1].input[4] != norms[1].input[1]
    assert {n.input[1] for n in norms} <= set(made.trainable)
    assert len(made.statistics) == 4 and not set(made.statistics) & set(made.trainable)


def test_notes_that_are_older_than_the_weights_split_nothing(tmp_path: Path) -> None:
    net = Preactivated()
    model = export(net.eval(), torch.randn(6, 3, 7, 7), "dynamo")
    nodes = [n for n in model.graph.node if n.op_type == "BatchNormalization"]
    nodes[1].input[1] = nodes[0].input[1]  # somebody shares a scale on purpose
    tensors = {t.name: t for t in model.graph.initializer}
    other = np.full(8, 3, np.float32)
    tensors["norm2.weight"].CopyFrom(numpy_helper.from_array(other, "norm2.weight"))
    made = onnxtrain.prepare(model, tmp_path, optimizer="sgd")
    assert "norm1.weight" in made.trainable and "norm2.weight" not in made.trainable
