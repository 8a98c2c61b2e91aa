"""An output in the memory of an input is an error where it would be read after it is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper

from native.harness import session_of
from native.kernel_calls import Array

Outputs = dict[str, tuple[int, tuple[int, ...]]]  # the address and the shape of each


@pytest.fixture(autouse=True)
def needs_library(native_library: object) -> None:
    if native_library is None:
        pytest.skip("there is no compiler to build the native library")


def call_into(kind: str, inputs: dict[str, Array], outputs: Outputs, **attributes: Any) -> None:
    """Run a kernel on memory that is bound by its address."""
    opsets, names = [helper.make_opsetid("", 18)], list(inputs)
    body = [helper.make_node("Identity", names[:1], [output]) for output in outputs]
    name = f"{kind}_0"
    function = helper.make_function("ai.onnxtrain", name, names, list(outputs), body, opsets)
    node = helper.make_node(name, names, list(outputs), domain="ai.onnxtrain", **attributes)
    graph = helper.make_graph(
        [node],
        "graph",
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in inputs.items()
        ],
        [helper.make_tensor_value_info(n, 1, shape) for n, (_, shape) in outputs.items()],
    )
    opsets.append(helper.make_opsetid("ai.onnxtrain", 1))
    model = helper.make_model(graph, functions=[function], ir_version=10, opset_imports=opsets)
    session = session_of(model, native=True)
    binding = session.io_binding()
    for n, a in inputs.items():
        binding.bind_input(n, "cpu", 0, a.dtype.type, a.shape, a.ctypes.data)
    for n, (address, shape) in outputs.items():
        binding.bind_output(n, "cpu", 0, np.float32, shape, address)
    session.run_with_iobinding(binding)


def test_labels_are_not_overwritten_while_they_are_read() -> None:
    x = np.random.default_rng(0).normal(size=(4096, 2)).astype(np.float32)
    sums = np.exp(x - x.max(1, keepdims=True)).sum(1)
    given: dict[str, Array] = {
        "d": np.array(1, np.float32),
        "rows": np.stack([x.max(1), 1 / sums]),
        "x": x,
        "labels": np.arange(4096) % 2,
    }
    own = np.zeros_like(x)
    call_into("SoftmaxCrossEntropyGrad", given, {"dx": (own.ctypes.data, x.shape)})
    assert own.any()
    with pytest.raises(Exception, match="overlaps"):
        address = given["labels"].ctypes.data
        call_into("SoftmaxCrossEntropyGrad", given, {"dx": (address, x.shape)})
    np.testing.assert_array_equal(given["labels"], np.arange(4096) % 2)


@pytest.mark.parametrize("offset", [0, 64, -64])
def test_a_convolution_into_its_image(offset: int) -> None:
    memory = np.ones(64 * 64 + 200, np.float32)
    x, w = memory[100:-100].reshape(1, 1, 64, 64), np.ones((1, 1, 3, 3), np.float32)
    outputs: Outputs = {"y": (x.ctypes.data + 4 * offset, (1, 1, 64, 64))}
    with pytest.raises(Exception, match="overlaps"):
        call_into("Conv", {"x": x, "w": w}, outputs, pads=[1, 1, 1, 1])
    assert memory.all()


def test_element_wise_gradients_may_take_the_place_of_the_cotangent_alone() -> None:
    dy, y = np.arange(8, dtype=np.float32), np.array([1, 0] * 4, np.float32)
    call_into("ReluGrad", {"dy": dy, "y": y}, {"dx": (dy.ctypes.data, dy.shape)})
    np.testing.assert_array_equal(dy, [0, 0, 2, 0, 4, 0, 6, 0])
    with pytest.raises(Exception, match="overlaps"):
        call_into("ReluGrad", {"dy": dy[:4], "y": y[:4]}, {"dx": (dy.ctypes.data + 4, (4,))})
    with pytest.raises(Exception, match="overlaps"):
        call_into("ReluGrad", {"dy": dy, "y": y}, {"dx": (y.ctypes.data, y.shape)})


def test_two_outputs_in_one_place() -> None:
    x, factor = np.ones((4, 8), np.float32), np.ones(8, np.float32)
    memory = np.zeros((4, 8), np.float32)
    statistics = np.zeros((4, 1), np.float32)
    place, own = memory.ctypes.data, statistics.ctypes.data
    outputs: Outputs = {"y": (place, (4, 8)), "mean": (place, (4, 1)), "deviation": (own, (4, 1))}
    with pytest.raises(Exception, match="overlaps"):
        call_into("LayerNorm", {"x": x, "scale": factor}, outputs)
