"""Kernels of activations and their gradients: against their functions, and against torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from native.harness import assert_near, gradient_with_functions, kinds_of, run, run_both

Array = np.ndarray[Any, Any]
F = torch.nn.functional


def model_of(nodes: list[onnx.NodeProto], shape: tuple[int | str, ...], opset: int = 20) -> Any:
    """A model from x to y."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy")
    numbers = {"half": 0.5, "one": 1.0, "root": 2**0.5, "zero": 0.0, "six": 6.0, "low": -0.5}
    used = {name for node in nodes for name in node.input} & {*numbers}
    constants = [
        helper.make_tensor(name, TensorProto.FLOAT, [], [numbers[name]]) for name in sorted(used)
    ]
    graph = helper.make_graph(nodes, "graph", [x], [y], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def node(op_type: str, inputs: str = "x", output: str = "y", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs.split(), [output], **attributes)


FIVE_NODES = [
    node("Div", "x root", "a"),
    node("Erf", "a", "b"),
    node("Add", "b one", "c"),
    node("Mul", "x c", "d"),
    node("Mul", "d half"),
]
SILU = [node("Sigmoid", "x", "s"), node("Mul", "x s")]
Case = tuple[list[onnx.NodeProto], set[str], Callable[[Any], Any]]
CASES: dict[str, Case] = {
    "relu": ([node("Relu")], {"ReluGrad"}, F.relu),
    "leaky": (
        [node("LeakyRelu", alpha=-0.3)],
        {"LeakyReluGrad"},
        lambda x: torch.where(x > 0, x, -0.3 * x),
    ),
    "sigmoid": ([node("Sigmoid")], {"SigmoidGrad"}, torch.sigmoid),
    "tanh": ([node("Tanh")], {"TanhGrad"}, torch.tanh),
    "relu6": ([node("Clip", "x zero six")], {"ClipInsideGrad"}, F.relu6),
    "clip": ([node("Clip", "x low one")], {"ClipGrad"}, lambda x: x.clamp(-0.5, 1.0)),
    "hard_sigmoid": (
        [node("HardSigmoid", alpha=1 / 6)],
        {"HardSigmoidGrad"},
        F.hardsigmoid,
    ),
    "hard_swish": ([node("HardSwish")], {"HardSwish", "HardSwishGrad"}, F.hardswish),
    "softplus": ([node("Softplus")], {"Softplus", "SoftplusGrad"}, F.softplus),
    "elu": ([node("Elu", alpha=0.7)], {"Elu", "EluGrad"}, lambda x: F.elu(x, 0.7)),
    "selu": ([node("Selu")], {"Elu", "EluGrad"}, F.selu),
    "celu": ([node("Celu", alpha=1.5)], {"CeluGrad"}, lambda x: F.celu(x, 1.5)),
    "mish": ([node("Mish")], {"Mish", "MishGrad"}, F.mish),
    "silu": (SILU, {"Swish", "SwishGrad"}, F.silu),
    "gelu": ([node("Gelu")], {"Gelu", "GeluGrad"}, F.gelu),
    "gelu_tanh": (
        [node("Gelu", approximate="tanh")],
        {"GeluTanh", "GeluTanhGrad"},
        lambda x: F.gelu(x, approximate="tanh"),
    ),
    "five_nodes": (FIVE_NODES, {"Gelu", "GeluGrad"}, F.gelu),
}
CLIP_ABOVE = [helper.make_node("Clip", ["x", "", "one"], ["y"])]
CASES["clip_above"] = CLIP_ABOVE, {"ClipGrad"}, lambda x: x.clamp(max=1.0)
CASES["clip_below"] = [node("Clip", "x low")], {"ClipGrad"}, lambda x: x.clamp(min=-0.5)
SHAPES = [(1,), (0, 4), (3, 5), (2, 3, 7, 11), (50_000,)]


def feeds_of(shape: tuple[int, ...], scale: float = 3.0) -> dict[str, Array]:
    random = np.random.default_rng(0)
    x, dy = (random.normal(size=shape).astype(np.float32) for _ in range(2))
    return {"x": x * np.float32(scale), "y_grad": dy}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_like_the_function(case: str, shape: tuple[int, ...]) -> None:
    nodes, kinds, _ = CASES[case]
    model = gradient_with_functions(model_of(nodes, shape), ["x"])
    assert kinds_of(model) == kinds
    # The plain gradient of Mish loses digits in 1 - t².
    assert_near(*run_both(model, feeds_of(shape)), ulps=64 if case == "mish" else 16)


@pytest.mark.parametrize("case", CASES)
def test_like_torch(case: str) -> None:
    nodes, _, reference = CASES[case]
    feeds = feeds_of((999,))
    model = gradient_with_functions(model_of(nodes, (999,)), ["x"])
    y, dx = run(model, feeds, native=True)
    x = torch.tensor(feeds["x"], dtype=torch.float64, requires_grad=True)
    expected = reference(x)
    expected.backward(torch.tensor(feeds["y_grad"], dtype=torch.float64))
    assert x.grad is not None
    np.testing.assert_allclose(y, expected.detach().numpy(), rtol=2e-6, atol=4e-7)
    np.testing.assert_allclose(dx, x.grad.numpy(), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_extreme_values(case: str) -> None:
    """Large arguments, infinity and NaN give what the plain operators give, where that is right."""
    nodes, _, _ = CASES[case]
    x = np.array([0.0, -0.0, 1e-30, 20, -20, 60, -60, 90, -90, 1e4, -1e4], np.float32)
    model = gradient_with_functions(model_of(nodes, x.shape), ["x"])
    feeds = {"x": x, "y_grad": np.ones_like(x)}
    plain, native = run_both(model, feeds)
    for expected, found in zip(plain, native, strict=True):
        np.testing.assert_allclose(found, expected, rtol=3e-6, atol=3e-6)
    nan = np.full_like(x, np.nan)
    y, dx = run(model, {"x": nan, "y_grad": np.ones_like(x)}, native=True)
    expected_y, expected_dx = run(model, {"x": nan, "y_grad": np.ones_like(x)}, native=False)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected_y))
    if case not in ("hard_swish", "leaky", "relu6"):
        np.testing.assert_array_equal(np.isnan(dx), np.isnan(expected_dx))


