"""Gradients of pools: against their functions, and against torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from native.harness import assert_near, gradient_with_functions, kinds_of, run, run_both

Array = np.ndarray[Any, Any]
F = torch.nn.functional


def model_of(op_type: str, shape: tuple[int | str, ...], **attributes: Any) -> onnx.ModelProto:
    """A model from x to y."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    node = helper.make_node(op_type, ["x"], ["y"], **attributes)
    graph = helper.make_graph([node], "graph", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=10)
    return onnx.shape_inference.infer_shapes(model)


def feeds_of(op_type: str, shape: tuple[int, ...], **attributes: Any) -> dict[str, Array]:
    random = np.random.default_rng(0)
    x = random.normal(size=shape).astype(np.float32)
    y = run(model_of(op_type, shape, **attributes), {"x": x}, native=False)[0]
    return {"x": x, "y_grad": random.normal(size=y.shape).astype(np.float32)}


def window(*kernel: int, **attributes: Any) -> dict[str, Any]:
    return {"kernel_shape": list(kernel), **attributes}


WINDOWS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "two": ((2, 3, 8, 12), window(2, 2, strides=[2, 2])),
    "two_odd": ((2, 3, 9, 13), window(2, 2, strides=[2, 2])),
    "two_wide": ((1, 2, 28, 70), window(2, 2, strides=[2, 2])),
    "two_narrow": ((2, 3, 4, 5), window(2, 2, strides=[2, 2])),
    "three": ((2, 3, 9, 9), window(3, 3, strides=[3, 3])),
    "stem": ((2, 3, 23, 22), window(3, 3, strides=[2, 2], pads=[1, 1, 1, 1])),
    "stem_large": ((1, 2, 112, 113), window(3, 3, strides=[2, 2], pads=[1, 1, 1, 1])),
    "overlapping": ((2, 3, 11, 10), window(3, 2)),
    "apart": ((2, 3, 11, 10), window(2, 2, strides=[3, 4])),
    "dilated": ((2, 3, 15, 16), window(3, 2, dilations=[2, 3], strides=[2, 1])),
    "ceil": ((2, 3, 10, 11), window(3, 3, strides=[2, 2], ceil_mode=1)),
    "ceil_padded": ((2, 3, 10, 12), window(3, 3, strides=[2, 2], pads=[1, 1, 1, 1], ceil_mode=1)),
    "uneven": ((2, 3, 10, 11), window(3, 4, strides=[2, 1], pads=[0, 2, 1, 1])),
    "same": ((2, 3, 10, 11), window(3, 3, strides=[2, 2], auto_pad="SAME_UPPER")),
    "one_axis": ((2, 3, 50), window(3, strides=[2], pads=[1, 1])),
    "one_long_axis": ((2, 1, 3000), window(4, strides=[4])),
    "three_axes": ((2, 2, 7, 8, 9), window(2, 3, 2, strides=[2, 1, 2], pads=[1, 1, 0, 0, 1, 1])),
    "all": ((2, 3, 7, 7), window(7, 7)),
    "single": ((1, 1, 1, 1), window(1, 1)),
    "no_batch": ((0, 3, 8, 8), window(2, 2, strides=[2, 2])),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_maximum_like_the_function(name: str) -> None:
    shape, attributes = WINDOWS[name]
    model = gradient_with_functions(model_of("MaxPool", shape, **attributes), ["x"])
    assert kinds_of(model) == {"MaxPoolGrad"}
    assert_near(*run_both(model, feeds_of("MaxPool", shape, **attributes)), ulps=2)


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("name", WINDOWS)
def test_average_like_the_function(name: str, padding: int) -> None:
    shape, attributes = WINDOWS[name]
    attributes = {**attributes, "count_include_pad": padding}
    model = gradient_with_functions(model_of("AveragePool", shape, **attributes), ["x"])
    assert kinds_of(model) == {"AveragePoolGrad"}
    assert_near(*run_both(model, feeds_of("AveragePool", shape, **attributes)))


@pytest.mark.parametrize("shape", [(2, 5, 7, 7), (1, 1, 1), (3, 2, 4, 5, 6), (0, 3, 2, 2)], ids=str)
def test_everything_like_the_function(shape: tuple[int, ...]) -> None:
    model = gradient_with_functions(model_of("GlobalAveragePool", shape), ["x"])
    assert kinds_of(model) == {"GlobalAveragePoolGrad"}
    assert_near(*run_both(model, feeds_of("GlobalAveragePool", shape)), ulps=4)


