"""Models that are quantized already are taken as they are: their places, ranges and results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import by_hand
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from deploying import deploy, float_operators, outputs_of, quiet
from onnx import numpy_helper
from onnxruntime import quantization as q

import onnxtrain
from onnxtrain.errors import ArgumentError

U8, S8 = q.QuantType.QUInt8, q.QuantType.QInt8


class Reader(q.CalibrationDataReader):
    def __init__(self, feeds: dict[str, Any]) -> None:
        self._left = [feeds]

    def get_next(self) -> dict[str, Any] | None:
        return self._left.pop() if self._left else None


def quantized(
    model: onnx.ModelProto, folder: Path, feeds: dict[str, Any], **options: Any
) -> onnx.ModelProto:
    folder.mkdir(parents=True, exist_ok=True)
    plain, made = folder / "float.onnx", folder / "given.onnx"
    onnx.save(model, plain)
    options.setdefault("quant_format", q.QuantFormat.QDQ)
    q.quantize_static(plain, made, Reader(feeds), **options)
    return onnx.load(made)


def steps_apart(given: onnx.ModelProto, path: Path, feeds: dict[str, Any]) -> float:
    """Return the largest difference of the first output, in steps of its range."""
    (expected, *_), (found, *_) = (outputs_of(m, feeds) for m in (given, path))
    return float(np.abs(expected - found).max() / (np.ptp(expected) / 255))


FORMS = {
    "per-channel": {"per_channel": True, "activation_type": U8, "weight_type": S8},
    "per-tensor": {"activation_type": U8, "weight_type": S8},
    "signed": {"per_channel": True, "activation_type": S8, "weight_type": S8},
    "asymmetric-weights": {"activation_type": U8, "weight_type": U8},
    "symmetric-activations": {
        "activation_type": S8, "weight_type": S8, "extra_options": {"ActivationSymmetric": True},
    },
    "pairs-on-weights": {
        "per_channel": True, "activation_type": U8, "weight_type": S8,
        "extra_options": {"AddQDQPairToWeight": True},
    },
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("network", ["residual", "depthwise", "concatenating"])
def test_a_quantized_model_is_taken_as_it_is(network: str, form: str, tmp_path: Path) -> None:
    model = by_hand.NETWORKS[network]()
    feeds = by_hand.feeds(model)
    given = quantized(model, tmp_path, feeds, **FORMS[form])
    path = deploy(given, tmp_path / "again", feeds, steps=0, calibrated=False)
    most = {"asymmetric-weights": 4, "symmetric-activations": 2}.get(form, 1.01)
    assert steps_apart(given, path, feeds) <= most
    assert activation_scales(given) == pytest.approx(activation_scales(onnx.load(path)), rel=1e-5)
    assert float_operators(path) == float_operators(tmp_path / "given.onnx")


def activation_scales(model: onnx.ModelProto) -> list[float]:
    numbers = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    found = [
        float(numbers[node.input[1]].reshape(()))
        for node in model.graph.node
        if node.op_type == "QuantizeLinear" and node.input[0] not in numbers
    ]
    return sorted(found)


@pytest.mark.parametrize("scales", ["average", "learned", "fixed"])
def test_weights_of_a_quantized_model_train_again(scales: str, tmp_path: Path) -> None:
    model = by_hand.residual()
    feeds = by_hand.feeds(model)
    given = quantized(model, tmp_path, feeds, **FORMS["per-channel"])
    folder = tmp_path / "again"
    onnxtrain.prepare(
        given, folder, loss="mse", optimizer="adamw", quantize=f"int8:scales={scales}"
    )
    session = onnxtrain.TrainingSession.from_folder(folder)
    session.set_learning_rate(3e-3)
    target = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    losses = [float(session.step(feeds["x"], target)[0]) for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]


def test_a_model_of_integer_operators_is_lifted_too(tmp_path: Path) -> None:
    model = by_hand.residual()
    feeds = by_hand.feeds(model)
    given = quantized(
        model, tmp_path, feeds, quant_format=q.QuantFormat.QOperator, per_channel=True
    )
    assert any(node.op_type == "QLinearConv" for node in given.graph.node)
    path = deploy(given, tmp_path / "again", feeds, steps=0, calibrated=False)
    assert steps_apart(given, path, feeds) <= 2
    assert float_operators(path) == float_operators(tmp_path / "given.onnx")


def test_what_onnxruntime_optimised_is_lifted_too(tmp_path: Path) -> None:
    model = by_hand.residual()
    feeds = by_hand.feeds(model)
    quantized(model, tmp_path, feeds, **FORMS["per-channel"])
    options = quiet()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    ort.InferenceSession(str(tmp_path / "given.onnx"), options)
    given = onnx.load(tmp_path / "optimised.onnx")
    path = deploy(given, tmp_path / "again", feeds, steps=0, calibrated=False)
    assert steps_apart(given, path, feeds) <= 2


def by_hand_pairs(dtype: Any = np.uint8, scale: Any = 0.05, zero: Any = 128) -> onnx.ModelProto:
    """Two products; the first has a Relu that only its range says."""
    b = by_hand.Builder()
    x_scale, x_zero = b.tensor(np.float32(scale)), b.tensor(np.array(zero, dtype))
    y_scale, y_zero = b.tensor(np.float32(0.02)), b.tensor(np.array(np.iinfo(dtype).min, dtype))

    def pair(x: str, *how: str) -> str:
        return b("DequantizeLinear", b("QuantizeLinear", x, *how), *how)

    rng = np.random.default_rng(1)
    weight = b.tensor(rng.integers(-127, 128, (8, 5), np.int8), "first.weight_quantized")
    scales = b.tensor(np.linspace(0.002, 0.004, 8).astype(np.float32))
    first = b("DequantizeLinear", weight, scales, axis=0)
    hidden = pair(b("Gemm", pair("x", x_scale, x_zero), first, transB=1), y_scale, y_zero)
    second = b.tensor(rng.integers(-127, 128, (3, 8), np.int8), "second.weight_quantized")
    second = b("DequantizeLinear", second, b.tensor(np.float32(0.003)))
    return b.model({"x": ["N", 5]}, {b("Gemm", hidden, second, transB=1): ["N", 3]})


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_a_range_from_zero_stays_a_relu(dtype: Any, tmp_path: Path) -> None:
    given = by_hand_pairs(dtype, zero=128 if dtype is np.uint8 else 0)
    feeds = by_hand.feeds(given)
    path = deploy(given, tmp_path, feeds, steps=0, calibrated=False)
    assert steps_apart(given, path, feeds) < 0.1
    trained = deploy(given, tmp_path / "more", feeds, steps=3, calibrated=False)
    session = ort.InferenceSession(str(trained), quiet())
    zeros = [
        numpy_helper.to_array(t) for t in onnx.load(trained).graph.initializer
        if t.name.endswith("zero_point") and "x_" not in t.name
    ]  # fmt: skip
    assert session.get_outputs() and zeros
    assert min(int(z) for z in zeros) == 0


def test_activations_of_16_bits_are_refused(tmp_path: Path) -> None:
    b = by_hand.Builder(opset=21)
    how = b.tensor(np.float32(0.01)), b.tensor(np.array(32768, np.uint16))
    x = b("DequantizeLinear", b("QuantizeLinear", "x", *how), *how)
    model = b.model({"x": ["N", 5]}, {b.gemm(x, 5, 3): ["N", 3]})
    model.ir_version = 10
    with pytest.raises(ArgumentError, match="uint16"):
        onnxtrain.prepare(model, tmp_path / "a", loss="mse", quantize="int8")


def test_calibration_data_of_a_quantized_model_are_not_needed(tmp_path: Path) -> None:
    given = by_hand_pairs()
    made = onnxtrain.prepare(
        given, tmp_path / "a", loss="mse", quantize="int8", calibration=[by_hand.feeds(given)]
    )
    assert any("those of the given model" in note for note in made.notes)


def test_integers_that_cannot_train_are_refused(tmp_path: Path) -> None:
    b = by_hand.Builder()
    x, scale, zero = b("DynamicQuantizeLinear", "x", outputs=3)
    weight = b.tensor(np.ones((5, 3), np.uint8))
    product = b("Cast", b("MatMulInteger", x, weight, zero), to=1)
    model = b.model({"x": ["N", 5]}, {b("Mul", product, scale): ["N", 3]})
    with pytest.raises((ArgumentError, onnxtrain.errors.OnnxTrainError)):
        onnxtrain.prepare(model, tmp_path / "a", loss="mse", quantize="int8")