def test_same_numbers_whatever_the_threads() -> None:
    model = gradient_with_functions(model_of(CASES["gelu"][0], (100_001,)), ["x"])
    feeds = feeds_of((100_001,))
    first = run(model, feeds, native=True)
    for threads in (1, 2):
        for expected, found in zip(
            first, run(model, feeds, native=True, threads=threads), strict=True
        ):
            np.testing.assert_array_equal(expected, found)


def test_a_silu_whose_sigmoid_is_read_elsewhere_stays_plain() -> None:
    nodes = [*SILU[:1], node("Mul", "x s", "z"), node("Add", "z s")]
    model = gradient_with_functions(model_of(nodes, (5,)), ["x"])
    assert kinds_of(model) == {"SigmoidGrad"}
    assert_near(*run_both(model, feeds_of((5,))))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_gradient_of_a_relu_that_is_read_twice(shape: tuple[int, ...]) -> None:
    nodes = [node("Relu", "x", "r"), node("Tanh", "r", "t"), node("Sigmoid", "r", "s")]
    nodes.append(node("Mul", "s t"))
    model = gradient_with_functions(model_of(nodes, shape), ["x"])
    assert "AddReluGrad" in kinds_of(model)
    assert_near(*run_both(model, feeds_of(shape)))


# Shapes of x and of slopes: for each channel, for all, for a middle axis; more than one chunk.
SLOPES = [
    ((2, 5, 7, 11), (5, 1, 1)), ((3, 4), (1,)), ((1, 1), (1, 1)), ((3, 2, 9), (2, 1)),
    ((6, 33), (6, 1)), ((0, 3, 4), (3, 1)), ((50_000,), (1,)),
    ((3, 40, 70, 2), ()), ((1, 20, 300, 30), (20, 1, 1)),
]  # fmt: skip


def prelu_model(x: tuple[int | str, ...], slope: tuple[int, ...]) -> Any:
    model = model_of([node("PRelu", "x slope")], x)
    model.graph.input.append(helper.make_tensor_value_info("slope", TensorProto.FLOAT, slope))
    return model


def prelu_feeds(x: tuple[int, ...], slope: tuple[int, ...]) -> dict[str, Array]:
    slopes = np.random.default_rng(1).normal(size=slope).astype(np.float32)
    return feeds_of(x) | {"slope": slopes}


