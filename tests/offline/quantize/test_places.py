"""What is quantized, what is not, and what is said about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import by_hand
import numpy as np
import onnx
import pytest
from by_hand import Builder, feeds
from deploying import compare_with_trained, deploy, float_operators, kernels
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from onnxtrain import Quantize
from onnxtrain.errors import ArgumentError


def prepare(model: onnx.ModelProto, folder: Path, quantize: Any = "int8") -> str:
    made = onnxtrain.prepare(
        model, folder, loss="mse", quantize=quantize, calibration=[feeds(model)]
    )
    return " ".join(made.notes)


def test_excluded_layers_stay_floats(tmp_path: Path) -> None:
    model = by_hand.residual()
    convs = [node.name for node in model.graph.node if node.op_type == "Conv"]
    how = Quantize(exclude=[convs[1], "Gemm_*"])
    path = deploy(model, tmp_path, feeds(model), how)
    left = float_operators(path)
    assert left["Gemm"] == 1 and left["Conv"] == 1
    assert max(compare_with_trained(path, feeds(model)).values()) < 1e-3
    assert "excluded" in (tmp_path / "notes.txt").read_text()


def test_an_excluded_layer_between_others_stays_float(tmp_path: Path) -> None:
    """onnxruntime quantizes weights between integers by itself, if nothing keeps it from that."""
    b = Builder()
    x = b.conv(b.conv(b.conv("x", 3, 4), 4, 4), 4, 4)
    model = b.model(by_hand.IMAGE, {x: ["N", 4, 12, 12]})
    path = deploy(model, tmp_path, feeds(model), Quantize(exclude="Conv_1"))
    found = kernels(path)
    assert found["QLinearConv"] == 2 and found["Conv"] == 1
    assert max(compare_with_trained(path, feeds(model)).values()) < 1e-3


def test_each_pattern_has_to_be_a_layer(tmp_path: Path) -> None:
    model = by_hand.residual()
    with pytest.raises(ArgumentError, match=r"'head\*', 'Conv_99' \(did you mean 'Conv_"):
        prepare(model, tmp_path / "a", Quantize(exclude=["Gemm_*", "head*", "Conv_99"]))


def test_first_and_last_layers_by_choice(tmp_path: Path) -> None:
    model = by_hand.residual()
    path = deploy(model, tmp_path, feeds(model), Quantize(first=False, last=False))
    left = float_operators(path)
    assert left["Gemm"] + left["FusedGemm"] == 1 and left["Conv"] + left["FusedConv"] == 1
    text = (tmp_path / "notes.txt").read_text()
    assert "first=False" in text and "last=False" in text


def test_half_floats_are_told(tmp_path: Path) -> None:
    b = Builder()
    weight = b.tensor(np.ones((4, 3), np.float16))
    half = b("Cast", "x", to=TensorProto.FLOAT16)
    y = b("Cast", b("MatMul", half, weight), to=TensorProto.FLOAT)
    model = b.model({"x": ["N", 4]}, {y: ["N", 3]})
    with pytest.raises(ArgumentError, match="float16: take the model in float32"):
        prepare(model, tmp_path / "a")


def test_a_model_without_products_is_told(tmp_path: Path) -> None:
    b = Builder()
    y = b("Mul", b("Relu", "x"), b.random(4))
    with pytest.raises(ArgumentError, match="no layer that multiplies"):
        prepare(b.model({"x": ["N", 4]}, {y: ["N", 4]}), tmp_path / "a")


def test_layers_without_integer_kernels_say_why(tmp_path: Path) -> None:
    b = Builder()
    x = b("Relu", b.conv("x", 3, 8))
    x = b("ConvTranspose", x, b.random(8, 8, 2, 2), strides=[2, 2])
    x = b("Relu", b.conv(x, 8, 4))
    x = b("Transpose", b("Reshape", x, b.tensor(np.array([0, 4, 576]))), perm=[2, 0, 1])
    y, _, _ = b("LSTM", x, b.random(1, 20, 4), b.random(1, 20, 5), outputs=3, hidden_size=5)
    y = b("Reshape", b("ReduceMean", y, b.tensor(np.array([0]))), b.tensor(np.array([-1, 5])))
    model = b.model(by_hand.IMAGE, {b.gemm(y, 5, 3): ["N", 3]})
    path = deploy(model, tmp_path, feeds(model))
    found = kernels(path)
    assert found["QLinearConv"] == 2 and found["ConvTranspose"] == 1 and found["LSTM"] == 1
    text = (tmp_path / "notes.txt").read_text()
    assert "3 of 5 products" in text
    assert "1 ConvTranspose: onnxruntime has no kernel" in text


def test_layers_in_bodies_stay_floats(tmp_path: Path) -> None:
    b = Builder()
    h = b("Relu", b.gemm("x", 5, 6))
    bodies = []
    for name in ("then", "else"):
        weight = numpy_helper.from_array(np.full((6, 6), 0.1, np.float32), f"{name}_weight")
        node = helper.make_node("MatMul", [h, weight.name], [f"{name}_y"])
        output = helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, ["N", 6])
        bodies.append(helper.make_graph([node], name, [], [output], [weight]))
    positive = b("Greater", b("ReduceMax", "x", keepdims=0), b.tensor(np.float32(0)))
    y = b("If", positive, then_branch=bodies[0], else_branch=bodies[1])
    model = b.model({"x": ["N", 5]}, {b.gemm(y, 6, 3): ["N", 3]})
    path = deploy(model, tmp_path, feeds(model))
    assert kernels(path)["QGemm"] == 2
    assert "layers in its bodies stay as they are" in (tmp_path / "notes.txt").read_text()


def test_weights_of_seven_bits(tmp_path: Path) -> None:
    """With them, no sum of two products leaves 16 bits, which processors without VNNI add in."""
    model = by_hand.residual()
    path = deploy(model, tmp_path, feeds(model), Quantize(reduce_range=True))
    weights = [
        numpy_helper.to_array(t).astype(int) for t in onnx.load(path).graph.initializer
        if t.data_type == TensorProto.INT8 and len(t.dims) > 1
    ]  # fmt: skip
    assert weights and max(np.abs(w).max() for w in weights) * 255 * 2 < 2**15
    assert not float_operators(path)


def test_a_dead_channel_keeps_its_bias(tmp_path: Path) -> None:
    """Its weights are zero, so that nothing but the bias decides what the scale is."""
    b = Builder()
    weight = np.random.default_rng(0).normal(size=(4, 3, 3, 3)).astype(np.float32)
    weight[1], weight[2] = 0, 1e-9
    bias = b.tensor(np.array([0.1, 2.0, -1.5, 0.3], np.float32))
    x = b("Conv", "x", b.tensor(weight), bias, pads=[1] * 4)
    model = b.model({"x": ["N", 3, 6, 6]}, {x: ["N", 4, 6, 6]})
    path = deploy(model, tmp_path, feeds(model), steps=0)
    from deploying import outputs_of

    found = outputs_of(path, feeds(model))[0]
    np.testing.assert_allclose(found[:, 1], 2.0, atol=0.1)
    np.testing.assert_allclose(found[:, 2], -1.5, atol=0.1)
    assert max(compare_with_trained(path, feeds(model)).values()) == 0


@pytest.mark.parametrize("scales", ["average", "learned"])
def test_bounds_hold_while_scales_follow(scales: str, tmp_path: Path) -> None:
    """Relu and Clip are left to the ranges, which must not leave 0 to 6 on their own."""
    model = by_hand.depthwise()
    given = {name: 20 * array for name, array in feeds(model).items()}
    path = deploy(model, tmp_path, given, f"int8:scales={scales},momentum=0.5", steps=4)
    assert not float_operators(path)
    assert max(compare_with_trained(path, given).values()) < 1e-3


def test_dropout_is_not_in_the_way(tmp_path: Path) -> None:
    b = Builder()
    ratio, training = b.tensor(np.float32(0.5)), b.tensor(np.array(True))
    h = b("Dropout", b("Relu", b.gemm("x", 8, 8)), ratio, training)
    model = b.model({"x": ["N", 8]}, {b.gemm(h, 8, 3): ["N", 3]})
    path = deploy(model, tmp_path, feeds(model), "int8:momentum=1")
    assert not float_operators(path)
    quantizers = [n for n in onnx.load(path).graph.node if n.op_type == "QuantizeLinear"]
    assert len(quantizers) == 2
