"""Kernels of BatchNormalization: against their functions, and against torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from native.harness import assert_near, gradient_with_functions, kinds_of, run, run_both
from native.kernel_calls import call

Array = np.ndarray[Any, Any]
ACTIVATIONS = {"none": [], "relu": ["Relu"], "relu6": ["Clip"]}
SHAPES = [
    (4, 3, 8, 8),  # channel by channel
    (3, 5, 7, 7),
    (2, 3, 4, 5, 6),
    (5, 2, 1001),
    (2, 1, 300, 301),  # does not stay in the cache
    (16, 70, 4, 4),  # several channels at once
    (3, 300, 3),
    (300, 5),
    (7, 1),
    (1, 3, 5, 5),
    (1, 1, 1),
]


def model_of(shape: tuple[int, ...], activation: str = "none", epsilon: float = 1e-5) -> Any:
    """A model from x to y, with the statistics of the batch if so asked when differentiated."""
    channel = ["scale", "bias", "mean", "var"]
    kinds = ACTIVATIONS[activation]
    nodes = [
        helper.make_node(
            "BatchNormalization", ["x", *channel], ["z" if kinds else "y"], epsilon=epsilon
        )
    ]
    for kind in kinds:
        bounds = ["zero", "six"] if kind == "Clip" else []
        nodes.append(helper.make_node(kind, ["z", *bounds], ["y"]))
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    inputs += [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape[1:2]) for n in channel]
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)
    constants = [
        helper.make_tensor(n, TensorProto.FLOAT, [], [v]) for n, v in (("zero", 0.0), ("six", 6.0))
    ]
    graph = helper.make_graph(nodes, "graph", inputs, [y], constants if "Clip" in kinds else [])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def feeds_of(shape: tuple[int, ...], offset: float = 0.3) -> dict[str, Array]:
    random = np.random.default_rng(0)
    feeds = {name: random.normal(size=shape).astype(np.float32) for name in ("x", "y_grad")}
    feeds["x"] += np.float32(offset)
    for name in ("scale", "bias", "mean", "var"):
        feeds[name] = random.uniform(0.2, 4.0, shape[1:2]).astype(np.float32)
    return feeds


def differentiated(shape: tuple[int, ...], activation: str, bn: Any, **more: Any) -> Any:
    return gradient_with_functions(model_of(shape, activation, **more), WRT, bn=bn)


WRT = ["x", "scale", "bias"]


def only_used(model: onnx.ModelProto, feeds: dict[str, Array]) -> dict[str, Array]:
    names = {value.name for value in model.graph.input}
    return {name: value for name, value in feeds.items() if name in names}


def ulps_of(shape: tuple[int, ...]) -> float:
    """How exact the plain operators are: they add up a long row in one go.

    The gradient of a few elements is a difference of numbers that are nearly equal.
    """
    return 64 if 100 < np.prod(shape) < 100_000 else 4096


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_like_the_function(shape: tuple[int, ...], activation: str) -> None:
    model = differentiated(shape, activation, "batch")
    assert kinds_of(model) == {"BatchNorm", "BatchNormGrad"}
    calls = [node for node in model.graph.node if node.domain == "ai.onnxtrain"]
    clipped = [any(a.name == "clipped" for a in node.attribute) for node in calls]
    assert clipped == [activation != "none"] * 2
    if activation != "none" and ulps_of(shape) > 64:
        return  # that inexact, an element lies on another side of a bound
    plain, native = run_both(model, only_used(model, feeds_of(shape)))
    assert_near(plain, native, ulps=ulps_of(shape))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_given_statistics(shape: tuple[int, ...], activation: str) -> None:
    model = differentiated(shape, activation, "frozen")
    assert kinds_of(model) == {"BatchNormGrad"}
    assert_near(*run_both(model, only_used(model, feeds_of(shape))), ulps=ulps_of(shape))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_like_torch(shape: tuple[int, ...], activation: str, offset: float) -> None:
    model = differentiated(shape, activation, "batch", epsilon=1e-3)
    feeds = feeds_of(shape, offset)
    found = run(model, only_used(model, feeds), native=True)
    x, scale, bias = (torch.tensor(feeds[n], dtype=torch.float64, requires_grad=True) for n in WRT)
    y = torch.nn.functional.batch_norm(x, None, None, scale, bias, True, eps=1e-3)
    if activation != "none":
        y = torch.relu(y) if activation == "relu" else torch.nn.functional.relu6(y)
    y.backward(torch.tensor(feeds["y_grad"], dtype=torch.float64))
    expected = [y.detach(), x.grad, scale.grad, bias.grad]
    # The mean of x is a float as well: what it is off by, all deviations are off by.
    room = 3e-6 + offset * 2e-7
    for value, wanted in zip(found, expected, strict=True):
        assert wanted is not None
        most = float(wanted.abs().max())
        np.testing.assert_allclose(value, wanted.numpy(), rtol=0, atol=room * (1 + most) * 2)


def test_statistics_of_a_large_channel() -> None:
    """Statistics that are put together from pieces are as exact as double precision allows."""
    random = np.random.default_rng(1)
    x = random.normal(5.0, 0.1, (3, 2, 250, 300)).astype(np.float32)
    x[1] += 20  # samples that are far apart
    ones = np.ones(2, np.float32)
    _, mean, variance = call("BatchNorm", [x, ones, ones], 3)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(mean, wide.mean((0, 2, 3)), rtol=2e-7)
    np.testing.assert_allclose(variance, wide.var((0, 2, 3)), rtol=1e-6)


def test_what_is_saved_is_empty() -> None:
    x, ones = np.ones((2, 3, 4, 4), np.float32), np.ones(3, np.float32)
    _, mean, variance, saved, *with_axes = call("BatchNorm", [x, ones, ones], 6)
    assert saved.size == 0
    for value, other in zip((mean, variance), with_axes, strict=True):
        np.testing.assert_array_equal(value.reshape(1, 3, 1, 1), other)


def test_outputs_that_are_left_out() -> None:
    feeds = feeds_of((2, 3, 4, 4))
    x, dy, scale, bias = (feeds[name] for name in ("x", "y_grad", "scale", "bias"))
    y, mean, variance = call("BatchNorm", [x, scale, bias], 3)
    np.testing.assert_array_equal(call("BatchNorm", [x, scale, bias])[0], y)
    inputs = [dy, x, scale, bias, mean, variance]
    dx = call("BatchNormGrad", inputs, 3)[0]
    np.testing.assert_array_equal(call("BatchNormGrad", inputs)[0], dx)


@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (0, 3), (2, 0, 4), (2, 3, 0)], ids=str)
def test_empty(shape: tuple[int, ...]) -> None:
    x, channel = np.zeros(shape, np.float32), np.ones(shape[1], np.float32)
    y, mean, _ = call("BatchNorm", [x, channel, channel], 3)
    assert y.shape == shape
    assert mean.shape == channel.shape
    dx, dscale, dbias = call("BatchNormGrad", [x, x, *[channel] * 4], 3)
    assert dx.shape == shape
    if x.size == 0:
        np.testing.assert_array_equal(dbias, np.zeros_like(channel))
        np.testing.assert_array_equal(dscale, np.zeros_like(channel))


def test_what_is_not_a_number_stays_so() -> None:
    x, ones = np.zeros((2, 3, 8, 8), np.float32), np.ones(3, np.float32)
    x[1, 1, 2, 3] = np.nan
    y, mean, _ = call("BatchNorm", [x, ones, ones], 3, clipped=1, low=0.0, high=6.0)
    assert np.isnan(y[:, 1]).all()
    assert np.isnan(mean[1])
    assert np.isfinite(y[:, [0, 2]]).all()


@pytest.mark.parametrize("shape", [(8, 40, 20, 20), (64, 600, 2, 2)], ids=str)
def test_same_numbers_whatever_the_threads(shape: tuple[int, ...]) -> None:
    model = differentiated(shape, "relu", "batch")
    feeds = only_used(model, feeds_of(shape))
    first = run(model, feeds, native=True)
    for threads in (1, 2):
        for expected, found in zip(
            first, run(model, feeds, native=True, threads=threads), strict=True
        ):
            np.testing.assert_array_equal(expected, found)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES[:7], ids=str)
def test_residual(shape: tuple[int, ...], activation: str) -> None:
    """y = activation(normalized + x), as at the end of a block of a ResNet."""
    model = model_of(shape, activation)
    layer = model.graph.node[0]
    summed = layer.output[0]
    layer.output[0] = "normalized"
    model.graph.node.insert(1, helper.make_node("Add", ["normalized", "r"], [summed]))
    model.graph.input.append(helper.make_tensor_value_info("r", TensorProto.FLOAT, shape))
    found = gradient_with_functions(model, [*WRT, "r"], bn="batch")
    (forward,) = [n for n in found.graph.node if n.op_type.startswith("BatchNorm_")]
    joined = {a.name for a in forward.attribute} & {"has_residual", "clipped"}
    assert joined == {"has_residual", *(["clipped"] if activation != "none" else [])}
    if ulps_of(shape) > 64:
        return
    feeds = only_used(found, {**feeds_of(shape), "r": feeds_of(shape)["y_grad"][::-1].copy()})
    assert_near(*run_both(found, feeds), ulps=64)


def test_a_layer_whose_output_is_read_elsewhere_is_not_joined() -> None:
    model = model_of((2, 3, 4, 4), "relu")
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, (2, 3, 4, 4)))
    found = gradient_with_functions(model, WRT, of="y", bn="batch")
    (forward,) = [n for n in found.graph.node if n.op_type.startswith("BatchNorm_")]
    assert not any(a.name == "clipped" for a in forward.attribute)
    feeds = feeds_of((2, 3, 4, 4))
    assert_near(*run_both(found, only_used(found, feeds)), ulps=64)


def test_what_does_not_fit_is_an_error() -> None:
    x, three, four = (np.ones(shape, np.float32) for shape in ((2, 3, 4), (3,), (4,)))
    with pytest.raises(Exception, match="another size than the channels"):
        call("BatchNorm", [x, three, four], 3)
    with pytest.raises(Exception, match="another size than the channels"):
        call("BatchNormGrad", [x, x, three, three, three, four], 3)
    with pytest.raises(Exception, match="another shape than the input"):
        call("BatchNormGrad", [x[:1], x, *[three] * 4], 3)
    with pytest.raises(Exception, match="a batch and channels"):
        call("BatchNorm", [three, three, three], 3)
    with pytest.raises(Exception, match="not of type float"):
        call("BatchNorm", [x.astype(np.int64), three, three], 3)
    with pytest.raises(Exception, match="residual has another shape"):
        call("BatchNorm", [x, three, three, x[:1]], 3, has_residual=1)
    with pytest.raises(Exception, match="or 4 with a residual"):
        call("BatchNorm", [x, three, three], 3, has_residual=1)
    with pytest.raises(Exception, match="needs 6 inputs"):
        call("BatchNormGrad", [x, x, three], 3)