@pytest.mark.parametrize(("shape", "slope"), SLOPES, ids=str)
def test_prelu(shape: tuple[int, ...], slope: tuple[int, ...]) -> None:
    feeds = prelu_feeds(shape, slope)
    batches: list[tuple[int | str, ...]] = [shape, ("batch", *shape[1:])]
    for declared in batches if len(shape) > len(slope) else batches[:1]:
        made = gradient_with_functions(prelu_model(declared, slope), ["x", "slope"])
        assert kinds_of(made) == {"PReluGrad"}
        plain, native = run_both(made, feeds)
        assert_near(plain, native, ulps=64)
        for found, again in zip(native, run(made, feeds, native=True, threads=2), strict=True):
            np.testing.assert_array_equal(found, again)
    x, factor = (
        torch.tensor(feeds[n], dtype=torch.float64, requires_grad=True) for n in ("x", "slope")
    )
    y = torch.where(x > 0, x, x * factor)
    y.backward(torch.tensor(feeds["y_grad"], dtype=torch.float64))
    assert x.grad is not None
    assert factor.grad is not None
    for found, wanted in zip(native[1:], (x.grad, factor.grad), strict=True):
        scale = max(1.0, np.abs(feeds["y_grad"]).sum() / max(1, factor.numel()))
        np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-5, atol=1e-6 * scale)


@pytest.mark.parametrize("wrt", ["x", "slope"])
def test_one_gradient_of_prelu(wrt: str) -> None:
    made = gradient_with_functions(prelu_model((2, 5, 7), (5, 1)), [wrt])
    assert_near(*run_both(made, prelu_feeds((2, 5, 7), (5, 1))), ulps=64)


@pytest.mark.parametrize("slope", [(4,), (3, 4), (5, 1, 4)], ids=str)
def test_prelu_with_other_slopes_stays_plain(slope: tuple[int, ...]) -> None:
    made = gradient_with_functions(prelu_model((2, 5, 3, 4), slope), ["x", "slope"])
    assert kinds_of(made) == set()


def call(kind: str, *shapes: tuple[int, ...], types: str = "ff") -> None:
    """Run a kernel by itself on zeros."""
    kinds = {"f": TensorProto.FLOAT, "i": TensorProto.INT64}
    inputs = [f"i{n}" for n in range(len(shapes))]
    function = helper.make_function(
        "ai.onnxtrain", f"{kind}_0", inputs, ["o"], [helper.make_node("Identity", ["i0"], ["o"])],
        [helper.make_opsetid("", 20)],
    )  # fmt: skip
    values = [
        helper.make_tensor_value_info(name, kinds[t], [None] * len(shape))
        for name, t, shape in zip(inputs, types, shapes, strict=False)
    ]
    graph = helper.make_graph(
        [helper.make_node(f"{kind}_0", inputs, ["o"], domain="ai.onnxtrain")], "graph", values,
        [helper.make_tensor_value_info("o", TensorProto.FLOAT, None)],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ai.onnxtrain", 1)]
    model = helper.make_model(graph, opset_imports=opsets, functions=[function], ir_version=10)
    numpy_types = {"f": np.float32, "i": np.int64}
    feeds = {
        name: np.zeros(shape, numpy_types[t])
        for name, t, shape in zip(inputs, types, shapes, strict=False)
    }
    run(model, feeds, native=True)


def test_prelu_without_channels() -> None:
    call("PReluGrad", (2, 0, 4), (2, 0, 4), (0, 1), types="fff")


def test_what_does_not_fit_is_an_error() -> None:
    with pytest.raises(Exception, match="different shapes"):
        call("GeluGrad", (3,), (4,))
    with pytest.raises(Exception, match="different shapes"):
        call("ReluGrad", (12,), (3, 4))
    with pytest.raises(Exception, match="two are needed"):
        call("ReluGrad", (3,))
    with pytest.raises(Exception, match="three are needed"):
        call("AddReluGrad", (3,), (3,))
    with pytest.raises(Exception, match="different shapes"):
        call("AddReluGrad", (3,), (3,), (4,), types="fff")
    with pytest.raises(Exception, match="three are needed"):
        call("PReluGrad", (3,), (3,))
    with pytest.raises(Exception, match="does not fit"):
        call("PReluGrad", (2, 3, 4), (2, 3, 4), (2, 1), types="fff")
    with pytest.raises(Exception, match="more axes"):
        call("PReluGrad", (3,), (3,), (1, 1), types="fff")
    with pytest.raises(Exception, match="more than one axis"):
        call("PReluGrad", (2, 3, 4), (2, 3, 4), (3, 4), types="fff")
    with pytest.raises(Exception, match="not of type float"):
        call("ReluGrad", (3,), (3,), types="fi")
    with pytest.raises(Exception, match="not of type float"):
        call("Gelu", (3,), types="i")
