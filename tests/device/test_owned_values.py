"""Values that a session gives out own their memory; buffers have the order of the model."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxtrain

RNG = np.random.default_rng(0)
SHAPES = {"first.weight": (30, 40), "first.bias": (40,), "last.weight": (40, 3), "last.bias": (3,)}


@pytest.fixture(scope="module")
def session(tmp_path_factory) -> onnxtrain.TrainingSession:
    """Two layers, whose matrices are larger than what shape inference reads."""
    value = helper.make_tensor_value_info
    weights = [
        numpy_helper.from_array(RNG.standard_normal(shape).astype(np.float32), name)
        for name, shape in SHAPES.items()
    ]
    graph = helper.make_graph(
        [
            helper.make_node("Gemm", ["x", "first.weight", "first.bias"], ["h"]),
            helper.make_node("Gemm", ["h", "last.weight", "last.bias"], ["y"]),
        ],
        "layers",
        [value("x", TensorProto.FLOAT, ["N", 30])],
        [value("y", TensorProto.FLOAT, ["N", 3])],
        weights,
    )
    folder = tmp_path_factory.mktemp("artifacts")
    opset = [helper.make_opsetid("", 17)]
    onnxtrain.prepare(helper.make_model(graph, opset_imports=opset, ir_version=8), folder)
    made = onnxtrain.TrainingSession(folder)
    made.set_learning_rate(0.0)
    return made


def borrowed(array: np.ndarray) -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_numpy(array)


@pytest.mark.parametrize("call", ["step", "train_step", "eval_step", "to_buffer"])
def test_arrays_outlive_the_values_that_they_are_of(call: str, session) -> None:
    x, labels = RNG.standard_normal((8, 30)).astype(np.float32), np.arange(8) % 3

    def run() -> list[ort.OrtValue]:
        if call == "to_buffer":
            return [session.to_buffer()]
        return list(getattr(session, call)(borrowed(x), borrowed(labels)))

    expected = [np.array(value.numpy()) for value in run()]
    found = [[value.numpy() for value in run()] for _ in range(10)]  # of values that are gone
    noise = [np.full(array.shape, 7.0, np.float32) for array in expected for _ in range(20)]
    for arrays in found:
        for array, wanted in zip(arrays, expected, strict=True):
            np.testing.assert_array_equal(array, wanted)
    assert len(noise) == 20 * len(expected)


def test_buffers_have_the_order_of_the_model(session) -> None:
    parts = [session.get_parameter(name).reshape(-1) for name in SHAPES]
    np.testing.assert_array_equal(session.to_buffer().numpy(), np.concatenate(parts))