def test_sizes_that_are_known_at_run_time_only() -> None:
    for op_type, attributes in (
        ("MaxPool", window(3, 3, strides=[2, 2], pads=[1, 1, 1, 1])),
        ("AveragePool", window(3, 3, strides=[2, 2], pads=[1, 1, 1, 1])),
        ("GlobalAveragePool", {}),
    ):
        model = model_of(op_type, ("batch", 3, "height", "width"), **attributes)
        gradient = gradient_with_functions(model, ["x"])
        assert kinds_of(gradient) == {f"{op_type}Grad"}
        for shape in ((2, 3, 9, 8), (1, 3, 20, 5)):
            assert_near(*run_both(gradient, feeds_of(op_type, shape, **attributes)))


def torch_pool(name: str, x: torch.Tensor, attributes: dict[str, Any]) -> torch.Tensor:
    rank = x.dim() - 2
    pads = attributes.get("pads", [0] * 2 * rank)
    options = {
        "stride": attributes.get("strides", [1] * rank), "padding": pads[:rank],
        "ceil_mode": bool(attributes.get("ceil_mode", 0)),
    }  # fmt: skip
    if name == "MaxPool":
        options["dilation"] = attributes.get("dilations", [1] * rank)
    pool = getattr(F, f"{'max' if name == 'MaxPool' else 'avg'}_pool{rank}d")
    if name == "AveragePool":
        options["count_include_pad"] = bool(attributes.get("count_include_pad", 0))
    result: torch.Tensor = pool(x, attributes["kernel_shape"], **options)
    return result


@pytest.mark.parametrize("op_type", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize(
    "name", ["two_odd", "three", "stem", "overlapping", "apart", "ceil", "one_axis"]
)
def test_like_torch(op_type: str, name: str) -> None:
    shape, attributes = WINDOWS[name]
    feeds = feeds_of(op_type, shape, **attributes)
    model = gradient_with_functions(model_of(op_type, shape, **attributes), ["x"])
    x = torch.tensor(feeds["x"], requires_grad=True)
    y = torch_pool(op_type, x, attributes)
    y.backward(torch.tensor(feeds["y_grad"]))
    assert x.grad is not None
    assert_near([y.detach().numpy(), x.grad.numpy()], run(model, feeds, native=True))


@pytest.mark.parametrize("name", ["two", "two_odd", "two_narrow", "three", "stem", "three_axes"])
def test_first_of_equal_maxima(name: str) -> None:
    shape, attributes = WINDOWS[name]
    model = gradient_with_functions(model_of("MaxPool", shape, **attributes), ["x"])
    feeds = feeds_of("MaxPool", shape, **attributes)
    random = np.random.default_rng(0)
    for x in (
        random.integers(0, 3, size=shape).astype(np.float32),
        np.full(shape, -np.inf, np.float32),
        np.where(random.random(shape) < 0.5, np.inf, -1.0).astype(np.float32),
    ):
        plain, native = run_both(model, {**feeds, "x": x})
        if np.isfinite(x).any():  # onnxruntime knows no maximum below the least finite number
            assert_near(plain[1:], native[1:], ulps=2)
        assert np.isclose(native[1].sum(), feeds["y_grad"].sum(), atol=1e-3)


def test_windows_of_nan_have_no_winner() -> None:
    for name in ("two", "stem"):
        shape, attributes = WINDOWS[name]
        model = gradient_with_functions(model_of("MaxPool", shape, **attributes), ["x"])
        feeds = feeds_of("MaxPool", shape, **attributes)
        dx = run(model, {**feeds, "x": np.full(shape, np.nan, np.float32)}, native=True)[1]
        assert not dx.any()


def test_same_numbers_with_any_number_of_threads() -> None:
    for name in ("stem_large", "two_wide", "three_axes"):
        shape, attributes = WINDOWS[name]
        for op_type in ("MaxPool", "AveragePool"):
            model = gradient_with_functions(model_of(op_type, shape, **attributes), ["x"])
            feeds = feeds_of(op_type, shape, **attributes)
            first = run(model, feeds, native=True)
            for threads in (1, 2, 3):
                again = run(model, feeds, native=True, threads=threads)
                np.testing.assert_array_equal(first[1], again[1])


def call(kind: str, inputs: dict[str, Array], **attributes: Any) -> Any:
    """Call a kernel with anything; its function is never run."""
    domain, name = "ai.onnxtrain", f"{kind}_0"
    body = [helper.make_node("Identity", [next(iter(inputs))], ["dx"])]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(domain, 1)]
    function = helper.make_function(domain, name, [*inputs], ["dx"], body, opsets[:1], [])
    node = helper.make_node(name, [*inputs], ["dx"], domain=domain, **attributes)
    values = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), [None] * v.ndim)
        for n, v in inputs.items()
    ]
    dx = helper.make_tensor_value_info("dx", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "graph", values, [dx])
    model = helper.make_model(graph, opset_imports=opsets, functions=[function], ir_version=10)
    return run(model, inputs, native=True)[0]


