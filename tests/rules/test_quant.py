"""Specs of rules/quant.py, and the straight-through gradient against torch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from gradcheck import Spec, check_spec, ids, vjp

INT8 = np.array([[-128, 5, 0], [127, -3, 64]], np.int8)
ZERO = np.array(3, np.int8)


def dequantized(id: str, *inputs: Any, opset: int = 18, **attrs: int) -> Spec:
    """A Spec of DequantizeLinear: linear in the scale, and without float64."""
    return Spec(
        "DequantizeLinear", inputs, attrs, id=id, opset=opset, eps=1.0, rtol=1e-4,
        second_opinion=False,
    )  # fmt: skip


# By whole models, not by Specs.
ALSO_TESTED = ("DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul", "QuantizeLinear")
SPECS = [
    dequantized("", INT8, (), ZERO),
    dequantized("no-zero-point", INT8, ()),
    dequantized("one-scale", INT8, (1,)),
    dequantized("channels", INT8, (3,), np.array([3, -7, 0], np.int8)),
    dequantized("axis", INT8, (2,), axis=-2),
    dequantized("int32", INT8.astype(np.int32), ()),
    dequantized("vector", INT8.astype(np.int16)[0], (), opset=21),
    dequantized("blocks", INT8, (2, 1), axis=1, block_size=3, opset=21),
    dequantized("ragged-blocks", np.arange(30, dtype=np.int8).reshape(2, 5, 3), (2, 3, 3),
                axis=1, block_size=2, opset=21),
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_gradient(spec: Spec) -> None:
    check_spec(spec)


@pytest.mark.parametrize("spec", [s for s in SPECS if s.symbolic], ids=ids)
def test_gradient_with_symbolic_dimensions(spec: Spec) -> None:
    check_spec(spec, symbolic=True)


# ---- QuantizeLinear and DequantizeLinear as a pair ---------------------------------------------

RANGES = {
    "UINT8": (0, 255), "INT8": (-128, 127), "UINT16": (0, 65535), "INT16": (-32768, 32767),
    "UINT4": (0, 15), "INT4": (-8, 7), "UINT2": (0, 3), "INT2": (-2, 1),
}  # fmt: skip


def pair(
    x: np.ndarray, scale: np.ndarray, kind: str, zero: int | float = 0, opset: int = 25,
    attrs: dict[str, int] | None = None, step: np.ndarray | None = None, symbolic: bool = False,
) -> onnx.ModelProto:  # fmt: skip
    """x -> QuantizeLinear -> DequantizeLinear; `step` is a scale of the former's own."""
    tensor = getattr(TensorProto, kind)
    zeros = helper.make_tensor("z", tensor, scale.shape, [zero] * scale.size)
    first = "s" if step is None else "t"
    nodes = [
        helper.make_node("QuantizeLinear", ["x", first, "z"], ["q"], **(attrs or {})),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], **(attrs or {})),
    ]
    weights = {"s": scale} if step is None else {"s": scale, "t": step}
    dims = [f"d{i}" for i in range(x.ndim)] if symbolic else x.shape
    element = helper.np_dtype_to_tensor_dtype(x.dtype)
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", element, dims)],
        [helper.make_tensor_value_info("y", element, None)],
        [zeros, *(numpy_helper.from_array(w, n) for n, w in weights.items())],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=11)


def straight_through(
    x: np.ndarray, scale: np.ndarray, step: np.ndarray | None, bounds: tuple[int, int], zero: int,
    cotangent: np.ndarray,
) -> list[np.ndarray]:  # fmt: skip
    """The gradients to x, scale and step, by torch; the scales broadcast against x."""
    leaves = [torch.tensor(a.astype(np.float64), requires_grad=True) for a in (x, scale)]
    if step is not None:
        leaves.append(torch.tensor(step.astype(np.float64), requires_grad=True))
    quotient = leaves[0] / leaves[-1]
    rounded = quotient + (torch.round(quotient) - quotient).detach()
    y = (torch.clamp(rounded + zero, *bounds) - zero) * leaves[1]
    seed = torch.tensor(cotangent.astype(np.float64))
    return [g.numpy() for g in torch.autograd.grad(y, leaves, seed)]


