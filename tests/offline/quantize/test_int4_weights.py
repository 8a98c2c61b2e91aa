"""Weights of 4 bits: products with floats, whatever their sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from by_hand import Builder, feeds
from deploying import compare_with_trained, deploy, kernels, outputs_of

from onnxtrain import Quantize


def layers(kind: str, inputs: int, outputs: int) -> onnx.ModelProto:
    b = Builder()
    if kind == "gemm":
        y = b.gemm(b("Relu", b.gemm("x", inputs, outputs)), outputs, 3, bias=False)
        return b.model({"x": ["N", inputs]}, {y: ["N", 3]})
    first, second = b.random(inputs, outputs), b.random(outputs, 3)
    y = b("MatMul", b("Relu", b("Add", b("MatMul", "x", first), b.random(outputs))), second)
    return b.model({"x": ["N", 4, inputs]}, {y: ["N", 4, 3]})


@pytest.mark.parametrize("kind", ["gemm", "matmul"])
@pytest.mark.parametrize("inputs, outputs", [(64, 32), (48, 33), (20, 7), (130, 5), (1, 2)])
def test_products_of_any_size(kind: str, inputs: int, outputs: int, tmp_path: Path) -> None:
    model = layers(kind, inputs, outputs)
    given = feeds(model)
    path = deploy(model, tmp_path, given, "int4-weights", calibrated=False)
    found = kernels(path)
    assert found["MatMulNBits"] == 2, dict(found)
    assert not found["MatMul"] and not found["Gemm"]
    assert max(compare_with_trained(path, given).values()) == 0


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("scales", ["average", "learned", "fixed"])
def test_scales_by_blocks(scales: Any, block: int, tmp_path: Path) -> None:
    model = layers("gemm", 96, 32)
    given = feeds(model)
    how = Quantize(weights="int4", activations="float", scales=scales, block=block)
    path = deploy(model, tmp_path, given, how, calibrated=False)
    assert kernels(path)["MatMulNBits"] == 2
    tensors = {t.name: tuple(t.dims) for t in onnx.load(path).graph.initializer}
    assert (-(-96 // block), 32) in tensors.values()
    expected, found = outputs_of(model, given)[0], outputs_of(path, given)[0]
    assert np.abs(expected - found).mean() < 0.15 * np.abs(expected).mean()


def test_a_weight_of_two_layers(tmp_path: Path) -> None:
    b = Builder()
    weight = b.random(32, 32)
    y = b("MatMul", b("Relu", b("MatMul", "x", weight)), weight)
    model = b.model({"x": ["N", 32]}, {y: ["N", 32]})
    given = feeds(model)
    path = deploy(model, tmp_path, given, "int4-weights", calibrated=False)
    assert kernels(path)["MatMulNBits"] == 2
    assert max(compare_with_trained(path, given).values()) == 0


def test_a_weight_that_is_read_in_two_ways(tmp_path: Path) -> None:
    b = Builder()
    weight = b.random(32, 32)
    y = b("Gemm", b("Relu", b("Gemm", "x", weight, transB=1)), weight)
    model = b.model({"x": ["N", 32]}, {y: ["N", 32]})
    given = feeds(model)
    path = deploy(model, tmp_path, given, "int4-weights", calibrated=False)
    expected, found = outputs_of(model, given)[0], outputs_of(path, given)[0]
    assert np.abs(expected - found).mean() < 0.3 * np.abs(expected).mean()


def test_convolutions_have_scales_by_channel(tmp_path: Path) -> None:
    b = Builder()
    x = b("GlobalAveragePool", b("Relu", b.conv("x", 3, 8)))
    model = b.model({"x": ["N", 3, 8, 8]}, {b.gemm(b("Flatten", x), 8, 4): ["N", 4]})
    given = feeds(model)
    path = deploy(model, tmp_path, given, "int4-weights", calibrated=False)
    types = {t.data_type for t in onnx.load(path).graph.initializer}
    assert onnx.TensorProto.INT4 in types
    assert max(compare_with_trained(path, given).values()) == 0
