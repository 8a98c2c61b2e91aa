"""Quantization together with what else training has: what trains, optimizers, targets, budgets."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

import onnxtrain
from graphs import model, value
from onnxtrain import Quantize, TrainingSession, inspect, prepare
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.cli.demo.network import network
from onnxtrain.errors import ArgumentError

RNG = np.random.default_rng(0)
X = RNG.random((48, 1, 8, 8), np.float32)
LABELS = np.arange(48) % 10


def trained(folder: Path, steps: int = 3, **options: Any) -> TrainingSession:
    options = {"quantize": "int8", "calibration": [X], **options}
    prepare(network(), folder, **options)
    session = TrainingSession(folder)
    session.set_learning_rate(0.01)
    losses = [np.asarray(first(session.step(X, LABELS))) for _ in range(steps)]
    assert np.isfinite(losses).all()
    return session


def first(found: Any) -> Any:
    return found[0] if isinstance(found, tuple | list) else found


def changed(folder: Path, session: TrainingSession) -> set[str]:
    """The parameters that are not those of the checkpoint that was prepared."""
    before = CheckpointState.load_checkpoint(folder / "checkpoint").parameters
    now = session.state.parameters
    return {n for n, p in now if not np.array_equal(p.data, before[n].data)}


def outputs(session: TrainingSession, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """What evaluation says, and what the exported model says."""
    session.export_model_for_inferencing(folder / "out.onnx", ["scores"])
    return np.asarray(first(session.predict(X))), onnxtrain.predict(folder / "out.onnx", X)


CHOICES = {
    "head": ("head", {"fc2.weight", "fc2.bias"}),
    "bias": ("bias", {"conv1.bias", "conv2.bias", "fc1.bias", "fc2.bias"}),
    "last": ("last:2", {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}),
    "pattern": ("conv2.*", {"conv2.weight", "conv2.bias"}),
}


@pytest.mark.parametrize("scales", ["average", "learned"])
@pytest.mark.parametrize("choice", CHOICES)
def test_frozen_layers_stay(tmp_path, choice, scales) -> None:
    train, wanted = CHOICES[choice]
    session = trained(tmp_path, train=train, quantize=Quantize(scales=scales))
    found = changed(tmp_path, session)
    assert {n for n in found if n.partition(".")[2] in ("weight", "bias")} == wanted
    shifts = {n for n in found if n.endswith(".weight.scale_shift")}
    learned = {f"{n}.scale_shift" for n in wanted if n.endswith("weight")}
    assert shifts == (learned if scales == "learned" else set())
    evaluated, exported = outputs(session, tmp_path)
    np.testing.assert_allclose(exported, evaluated, atol=0.05)


@pytest.mark.parametrize("scales", ["average", "learned"])
@pytest.mark.parametrize(("train", "moving"), [("fc2.*", 1), ("fc1.*", 2), ("conv2.*", 3)])
def test_scales_in_the_frozen_part_are_constants(tmp_path, train, moving, scales) -> None:
    """Those of what a layer that trains reads, unless learned, and makes follow training."""
    name = {"average": "quantization.ranges", "learned": "activations.scale_shift"}[scales]
    session = trained(tmp_path, train=train, quantize=Quantize(scales=scales))
    before = CheckpointState.load_checkpoint(tmp_path / "checkpoint").parameters[name].data
    rows = (before != session.get_parameter(name)).reshape(len(before), -1).any(1)
    assert np.count_nonzero(rows) == (moving if scales == "average" else max(1, moving - 1))
    evaluated, exported = outputs(session, tmp_path)
    np.testing.assert_allclose(exported, evaluated, atol=0.05)


def test_frozen_layers_run_on_integers_in_training(tmp_path) -> None:
    prepare(network(), tmp_path, train="fc2.*", quantize="int8", calibration=[X])
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 4
    TrainingSession(tmp_path, session_options=options).train_step(X, LABELS)
    kinds = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert kinds.count("QLinearConv") == 2 and "Conv" not in kinds


def test_a_new_head(tmp_path) -> None:
    session = trained(tmp_path, classes=12)
    names = changed(tmp_path, session)
    assert {n for n in names if not n.startswith("quantization.")} <= {
        n for n, p in session.state.parameters if p.requires_grad
    }
    name = session.output_names(training=False)[1]
    session.export_model_for_inferencing(tmp_path / "out.onnx", [name])
    assert onnxtrain.predict(tmp_path / "out.onnx", X).shape == (48, 12)


@pytest.mark.parametrize("train", ["lora", "lora:rank=2", "sparse:1MB"])
def test_adapters_are_refused(tmp_path, train) -> None:
    with pytest.raises(ArgumentError, match=r"and quantize do not go together: factors and"):
        prepare(network(), tmp_path / "a", train=train, quantize="int8", calibration=[X])


def test_batch_statistics_are_refused(tmp_path) -> None:
    with pytest.raises(ArgumentError, match="bn='batch' and quantize do not go together"):
        prepare(network(), tmp_path / "a", bn="batch", quantize="int8", calibration=[X])


OPTIONS = {
    "sgd": {"optimizer": "sgd:momentum=0.9"},
    "proximal": {"proximal": True},
    "no tie": {"tie_weights": False},
    "webgpu": {"target": "webgpu"},
    "frozen bn": {"bn": "frozen"},
    "plain": {"native": False},
    "learned": {"quantize": "int8:scales=learned"},
    "signed": {"quantize": Quantize(activations="int8")},
    "seven bits": {"quantize": "int8:reduce_range=True"},
    "int4": {"quantize": "int4-weights"},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_other_options(tmp_path, case) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # operators without WebGPU kernels
        session = trained(tmp_path, **OPTIONS[case])
    assert {"conv1.weight", "fc2.bias"} <= changed(tmp_path, session)
    evaluated, exported = outputs(session, tmp_path)
    np.testing.assert_allclose(exported, evaluated, atol=0.05)


def test_weights_of_samples(tmp_path) -> None:
    prepare(network(), tmp_path, quantize="int8", calibration=[X], sample_weight=True)
    session = TrainingSession(tmp_path)
    found = onnxtrain.fit(session, (X, LABELS), epochs=1, class_weight="balanced")
    assert np.isfinite(found.losses).all()


def test_without_gradients(tmp_path) -> None:
    session = trained(tmp_path, optimizer="mezo")
    assert {"conv1.weight", "quantization.ranges"} <= changed(tmp_path, session)


def test_modules_and_optimizers_of_upstream(tmp_path) -> None:
    prepare(network(), tmp_path / "a", quantize="int8", calibration=[X], optimizer="sgd")
    fused = TrainingSession(tmp_path / "a")
    state = CheckpointState.load_checkpoint(tmp_path / "a/checkpoint")
    module = Module(tmp_path / "a/training_model.onnx", state, tmp_path / "a/eval_model.onnx")
    optimizer = Optimizer(tmp_path / "a/optimizer_model.onnx", module)
    optimizer.set_learning_rate(0.1)
    fused.set_learning_rate(0.1)
    for _ in range(3):
        module.train()
        module(X, LABELS)
        optimizer.step()
        module.lazy_reset_grad()
        fused.step(X, LABELS)
    for name, parameter in state.parameters:
        wanted = fused.get_parameter(name)
        np.testing.assert_allclose(parameter.data, wanted, rtol=1e-4, atol=1e-5, err_msg=name)


def deep(layers: int = 8) -> onnx.ModelProto:
    """A residual network, deep enough that activations take most of the memory."""
    nodes, weights, x = [], dict[str, Any](), "x"
    for i in range(layers):
        weights[f"w{i}"] = (RNG.standard_normal((16, 16, 1, 1)) / 8).astype(np.float32)
        nodes += [
            helper.make_node("Conv", [x, f"w{i}"], [f"c{i}"]),
            helper.make_node("Relu", [f"c{i}"], [f"r{i}"]),
            helper.make_node("Add", [f"r{i}", x], [f"s{i}"]),
        ]
        x = f"s{i}"
    nodes += [
        helper.make_node("GlobalAveragePool", [x], ["g"]),
        helper.make_node("Flatten", ["g"], ["f"]),
        helper.make_node("MatMul", ["f", "w"], ["y"]),
    ]
    weights["w"] = RNG.standard_normal((16, 10)).astype(np.float32)
    return model(nodes, [value("x", ["batch", 16, 12, 12])], [value("y", ["batch", 10])], weights)


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["int8", "int8:scales=learned"])
def test_a_memory_budget(tmp_path, quantize) -> None:
    x = RNG.standard_normal((16, 16, 12, 12)).astype(np.float32)
    given = deep()
    options = {"quantize": quantize, "calibration": [x], "sizes": {"batch": 16}}
    prepare(given, tmp_path / "whole", **options)
    made = prepare(given, tmp_path / "lean", memory_budget="80%", **options)
    assert made.memory is not None
    sessions = [TrainingSession(tmp_path / name) for name in ("whole", "lean")]
    losses = [[float(first(s.step(x, LABELS[:16]))) for _ in range(3)] for s in sessions]
    np.testing.assert_allclose(*losses, rtol=1e-3)


# ---- inspect -------------------------------------------------------------------------------------


def test_inspect_says_what_runs_on_integers() -> None:
    found = inspect(network(), quantize="int8").integers
    assert found is not None
    assert (found.products, found.total, found.floats) == (4, 4, {})
    assert str(found) == "4 of 4 products run on integers."
    assert inspect(network()).integers is None


def test_inspect_says_what_does_not_and_why() -> None:
    report = inspect(network(), quantize=Quantize(exclude="conv1", last=False))
    found = report.integers
    assert found is not None and found.products == 2
    assert found.floats == {
        "Conv: excluded": ("conv1_Conv",),
        "Gemm: it makes an output of the model (last=False)": ("scores_Gemm",),
    }
    assert "integers      2 of 4 products run on integers. In floats: 1 Conv: excl" in str(report)
    weights = inspect(network(), quantize="int4-weights").integers
    assert str(weights) == "4 of 4 products have integer weights."


def test_inspect_reads_models_that_are_quantized(tmp_path) -> None:
    session = trained(tmp_path)
    session.export_model_for_inferencing(tmp_path / "out.onnx", ["scores"])
    assert any(n.op_type == "QuantizeLinear" for n in onnx.load(tmp_path / "out.onnx").graph.node)
    found = inspect(tmp_path / "out.onnx", quantize="int8").integers
    assert found is not None and (found.products, found.total) == (4, 4)
