"""A small network of floats, and its forms of integers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)

import onnxtrain
from graphs import model, value

Array = np.ndarray[Any, Any]


def network(batch: str | int = "n") -> onnx.ModelProto:
    """Conv, BatchNormalization, Relu, Conv, sum, mean, Gemm: four classes of 6 x 6 images."""
    rng = np.random.default_rng(0)

    def normal(*shape: int, by: float = 0.4) -> Array:
        return (by * rng.standard_normal(shape)).astype(np.float32)

    node = helper.make_node
    return model(
        [
            node("Conv", ["image", "one.weight"], ["before"], "one", pads=[1] * 4),
            node("BatchNormalization", ["before", *(f"norm.{i}" for i in range(4))], ["a"], "norm"),
            node("Relu", ["a"], ["r"], "relu"),
            node("Conv", ["r", "two.weight", "two.bias"], ["c"], "two", pads=[1] * 4),
            node("Add", ["c", "r"], ["s"], "sum"),
            node("GlobalAveragePool", ["s"], ["mean"], "pool"),
            node("Flatten", ["mean"], ["features"], "flat"),
            node("Gemm", ["features", "head.weight", "head.bias"], ["scores"], "head", transB=1),
        ],
        [value("image", [batch, 2, 6, 6])],
        [value("scores", [batch, 4])],
        {
            "one.weight": normal(8, 2, 3, 3),
            "norm.0": 1 + normal(8, by=0.1),
            "norm.1": normal(8),
            "norm.2": normal(8),
            "norm.3": 1 + np.abs(normal(8)),
            "two.weight": normal(8, 8, 3, 3, by=0.1),
            "two.bias": normal(8),
            "head.weight": normal(4, 8),
            "head.bias": normal(4),
        },
        opset=17,
    )


def samples(count: int = 96) -> tuple[Array, Array]:
    """Images, and classes that have nothing to do with them."""
    rng = np.random.default_rng(1)
    images = rng.standard_normal((count, 2, 6, 6)).astype(np.float32)
    return images, rng.integers(0, 4, count)


class _Calibration(CalibrationDataReader):
    def __init__(self) -> None:
        self._left: Iterator[Mapping[str, Array]] = iter([{"image": samples()[0]}])

    def get_next(self) -> Mapping[str, Array] | None:
        return next(self._left, None)


def quantized_by_onnxruntime(source: Path, target: Path, form: str) -> None:
    """Write a model of integers as onnxruntime's own tool makes it."""
    if form == "dynamic":
        quantize_dynamic(source, target, op_types_to_quantize=["Gemm", "MatMul"])
        return
    quantize_static(
        source, target, _Calibration(), weight_type=QuantType.QInt8, per_channel=form == "QDQ",
        quant_format=QuantFormat.QDQ if form == "QDQ" else QuantFormat.QOperator,
    )  # fmt: skip


def quantized_by_us(source: Path, target: Path, how: str = "int8") -> None:
    """Write what training for integers exports, before any step."""
    folder = target.with_suffix("")
    images = samples()[0]
    onnxtrain.prepare(source, folder, quantize=how, calibration=[images])
    session = onnxtrain.TrainingSession(folder)
    session.export_model_for_inferencing(target, ["scores"])
