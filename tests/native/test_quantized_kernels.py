"""The product with a quantized matrix: against its function, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from native.harness import assert_near, gradient_with_functions, kinds_of, run, run_both
from native.kernel_calls import call

ROWS, DEPTH = 70, 300


def product(
    bits: int, block: int, columns: int, zero: str, batch: tuple[int, ...] = (ROWS,)
) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """A model with the gradient of MatMulNBits with respect to its matrix, and its feeds."""
    random = np.random.default_rng(bits * columns)
    blocks = -(-columns // block)
    packed_zeros = -(-blocks * bits // 8)
    tensors: dict[str, Any] = {
        "b": random.integers(0, 256, (DEPTH, blocks, block * bits // 8)).astype(np.uint8),
        "scales": random.normal(size=(DEPTH, blocks)).astype(np.float32),
    }
    if zero == "bytes":
        tensors["zeros"] = random.integers(0, 256, (DEPTH, packed_zeros)).astype(np.uint8)
    elif zero == "floats":
        tensors["zeros"] = random.normal(size=(DEPTH, blocks)).astype(np.float32)
    node = helper.make_node(
        "MatMulNBits", ["x", *tensors], ["y"], domain="com.microsoft", N=DEPTH, K=columns,
        bits=bits, block_size=block,
    )  # fmt: skip
    graph = helper.make_graph(
        [node], "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [*batch, columns])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [*batch, DEPTH])],
        [numpy_helper.from_array(a, n) for n, a in tensors.items()],
    )  # fmt: skip
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=8)
    feeds = {
        "x": random.normal(size=(*batch, columns)).astype(np.float32),
        "y_grad": random.normal(size=(*batch, DEPTH)).astype(np.float32),
    }
    return gradient_with_functions(model, ["x"], of="y"), feeds


CASES = [
    (bits, block, columns, zero)
    for bits in (2, 4, 8)
    for block, columns in ((32, 96), (16, 40), (128, 130))
    for zero in ("none", "bytes", "floats")
    if (bits, zero) != (8, "floats")  # onnxruntime has no such product
]


@pytest.mark.parametrize(("bits", "block", "columns", "zero"), CASES, ids=str)
def test_like_the_function(bits: int, block: int, columns: int, zero: str) -> None:
    model, feeds = product(bits, block, columns, zero)
    assert kinds_of(model) == {"QuantizedProductGrad"}
    assert_near(*run_both(model, feeds), ulps=64)


@pytest.mark.parametrize("batch", [(1,), (2, 3), (0,), (2, 0, 5)], ids=str)
def test_batches(batch: tuple[int, ...]) -> None:
    assert_near(*run_both(*product(4, 32, 64, "bytes", batch)), ulps=64)


def test_same_numbers_whatever_the_threads() -> None:
    model, feeds = product(4, 32, 576, "bytes", (256,))
    first = run(model, feeds, native=True)
    for expected, found in zip(first, run(model, feeds, native=True, threads=2), strict=True):
        np.testing.assert_array_equal(expected, found)


def alone(**attributes: int) -> Any:
    """Run the kernel by itself, with weights of 4 bits, 3 rows and 32 columns."""
    inputs = [np.ones((2, 3), np.float32), np.full((3, 2, 8), 0x21, np.uint8),
              np.ones((3, 2), np.float32), np.ones(6, np.uint8)]  # fmt: skip
    given = {"N": 3, "K": 32, "block_size": 16, "bits": 4, **attributes}
    return call("QuantizedProductGrad", inputs, **given)[0]


@pytest.mark.parametrize(
    ("attributes", "word"),
    [
        ({"bits": 3}, "2, 4 or 8 bits"),
        ({"N": 0}, "sizes of a quantized product"),
        ({"K": 2**40}, "sizes of a quantized product"),
        ({"block_size": 8}, "sizes of a quantized product"),
        ({"N": 4}, "one column for each row"),
        ({"K": 64}, "bytes of a quantized product"),
        ({"block_size": 32}, "one scale and zero point"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(attributes: dict[str, int], word: str) -> None:
    with pytest.raises(Exception, match=word):
        alone(**attributes)


def test_the_lower_half_of_a_byte_comes_first() -> None:
    np.testing.assert_array_equal(alone(), [[0, 3] * 16] * 2)
