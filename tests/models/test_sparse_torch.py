"""Sparse updates of exported networks: channels take torch's steps, whatever the exporter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

import onnxtrain
from exporting import EXPORTERS, export


class Mixer(torch.nn.Module):
    """A convolution, linear layers on sequences, and one on vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv1d(6, 8, 3, padding=1)
        self.mix = torch.nn.Linear(8, 64, bias=False)
        self.back = torch.nn.Linear(64, 8)
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.stem(x)).transpose(1, 2)
        h = h + self.back(torch.tanh(self.mix(h)))
        return self.head(h.mean(1))


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_channels_take_the_steps_of_torch(exporter: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Mixer().eval()
    x, labels = torch.randn(6, 6, 4), torch.randint(0, 4, (6,))
    budget = onnxtrain.Sparse("12KB", data=[(x.numpy(), labels.numpy())])
    made = onnxtrain.prepare(export(net, x, exporter), tmp_path, train=budget, optimizer="sgd")
    tensors = {t.name: t for t in onnx.load(tmp_path / "eval_model.onnx").graph.initializer}
    session = onnxtrain.TrainingSession(tmp_path)
    session.set_learning_rate(0.1)
    trained = {}  # the channels that train, by the name that torch has for the weight
    for name in made.trainable:
        rows = session.get_parameter(name)
        places = np.arange(len(rows))
        if name.endswith(".rows"):
            places = numpy_helper.to_array(tensors[f"{name}.places"]).flatten()
        trained[of_torch(net, rows, places)] = (name, places)
    assert set(trained) == {"stem.weight", "mix.weight", "head.weight"}
    assert trained["mix.weight"][0].endswith(".rows")

    parameters = dict(net.named_parameters())
    for _ in range(5):
        loss = torch.nn.functional.cross_entropy(net(x), labels)
        net.zero_grad()
        loss.backward()
        with torch.no_grad():
            for own, (_, places) in trained.items():
                gradient = parameters[own].grad
                assert gradient is not None
                parameters[own][places] -= 0.1 * gradient[places]
        np.testing.assert_allclose(session.step(*budget.data[0])[0], loss.detach(), rtol=1e-5)
    for own, (name, places) in trained.items():
        expected = parameters[own].detach().numpy()[places]
        np.testing.assert_allclose(session.get_parameter(name), expected, rtol=1e-4, atol=1e-6)


def of_torch(net: torch.nn.Module, rows: Any, places: Any) -> str:
    """The name in torch of the weight that has these channels at these places."""
    for name, parameter in net.named_parameters():
        if places.max() < len(parameter) and np.array_equal(parameter.detach()[places], rows):
            return name
    raise AssertionError(f"no weight has these channels: {places}")
