"""Kernels of normalization within a sample: against their functions, and against torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper

from native.harness import assert_near, gradient_with_functions, kinds_of, run, run_both
from native.kernel_calls import call

Array = np.ndarray[Any, Any]
F = torch.nn.functional
LAYERS: list[tuple[tuple[int, ...], int]] = [
    ((4, 128), -1),
    ((3, 5, 7), -1),
    ((2, 3, 4, 5), 2),
    ((1001, 16), 1),
    ((70, 49), -1),
    ((5, 1), -1),
    ((1, 1), -1),
    ((3, 10_001), -1),
    ((40, 40), 0),
]
GROUPED: list[tuple[tuple[int, ...], int]] = [
    ((2, 6, 5, 7), 3),
    ((2, 6, 40, 41), 1),
    ((3, 8, 9), 8),
    ((1, 4, 2, 3, 4), 2),
    ((5, 64, 3), 16),
    ((2, 4, 150, 151), 2),
]


def model_of(
    op_type: str, shape: tuple[int, ...], factors: tuple[int, ...], opset: int, **attributes: Any
) -> Any:
    """A model from x, scale and perhaps bias to y."""
    names = ["scale"] if op_type == "RMSNormalization" else ["scale", "bias"]
    node = helper.make_node(op_type, ["x", *names], ["y"], **attributes)
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    inputs += [helper.make_tensor_value_info(n, TensorProto.FLOAT, factors) for n in names]
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)
    graph = helper.make_graph([node], "graph", inputs, [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def feeds_of(
    shape: tuple[int, ...], factors: tuple[int, ...], bias: bool = True
) -> dict[str, Array]:
    random = np.random.default_rng(0)
    feeds = {name: random.normal(size=shape).astype(np.float32) for name in ("x", "y_grad")}
    feeds["x"] += np.float32(0.3)
    for name in ("scale", "bias") if bias else ("scale",):
        feeds[name] = random.uniform(0.2, 4.0, factors).astype(np.float32)
    return feeds


def check_with_torch(feeds: dict[str, Array], found: list[Array], compute: Any) -> None:
    """Compare y and the gradients with respect to all inputs with float64 in torch."""
    names = [name for name in ("x", "scale", "bias") if name in feeds]
    values = [torch.tensor(feeds[n], dtype=torch.float64, requires_grad=True) for n in names]
    y = compute(*values)
    y.backward(torch.tensor(feeds["y_grad"], dtype=torch.float64))
    for value, wanted in zip(found, [y.detach(), *(v.grad for v in values)], strict=True):
        assert wanted is not None
        room = 4e-6 * (2 + float(wanted.abs().max()))
        np.testing.assert_allclose(value, wanted.numpy(), rtol=0, atol=room)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("shape", "axis"), LAYERS, ids=str)
def test_layer_norm(shape: tuple[int, ...], axis: int, bias: bool) -> None:
    factors = shape[axis:]
    model = model_of("LayerNormalization", shape, factors, 18, axis=axis, epsilon=1e-3)
    if not bias:
        del model.graph.node[0].input[2:], model.graph.input[2:]
    feeds = feeds_of(shape, factors, bias)
    model = gradient_with_functions(model, ["x", "scale", "bias"][: 2 + bias])
    assert kinds_of(model) == {"LayerNorm", "LayerNormGrad"}
    plain, native = run_both(model, feeds)
    if np.prod(factors) > 1:
        assert_near(plain, native, ulps=64)
    else:  # the gradient is zero, and that of the plain operators what they rounded
        np.testing.assert_array_equal(native[1], np.zeros(shape))

    def compute(x: Any, scale: Any, bias: Any = None) -> Any:
        return F.layer_norm(x, factors, scale, bias, 1e-3)

    check_with_torch(feeds, native, compute)


@pytest.mark.parametrize(("shape", "axis"), LAYERS, ids=str)
def test_root_mean_square(shape: tuple[int, ...], axis: int) -> None:
    factors = shape[axis:]
    feeds = feeds_of(shape, factors, False)
    x, scale, dy = feeds["x"], feeds["scale"], feeds["y_grad"]
    (y,) = call("RMSNorm", [x, scale], axis=axis, epsilon=1e-3)
    dx, dscale = call("RMSNormGrad", [dy, x, scale], 2, axis=axis, epsilon=1e-3)

    def compute(x: Any, scale: Any) -> Any:
        return F.rms_norm(x, factors, scale, 1e-3)

    check_with_torch(feeds, [y, dx, dscale], compute)


def test_root_mean_square_as_a_function() -> None:
    model = model_of("RMSNormalization", (6, 33), (33,), 23)
    model = gradient_with_functions(model, ["x", "scale"])
    assert kinds_of(model) == {"RMSNorm", "RMSNormGrad"}
    assert_near(*run_both(model, feeds_of((6, 33), (33,), False)), ulps=64)


@pytest.mark.parametrize(("shape", "groups"), GROUPED, ids=str)
def test_group_norm(shape: tuple[int, ...], groups: int) -> None:
    factors = shape[1:2]
    model = model_of("GroupNormalization", shape, factors, 21, num_groups=groups, epsilon=1e-3)
    model = gradient_with_functions(model, ["x", "scale", "bias"])
    assert kinds_of(model) == {"GroupNorm", "GroupNormGrad"}
    feeds = feeds_of(shape, factors)
    plain, native = run_both(model, feeds)
    assert_near(plain, native, ulps=128)

    def compute(x: Any, scale: Any, bias: Any) -> Any:
        return F.group_norm(x, groups, scale, bias, eps=1e-3)

    check_with_torch(feeds, native, compute)


@pytest.mark.parametrize(("shape", "groups"), GROUPED, ids=str)
def test_a_scale_for_each_group(shape: tuple[int, ...], groups: int) -> None:
    """As GroupNormalization was before opset 21."""
    feeds = feeds_of(shape, (groups,))
    x, scale, bias, dy = (feeds[name] for name in ("x", "scale", "bias", "y_grad"))
    about = {"groups": groups, "per_channel": 0, "epsilon": 1e-3}
    found = call("GroupNorm", [x, scale, bias], **about)
    found += call("GroupNormGrad", [dy, x, scale], 3, **about)

    def compute(x: Any, scale: Any, bias: Any) -> Any:
        wide = (v.repeat_interleave(shape[1] // groups) for v in (scale, bias))
        return F.group_norm(x, groups, *wide, eps=1e-3)

    check_with_torch(feeds, found, compute)


@pytest.mark.parametrize("shape", [shape for shape, _ in GROUPED], ids=str)
def test_instance_norm(shape: tuple[int, ...]) -> None:
    model = model_of("InstanceNormalization", shape, shape[1:2], 18, epsilon=1e-3)
    model = gradient_with_functions(model, ["x", "scale", "bias"])
    assert kinds_of(model) == {"GroupNorm", "GroupNormGrad"}
    feeds = feeds_of(shape, shape[1:2])
    plain, native = run_both(model, feeds)
    assert_near(plain, native, ulps=128)

    def compute(x: Any, scale: Any, bias: Any) -> Any:
        return F.instance_norm(x, None, None, scale, bias, eps=1e-3)

    check_with_torch(feeds, native, compute)


def test_a_scale_that_broadcasts_stays_plain() -> None:
    model = model_of("LayerNormalization", (2, 3, 4), (1, 4), 18, axis=1)
    assert not kinds_of(gradient_with_functions(model, ["x", "scale"]))


def test_long_rows_and_many_rows_are_exact() -> None:
    """Sums of a million numbers are taken in parts."""
    random = np.random.default_rng(2)
    for shape in ((2, 600_000), (300_000, 3)):
        x, dy = (random.uniform(0.5, 1.5, shape).astype(np.float32) for _ in range(2))
        ones = np.ones(shape[1], np.float32)
        _, mean, inverse = call("LayerNorm", [x, ones], 3)
        np.testing.assert_allclose(mean[:, 0], x.mean(1, dtype=np.float64), rtol=2e-7)
        _, _, dbias = call("LayerNormGrad", [dy, x, ones, mean, inverse], 3)
        np.testing.assert_allclose(dbias, dy.sum(0, dtype=np.float64), rtol=5e-7)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)], ids=str)
def test_empty(shape: tuple[int, ...]) -> None:
    x, factors = np.zeros(shape, np.float32), np.ones(shape[1], np.float32)
    rows = np.ones((shape[0], 1), np.float32)
    y, mean, _ = call("LayerNorm", [x, factors, factors], 3, has_bias=1)
    assert (y.shape, mean.shape) == (shape, rows.shape)
    dx, dscale, dbias = call("LayerNormGrad", [x, x, factors, rows, rows], 3)
    assert dx.shape == shape
    np.testing.assert_array_equal(dscale, np.zeros_like(factors))
    np.testing.assert_array_equal(dbias, np.zeros_like(factors))
    (y,) = call("GroupNorm", [x, factors, factors])
    assert y.shape == shape
    dx, dscale, _ = call("GroupNormGrad", [x, x, factors], 3)
    np.testing.assert_array_equal(dscale, np.zeros_like(factors))


def test_same_numbers_whatever_the_threads() -> None:
    layer = model_of("LayerNormalization", (3000, 65), (65,), 18)
    group = model_of("GroupNormalization", (7, 12, 30, 31), (12,), 21, num_groups=3)
    for forward in (layer, group):
        shape, factors = (
            tuple(d.dim_value for d in forward.graph.input[i].type.tensor_type.shape.dim)
            for i in (0, 1)
        )
        model = gradient_with_functions(forward, ["x", "scale", "bias"])
        feeds = feeds_of(shape, factors)
        first = run(model, feeds, native=True)
        for threads in (1, 2):
            again = run(model, feeds, native=True, threads=threads)
            for expected, found in zip(first, again, strict=True):
                np.testing.assert_array_equal(expected, found)


def test_what_does_not_fit_is_an_error() -> None:
    x, three, four, rows = (np.ones(s, np.float32) for s in ((2, 4), (3,), (4,), (2, 1)))
    with pytest.raises(Exception, match="another size than the rows"):
        call("LayerNorm", [x, three], 3)
    with pytest.raises(Exception, match="another size than the rows"):
        call("LayerNorm", [x, four, three], 3, has_bias=1)
    with pytest.raises(Exception, match="axis is out of range"):
        call("LayerNorm", [x, four], axis=2)
    with pytest.raises(Exception, match="another size than there are rows"):
        call("LayerNormGrad", [x, x, four, rows, four], 3)
    with pytest.raises(Exception, match="another shape than the input"):
        call("LayerNormGrad", [x[:1], x, four, rows, rows], 3)
    with pytest.raises(Exception, match="needs 5 inputs"):
        call("LayerNormGrad", [x, x, four], 3)
    with pytest.raises(Exception, match="not of type float"):
        call("RMSNorm", [x.astype(np.float64), four])
    with pytest.raises(Exception, match="groups do not divide"):
        call("GroupNorm", [x, four, four], groups=3)
    with pytest.raises(Exception, match="groups do not divide"):
        call("GroupNormGrad", [x, x, four], 3, groups=-1)
    with pytest.raises(Exception, match="another size than the channels or groups"):
        call("GroupNormGrad", [x, x, four], 3, groups=2, per_channel=0)
    with pytest.raises(Exception, match="a batch and channels"):
        call("GroupNorm", [four, four, four])
