"""Where torch stops a gradient, with `detach` and `padding_idx`, ours stops too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import onnxtrain
from exporting import export
from onnxtrain.errors import TrainingWarning


class Detached(nn.Module):
    """A gate without a gradient, a straight-through estimator, and a layer that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate, self.fc = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = x + (torch.round(x) - x).detach()
        return self.fc(x * torch.sigmoid(self.gate(x.detach())).detach())


class Padded(nn.Module):
    """One table of two embeddings, one of which has a row for padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.fc = nn.Embedding(7, 4, padding_idx=2), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        again = nn.functional.embedding(x[:, :2], self.words.weight)
        return self.fc(torch.tanh(self.words(x)).mean(1) + again.mean(1))


def assert_steps_as_torch(
    net: nn.Module, model: onnx.ModelProto, x: torch.Tensor, tmp_path: Path
) -> onnxtrain.Artifacts:
    made = onnxtrain.prepare(model, tmp_path, optimizer="sgd")
    session, labels = onnxtrain.TrainingSession(tmp_path), torch.arange(len(x)) % 3
    session.set_learning_rate(0.1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), labels)
        loss.backward()
        optimizer.step()
        found = session.step(x.numpy(), labels.numpy())[0]
        assert np.isclose(found, loss.item(), rtol=1e-5)
    for name, parameter in net.named_parameters():
        if name in made.trainable:
            found = session.state.parameters[name].data
            np.testing.assert_allclose(found, parameter.detach(), rtol=1e-4, atol=1e-6)
    return made


def test_no_gradient_flows_through_detach(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = Detached().eval(), torch.randn(6, 5)
    made = assert_steps_as_torch(net, export(net, x, "dynamo"), x, tmp_path)
    assert not any(name.startswith("gate") for name in made.trainable)
    assert "Identity ends the gradient" in made.notes[0]


def test_a_detach_that_the_exporter_removed_is_a_warning(tmp_path: Path) -> None:
    net, x = Detached().eval(), torch.randn(6, 5)
    with pytest.warns(TrainingWarning, match="torch detaches.*export with optimize=False"):
        onnxtrain.prepare(export(net, x, "dynamo-optimized"), tmp_path)


@pytest.mark.parametrize("exporter", ["dynamo", "dynamo-optimized"])
def test_the_row_for_padding_does_not_train(exporter: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = Padded().eval(), torch.randint(0, 7, (6, 5))
    x[:, 3] = 2
    assert_steps_as_torch(net, export(net, x, exporter), x, tmp_path)