def zeros(*shape: int) -> Array:
    return np.zeros(shape, np.float32)


def test_what_does_not_fit_is_an_error() -> None:
    x, dy = zeros(1, 2, 4, 4), zeros(1, 2, 2, 2)
    square = {"kernel_shape": [2, 2], "strides": [2, 2]}
    assert call("MaxPoolGrad", {"x": x, "dy": dy}, **square).shape == x.shape
    for inputs, attributes, reason in (
        ({"x": x, "dy": zeros(1, 3, 2, 2)}, square, "other batches or channels"),
        ({"x": x, "dy": zeros(1, 2, 2)}, square, "one to three axes"),
        ({"x": x, "dy": dy}, {}, "one to three axes"),
        ({"x": x}, square, "two inputs"),
        ({"x": x, "dy": dy}, {**square, "strides": [2]}, "another number of axes"),
        ({"x": x, "dy": dy}, {**square, "strides": [0, 2]}, "positive"),
        ({"x": x, "dy": dy}, {**square, "pads": [0, -1, 0, 0]}, "negative"),
        ({"x": x, "dy": dy}, {**square, "pads": [0, 0, 2**62, 0]}, "too large"),
        ({"x": x, "dy": dy}, {**square, "pads": [2**40, 0, 0, 0]}, "too large"),
        ({"x": x, "dy": dy}, {"kernel_shape": [2**20, 2**20]}, "too large"),
        ({"x": x, "dy": dy.astype(np.int64)}, square, "not of type float"),
    ):
        with pytest.raises(Exception, match=reason):
            call("MaxPoolGrad", inputs, **attributes)
    for kind in ("AveragePoolGrad", "GlobalAveragePoolGrad"):
        one = zeros(1, 2, 1, 1)
        for inputs, attributes, reason in (
            ({"dy": one}, square, "is missing"),
            ({"dy": one}, {**square, "sizes": [4]}, "other axes"),
            ({"dy": one}, {**square, "sizes": [-4, 4]}, "negative"),
            ({"dy": one}, {**square, "sizes": [2**30, 2**30]}, "too many elements"),
            ({"dy": one, "s": np.array([2, 2, 4, 4])}, square, "other axes, batches"),
            ({"dy": one, "s": one}, square, "vector of int64"),
            ({"dy": zeros(2)}, square, "no axes"),
        ):
            with pytest.raises(Exception, match=reason):
                call(kind, inputs, **attributes)
    with pytest.raises(Exception, match="another shape"):
        call("GlobalAveragePoolGrad", {"dy": dy}, sizes=[4, 4])


def test_windows_that_lie_anywhere() -> None:
    """Windows that the gradient has and the image does not: nothing is read or written outside."""
    x, dy = zeros(1, 2, 4, 4) + 1, zeros(1, 2, 9, 7) + 1
    for strides in ([1, 1], [2, 3], [700, 700], [2**20, 2**20]):
        for pads in ([0, 0, 0, 0], [5, 3, 0, 0], [2**29, 2**29, 0, 0]):
            options = {"kernel_shape": [3, 3], "strides": strides, "pads": pads}
            assert np.isfinite(call("MaxPoolGrad", {"x": x, "dy": dy}, **options)).all()
            found = call("AveragePoolGrad", {"dy": dy}, sizes=[4, 4], **options)
            assert np.isfinite(found).all()
