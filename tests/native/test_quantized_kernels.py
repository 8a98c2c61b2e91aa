"""The product with a quantized matrix: against its function, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from native.harness import assert_near, gradient_with_functions, kinds_of, run, run_both
from native.kernel_calls import call

ROWS, DEPTH = 70, 300


def nbits_model(
    bits: int, block: int, columns: int, zero: str, batch: tuple[int | str, ...] = ("batch", "rows")
) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """A model with one MatMulNBits, and its weights."""
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
    return helper.make_model(graph, opset_imports=imports, ir_version=8), tensors


def product(
    bits: int, block: int, columns: int, zero: str, batch: tuple[int, ...] = (ROWS,)
) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """A model with the gradient of MatMulNBits with respect to its matrix, and its feeds."""
    model, _ = nbits_model(bits, block, columns, zero, batch)
    random = np.random.default_rng(bits * columns + 1)
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
    assert kinds_of(model) == {"NBitsProduct", "QuantizedProductGrad"}
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
        ({"N": 4}, "bytes of a quantized product"),
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


# ---- the product itself --------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0, 4])
@pytest.mark.parametrize(("bits", "block", "columns", "zero"), CASES, ids=str)
def test_product_like_onnxruntime(
    bits: int, block: int, columns: int, zero: str, level: int
) -> None:
    model, tensors = nbits_model(bits, block, columns, zero)
    x = np.random.default_rng(0).normal(size=(2, ROWS, columns)).astype(np.float32)
    (expected,) = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    sizes = {"N": DEPTH, "K": columns, "block_size": block, "bits": bits, "accuracy_level": level}
    (found,) = call("NBitsProduct", [x, *tensors.values()], **sizes)
    # A level of 4 lets the kernel round to bfloat16: a relative error of 1/256 for each factor.
    tolerance = 1e-5 if level == 0 else 4e-3
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


def test_a_batch_without_rows_has_a_product() -> None:
    _, tensors = nbits_model(4, 32, 64, "bytes")
    sizes = {"N": DEPTH, "K": 64, "block_size": 32, "bits": 4}
    (found,) = call("NBitsProduct", [np.zeros((0, 64), np.float32), *tensors.values()], **sizes)
    assert found.shape == (0, DEPTH)


def test_infinite_inputs_are_not_rounded_to_finite_ones() -> None:
    _, tensors = nbits_model(4, 32, 64, "bytes")
    sizes = {"N": DEPTH, "K": 64, "block_size": 32, "bits": 4, "accuracy_level": 4}
    for what in (np.inf, np.nan):
        x = np.ones((2, 64), np.float32)
        x[0, 3] = what
        (found,) = call("NBitsProduct", [x, *tensors.values()], **sizes)
        assert not np.isfinite(found[0]).any()
        assert np.isfinite(found[1]).all()
