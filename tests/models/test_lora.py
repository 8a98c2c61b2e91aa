"""LoRA on exported networks: what torch computes with factors written by hand, step by step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch

import onnxtrain
from exporting import EXPORTERS, export
from onnxtrain.format.model_metadata import ModelMetadata


class Perceptron(torch.nn.Module):
    """Linear layers on vectors and on sequences, one of which is applied twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(12, 16)
        self.mix = torch.nn.Linear(16, 16, bias=False)
        self.norm = torch.nn.LayerNorm(16)
        self.head = torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.embed(x))
        h = self.norm(torch.tanh(self.mix(h)) + self.mix(h))
        return self.head(h.mean(1))


class Convolutions(torch.nn.Module):
    """Convolutions of several windows; one has groups, which stay without factors."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.depthwise = torch.nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.point = torch.nn.Conv2d(8, 12, 1)
        self.head = torch.nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.depthwise(torch.relu(self.stem(x))))
        return self.head(torch.relu(self.point(h)).mean((2, 3)))


NETWORKS = {
    "Perceptron": (Perceptron, (6, 5, 12), ("embed", "mix")),
    "Convolutions": (Convolutions, (6, 3, 9, 9), ("stem", "point")),
}


class Adapted(torch.nn.Module):
    """A layer with low-rank factors, as PEFT has them."""

    def __init__(self, layer: Any, a: Any, b: Any, scale: float) -> None:
        super().__init__()
        self.layer, self.scale = layer, scale
        self.a, self.b = torch.nn.Parameter(a), torch.nn.Parameter(b)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.layer, torch.nn.Linear):
            return self.layer(x) + self.scale * (x @ self.a @ self.b)
        same = {"stride": self.layer.stride, "padding": self.layer.padding}
        hidden = torch.nn.functional.conv2d(x, self.a, **same)
        return self.layer(x) + self.scale * torch.nn.functional.conv2d(hidden, self.b)


def factors(session: onnxtrain.TrainingSession) -> dict[str, Any]:
    return {name: parameter.data.copy() for name, parameter in session.state.parameters}


def adapt(net: torch.nn.Module, values: dict[str, Any], scale: float) -> dict[str, Adapted]:
    made = {}
    for name in dict.fromkeys(key.split(".lora_")[0] for key in values):
        a, b = (torch.from_numpy(values[f"{name}.lora_{letter}.weight"]) for letter in "AB")
        made[name] = Adapted(getattr(net, name), a, b, scale)
        setattr(net, name, made[name])
    return made


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", NETWORKS)
def test_steps_are_those_of_torch(name: str, exporter: str, tmp_path: Path) -> None:
    make, shape, layers = NETWORKS[name]
    torch.manual_seed(0)
    net = make().requires_grad_(False)
    x, labels = torch.randn(shape), torch.randint(0, 4, shape[:1])
    made = onnxtrain.prepare(
        export(net.eval(), x, exporter), tmp_path,
        train=onnxtrain.Lora(rank=3, alpha=5, scaling="rslora", seed=1), optimizer="sgd",
    )  # fmt: skip
    session = onnxtrain.TrainingSession(tmp_path)
    assert list(made.trainable) == [f"{n}.lora_{letter}.weight" for n in layers for letter in "AB"]
    scale = 5 / math.sqrt(3)
    adapted = adapt(net, factors(session), scale)
    base = ort.InferenceSession(tmp_path / "inference_model.onnx").run(None, {"x": x.numpy()})[0]
    np.testing.assert_allclose(base, net(x).detach(), rtol=1e-5, atol=1e-6)
    optimizer = torch.optim.SGD(
        [p for layer in adapted.values() for p in (layer.a, layer.b)], lr=0.1
    )
    session.set_learning_rate(0.1)
    for _ in range(5):
        loss = torch.nn.functional.cross_entropy(net(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ours = session.step(x.numpy(), labels.numpy())[0]
        np.testing.assert_allclose(ours, loss.detach(), rtol=1e-5)
    trained = factors(session)
    for own, layer in adapted.items():
        for letter, theirs in (("A", layer.a), ("B", layer.b)):
            found = trained[f"{own}.lora_{letter}.weight"]
            np.testing.assert_allclose(found, theirs.detach(), rtol=1e-4, atol=1e-6)
    # Slots have no scale: it is in the B that an adapter brings.
    given = {n: v * np.float32(scale if ".lora_B" in n else 1) for n, v in trained.items()}
    inference = ort.InferenceSession(tmp_path / "inference_model.onnx")
    found = inference.run(None, {"x": x.numpy(), **given})[0]
    np.testing.assert_allclose(found, net(x).detach(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(session.predict(x.numpy()), found, rtol=1e-4, atol=1e-5)
    exported = tmp_path / "exported.onnx"
    session.export_model_for_inferencing(exported, made.outputs)
    np.testing.assert_allclose(onnxtrain.predict(exported, x.numpy()), found, rtol=1e-4, atol=1e-5)


def two_adapters(session: onnxtrain.TrainingSession, folder: Path) -> list[Any]:
    made = []
    for number in (1, 2):
        values = {}
        for name, value in factors(session).items():
            random = np.random.default_rng([number, len(name)])
            axis = 1 if "lora_A" in name else 0
            shape = [number if i == axis else d for i, d in enumerate(value.shape)]
            values[name] = random.standard_normal(shape).astype(np.float32)
        form = ort.AdapterFormat()
        form.set_adapter_version(1)
        form.set_model_version(1)
        form.set_parameters({n: ort.OrtValue.ortvalue_from_numpy(v) for n, v in values.items()})
        form.export_adapter(str(folder / f"{number}.onnx_adapter"))
        adapter = ort.LoraAdapter()
        adapter.Load(str(folder / f"{number}.onnx_adapter"))
        made.append((values, adapter))
    return made


def test_stock_onnxruntime_applies_adapters_of_any_rank_and_stacked_ones(tmp_path: Path) -> None:
    net = Perceptron().eval()
    x = torch.randn(6, 5, 12)
    onnxtrain.prepare(export(net, x, "torchscript"), tmp_path, train="lora:rank=2")
    session = onnxtrain.TrainingSession(tmp_path)
    inference = ort.InferenceSession(tmp_path / "inference_model.onnx")
    results, both = [], dict[str, Any]()
    for values, adapter in two_adapters(session, tmp_path):
        options = ort.RunOptions()
        options.add_active_adapter(adapter)
        results.append(inference.run(None, {"x": x.numpy()}, options)[0])
        expected = inference.run(None, {"x": x.numpy(), **values})[0]
        np.testing.assert_array_equal(results[-1], expected)
        for name, value in values.items():
            axis = 1 if "lora_A" in name else 0
            both[name] = np.concatenate([both[name], value], axis) if name in both else value
    assert np.abs(results[0] - results[1]).max() > 0.01
    adapt(net, both, 1.0)
    stacked = inference.run(None, {"x": x.numpy(), **both})[0]
    np.testing.assert_allclose(stacked, net(x).detach(), rtol=1e-4, atol=1e-5)


def test_the_checkpoint_holds_the_factors_alone(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.ReLU(), torch.nn.Linear(400, 3))
    x = torch.randn(4, 300)
    made = onnxtrain.prepare(export(net.eval(), x, "torchscript"), tmp_path, train="lora")
    assert made.files["checkpoint"] < 4 * 8 * (300 + 400) + 3000
    assert made.files["base.data"] > 4 * 300 * 400
    assert max(made.files[f"{n}.onnx"] for n in ("training_model", "inference_model")) < 20_000
    session = onnxtrain.TrainingSession(tmp_path)
    session.step(x.numpy(), np.array([0, 1, 2, 0]))
    session.save_checkpoint(tmp_path / "later")
    assert (tmp_path / "later").stat().st_size < 3 * 4 * 8 * 700 + 5000
    again = onnxtrain.TrainingSession.from_folder(tmp_path, checkpoint=tmp_path / "later")
    np.testing.assert_array_equal(again.predict(x.numpy()), session.predict(x.numpy()))
    about = ModelMetadata.of(session.module.evaluation_executor.graph.model.properties)
    assert about.lora == [
        {"layer": "0", "a": "0.lora_A.weight", "b": "0.lora_B.weight", "rank": 8, "scale": 1.0,
         "kind": "linear"}
    ]  # fmt: skip
    assert about.base is not None


def test_a_new_classifier_trains_beside_the_factors(tmp_path: Path) -> None:
    net = Perceptron().eval()
    x = torch.randn(6, 5, 12)
    made = onnxtrain.prepare(export(net, x, "torchscript"), tmp_path, train="lora", classes=7)
    assert sum(".lora_" in name for name in made.trainable) == 4
    others = [name for name in made.trainable if ".lora_" not in name]
    assert len(others) == 2
    session = onnxtrain.TrainingSession(tmp_path)
    for _ in range(3):
        session.step(x.numpy(), np.arange(6))
    inference = ort.InferenceSession(tmp_path / "inference_model.onnx")
    found = inference.run(None, {"x": x.numpy(), **factors(session)})[0]
    np.testing.assert_allclose(session.predict(x.numpy()), found, rtol=1e-4, atol=1e-5)


def test_dropout_before_the_factors(tmp_path: Path) -> None:
    net = Perceptron().eval()
    x, labels = torch.randn(64, 5, 12), np.arange(64) % 4
    onnxtrain.prepare(
        export(net, x, "torchscript"), tmp_path, train="lora:dropout=0.5,layers=embed"
    )
    session = onnxtrain.TrainingSession(tmp_path)
    for name, parameter in session.state.parameters:
        parameter.data = np.ones_like(parameter.data) * (0.1 if "_A" in name else 0.2)
    runs = [session.module(x.numpy(), labels)[1] for _ in range(2)]
    assert np.abs(runs[0] - runs[1]).max() > 1e-3
    plain = [session.predict(x.numpy()) for _ in range(2)]
    np.testing.assert_array_equal(*plain)