def sampled(shape: Sequence[int], spread: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x, cotangent = rng.standard_normal((2, *shape)).astype(np.float32)
    return x * spread, cotangent


def assert_close(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> None:
    for actual, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(actual, expected.reshape(actual.shape), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("kind", RANGES)
def test_pair_per_tensor(kind: str, symbolic: bool) -> None:
    low, high = RANGES[kind]
    x, cotangent = sampled((4, 6))
    zero = (low + high) // 2 + 1
    scale = np.array(4.0 / (high - low), np.float32)  # a part of the normal samples is clipped
    found = vjp(pair(x, scale, kind, zero, symbolic=symbolic), {"x": x}, ["x", "s"], cotangent)
    assert_close(found, straight_through(x, scale, None, (low, high), zero, cotangent))
    assert 0 < np.count_nonzero(found[0] == 0) < x.size


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("opset", [18, 21])
def test_pair_per_channel(axis: int, opset: int, symbolic: bool) -> None:
    x, cotangent = sampled((3, 4, 5))
    view = [1, 1, 1]
    view[axis] = x.shape[axis]
    scale = np.linspace(0.01, 0.03, x.shape[axis], dtype=np.float32)
    model = pair(x, scale, "INT8", 5, opset, {"axis": axis}, symbolic=symbolic)
    found = vjp(model, {"x": x}, ["x", "s"], cotangent)
    wanted = straight_through(x, scale.reshape(view), None, (-128, 127), 5, cotangent)
    assert_close(found, wanted)


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("length", [6, 5])
def test_pair_in_blocks(length: int, symbolic: bool) -> None:
    x, cotangent = sampled((4, length, 2))
    scale = np.linspace(0.1, 0.5, 16, dtype=np.float32).reshape(4, 2, 2)
    model = pair(x, scale, "INT4", 1, 21, {"axis": 1, "block_size": 3}, symbolic=symbolic)
    found = vjp(model, {"x": x}, ["x", "s"], cotangent)
    wide = np.repeat(scale, 3, axis=1)[:, :length]
    dx, dwide = straight_through(x, wide, None, (-8, 7), 1, cotangent)
    dscale = np.add.reduceat(dwide, [0, 3], axis=1)
    assert_close(found, [dx, dscale])


def test_pair_with_two_scales() -> None:
    x, cotangent = sampled((4, 6))
    scale, step = np.array(0.03, np.float32), np.array(0.02, np.float32)
    found = vjp(pair(x, scale, "INT8", step=step), {"x": x}, ["x", "s", "t"], cotangent)
    assert_close(found, straight_through(x, scale, step, (-128, 127), 0, cotangent))


def test_pair_with_one_scale_stored_twice() -> None:
    x, cotangent = sampled((4, 6))
    scale = np.array(0.02, np.float32)
    model = pair(x, scale, "INT8", step=scale)
    found = vjp(model, {"x": x}, ["x", "s", "t"], cotangent)
    assert_close(found, straight_through(x, scale, scale, (-128, 127), 0, cotangent))


@pytest.mark.parametrize("bits", ["UINT8", "INT8"])
def test_pair_is_the_fake_quantization_of_torch(bits: str) -> None:
    low, high = RANGES[bits]
    x, cotangent = sampled((8, 16))
    tensor = torch.tensor(x, requires_grad=True)
    y = torch.fake_quantize_per_tensor_affine(tensor, 0.01, low + 128, low, high)
    wanted = torch.autograd.grad(y, tensor, torch.tensor(cotangent))
    model = pair(x, np.array(0.01, np.float32), bits, low + 128, opset=18)
    assert_close(vjp(model, {"x": x}, ["x"], cotangent), [g.numpy() for g in wanted])
    scale = np.linspace(0.01, 0.03, 8, dtype=np.float32)
    zeros = torch.full((8,), low + 128, dtype=torch.int32)
    y = torch.fake_quantize_per_channel_affine(tensor, torch.tensor(scale), zeros, 0, low, high)
    wanted = torch.autograd.grad(y, tensor, torch.tensor(cotangent))
    model = pair(x, scale, bits, low + 128, 18, {"axis": 0})
    assert_close(vjp(model, {"x": x}, ["x"], cotangent), [g.numpy() for g in wanted])


def test_bounds() -> None:
    """What rounds to a bound passes, what rounds beyond it does not."""
    x = np.array([-129, -128.6, -128.4, -128, 0.5, 127, 127.4, 127.6, 128, 1e9], np.float32)
    model = pair(x, np.array(1.0, np.float32), "INT8", opset=18)
    found = vjp(model, {"x": x}, ["x"], np.ones_like(x))[0]
    np.testing.assert_array_equal(found, [0, 0, 1, 1, 1, 1, 1, 0, 0, 0])


@pytest.mark.parametrize(
    ("kind", "largest"),
    [("FLOAT8E4M3FN", 448), ("FLOAT8E4M3FNUZ", 240), ("FLOAT8E5M2", 57344),
     ("FLOAT8E5M2FNUZ", 57344)],
)  # fmt: skip
def test_pair_of_float8(kind: str, largest: float) -> None:
    x = np.array([0.3, -1.7, 0.99, -0.99, 1.2, 100], np.float32) * largest
    scale = np.array(1.0, np.float32)
    found = vjp(pair(x, scale, kind, 0.0, 19), {"x": x}, ["x"], np.ones_like(x))[0]
    np.testing.assert_array_equal(found, [1, 0, 1, 1, 0, 0])


def test_pair_in_float16() -> None:
    x, cotangent = sampled((4, 6))
    scale = np.array(0.02, np.float16)
    half = x.astype(np.float16)
    found = vjp(pair(half, scale, "INT8"), {"x": half}, ["x", "s"], cotangent.astype(np.float16))
    wanted = straight_through(half, scale, None, (-128, 127), 0, cotangent)
    assert [g.dtype for g in found] == [np.float16, np.float16]
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-2, atol=0.2)


def test_pair_in_float16_behind_a_product() -> None:
    """onnxruntime does not round the product before all that uses it: a level is off by one."""
    x = np.linspace(-0.8, 0.8, 1000, dtype=np.float16)
    model = pair(x, np.array(0.0066, np.float16), "INT8")
    model.graph.node[0].input[0] = "t"
    model.graph.node.insert(0, helper.make_node("Mul", ["x", "factor"], ["t"]))
    factor = np.array(0.999, np.float16)
    model.graph.initializer.append(numpy_helper.from_array(factor, "factor"))
    (dx,) = vjp(model, {"x": x}, ["x"], np.ones_like(x))
    np.testing.assert_array_equal(dx, np.full_like(x, factor))


def test_values_beside_the_pair() -> None:
    """One integer read twice, and a float that is also used as it is."""
    text = """
        <ir_version: 10, opset_import: ["" : 18]>
        agraph (float[2, 3] x) => (float[2, 3] y)
        <float s = {0.5}, int8 z = {0}> {
            h = Mul(x, x)
            q = QuantizeLinear(h, s, z)
            a = DequantizeLinear(q, s, z)
            b = DequantizeLinear(q, s, z)
            ab = Mul(a, b)
            y = Add(ab, h)
        }
    """
    x = np.array([[1, 2, -3], [0.5, 9, 0]], np.float32)
    found = vjp(onnx.parser.parse_model(text), {"x": x}, ["x"], np.ones_like(x))[0]
    h = x * x
    a = np.clip(np.round(h / 0.5), -128, 127) * 0.5
    inside = np.round(h / 0.5) <= 127
    np.testing.assert_allclose(found, (2 * a * inside + 1) * 2 * x, rtol=1e-6)


def test_dynamic_quantization() -> None:
    text = """
        <ir_version: 10, opset_import: ["" : 18]>
        agraph (float[2, 3] x) => (float[2, 3] y) {
            h = Mul(x, x)
            q, s, z = DynamicQuantizeLinear(h)
            y = DequantizeLinear(q, s, z)
        }
    """
    x, cotangent = sampled((2, 3))
    found = vjp(onnx.parser.parse_model(text), {"x": x}, ["x"], cotangent)[0]
    np.testing.assert_allclose(found, cotangent * 2 * x, rtol=1e-6)


def test_the_scale_of_dynamic_quantization() -> None:
    """It is the width of the range, which has to include zero, over 255; equal ends share."""
    text = """
        <ir_version: 10, opset_import: ["" : 18]>
        agraph (float[4] x) => (float s) {
            q, s, z = DynamicQuantizeLinear(x)
        }
    """
    model = onnx.parser.parse_model(text)
    for x, expected in (
        ([1, -2, 5, 3], [0, -1, 1, 0]),
        ([4, 2, 4, 3], [0.5, 0, 0.5, 0]),
        ([-4, -2, -8, -3], [0, 0, -1, 0]),
    ):
        (found,) = vjp(model, {"x": np.array(x, np.float32)}, ["x"], np.float32(1))
        np.testing.assert_allclose(found, np.array(expected) / 255, rtol=1e-6)
