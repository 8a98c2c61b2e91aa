"""Networks with a frozen body: their blocks run native, from both exporters, and train alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import onnxtrain
from exporting import EXPORTERS, export
from onnxtrain.device.loop.feature_cache import FrozenFeatures
from onnxtrain.offline.passes import frozen_blocks
from zoo import MobileNetV2

IMAGES = np.random.default_rng(0).normal(size=(8, 3, 64, 64)).astype(np.float32)
LABELS = np.random.default_rng(1).integers(0, 10, 8)


def used_network() -> torch.nn.Module:
    """A network whose normalizations look used."""
    torch.manual_seed(0)
    net = MobileNetV2()
    for module in net.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(module.weight, 1.0, 0.1)
            torch.nn.init.normal_(module.bias, 0.0, 0.1)
            assert module.running_mean is not None and module.running_var is not None
            module.running_mean.normal_(0.0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    return net.eval()


def prepared(folder: Path, exporter: str, *, native: bool = True) -> Path:
    model = export(used_network(), torch.tensor(IMAGES), exporter)
    onnxtrain.prepare(model, folder, train="*classifier.1*", optimizer="sgd", native=native)
    return folder


def blocks_of(folder: Path, graph: str) -> int:
    nodes = onnx.load(folder / graph).graph.node
    return sum(node.op_type.startswith("InvertedResidual") for node in nodes)


@pytest.fixture(autouse=True)
def all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen_blocks, "_LEAST_BYTES", 0)


def losses_of(folder: Path, *, native: bool) -> list[float]:
    session = onnxtrain.TrainingSession(folder, native=native)
    assert ("InvertedResidual" in session.native) == native
    session.set_learning_rate(0.1)
    return [float(session.step(IMAGES, LABELS)[0]) for _ in range(4)]


@pytest.mark.parametrize("exporter", [*EXPORTERS, "torchscript-folded"])
def test_all_blocks_run_native(exporter: str, tmp_path: Path) -> None:
    folder = prepared(tmp_path / "frozen", exporter)
    for graph in ("training_model.onnx", "step_model.onnx"):
        assert blocks_of(folder, graph) == 17
    assert blocks_of(folder, "eval_model.onnx") == 0
    expected = losses_of(folder, native=False)
    assert expected[3] < expected[0]
    np.testing.assert_allclose(losses_of(folder, native=True), expected, rtol=1e-5)


def test_a_body_that_trains_has_none(tmp_path: Path) -> None:
    model = export(used_network(), torch.tensor(IMAGES), "dynamo-optimized")
    onnxtrain.prepare(model, tmp_path / "all", optimizer="sgd")
    assert blocks_of(tmp_path / "all", "step_model.onnx") == 0


def test_features_behind_blocks_are_kept(tmp_path: Path) -> None:
    session = onnxtrain.TrainingSession(prepared(tmp_path / "frozen", "torchscript-folded"))
    data = {"x": IMAGES, "labels": LABELS}
    features = FrozenFeatures(session, data)
    assert features.inputs == ("x",)
    kept = features.compute(data, 4)
    assert {name: array.shape for name, array in kept.items()} == {
        "feature.0": (8, 320), "labels": (8,)
    }  # fmt: skip
