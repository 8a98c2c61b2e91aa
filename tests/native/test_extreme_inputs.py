"""Empty images, huge dimensions beside a zero, NaN, and numbers at the end of the range."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from native.kernel_calls import Array, call


@pytest.fixture(autouse=True)
def needs_library(native_library: object) -> None:
    if native_library is None:
        pytest.skip("there is no compiler to build the native library")


def zeros(*shape: int) -> Array:
    return np.zeros(shape, np.float32)


def numbers(*values: float) -> Array:
    return np.array(values, np.float32)


# ---- shapes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "w", "pads"),
    [
        ((1, 16, 0), (16, 16, 3), [2, 2]),
        ((2, 16, 4, 0), (16, 16, 5, 5), [4, 4, 4, 4]),
        ((1, 0, 32768, 32768), (1, 0, 32768, 32768), [0, 0, 0, 0]),
        ((2, 0, 3, 3), (4, 0, 2, 2), [0, 0, 0, 0]),
    ],
    ids=["no-width", "no-width-2d", "huge-without-channels", "without-channels"],
)
def test_a_convolution_of_nothing_is_its_bias(x, w, pads) -> None:
    bias = np.arange(1, w[0] + 1, dtype=np.float32)
    (y,) = call("Conv", [zeros(*x), zeros(*w), bias], pads=pads, has_bias=1)
    assert y.size > 0
    np.testing.assert_array_equal(
        y, np.broadcast_to(bias.reshape(1, -1, *[1] * (y.ndim - 2)), y.shape)
    )


def test_the_gradient_of_weights_for_nothing_is_zero() -> None:
    (dw,) = call(
        "ConvGradWeight",
        [zeros(1, 16, 0), np.ones((1, 16, 2), np.float32)],
        pads=[2, 2],
        kernel_shape=[3],
    )
    np.testing.assert_array_equal(dw, zeros(16, 16, 3))


HUGE = 2**33
REFUSED: dict[str, tuple[list[Array], int, dict[str, Any]]] = {
    "ConvGradBias": ([zeros(HUGE, 1, 0)], 1, {}),
    "BatchNorm": ([zeros(HUGE, 1, 0), zeros(1), zeros(1)], 4, {}),
    "LayerNorm": ([zeros(HUGE, 0), zeros(0), zeros(0)], 3, {"has_bias": 1}),
    "RMSNorm": ([zeros(HUGE, 0), zeros(0)], 2, {}),
    "GroupNormGrad": ([zeros(1, 0, 4), zeros(1, 0, 4), zeros(0)], 3, {"groups": 2**40}),
    "Attention": ([zeros(1, 1, 1, 0), *[zeros(1, 1, HUGE, 0)] * 2], 2, {}),
    "MaxPoolGrad": (
        [zeros(1, 1, 4, 4, 4), zeros(1, 1, 2**20, 2**20, 0)], 1, {"kernel_shape": [2, 2, 2]},
    ),
    "AveragePoolGrad": ([zeros(1, 1, 1, 1)], 1, {"sizes": [4, 4], "kernel_shape": [32767, 32767]}),
    "ConvGradInput": (
        [zeros(1, 0, 4, 4), zeros(0, 4, 3, 3), np.array([1, 4, 4, 4])], 1, {"group": 2**62 + 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_take_hours_or_all_memory_is_an_error(kind: str) -> None:
    inputs, outputs, attributes = REFUSED[kind]
    with pytest.raises(Exception, match=r"too large|do not divide|do not fit|too many"):
        call(kind, inputs, outputs, **attributes)


def test_groups_of_an_empty_batch_have_no_gradient() -> None:
    x, scale = zeros(0, 4, 3), np.ones(4, np.float32)
    dx, dscale, dbias = call("GroupNormGrad", [x, x, scale], 3, groups=2)
    assert dx.shape == x.shape
    np.testing.assert_array_equal([dscale, dbias], zeros(2, 4))


@pytest.mark.parametrize("roles", [[0, 0], [0, 2]], ids=["twice", "cell-of-gru"])
def test_a_recurrent_layer_writes_each_output_that_it_has(roles: list[int]) -> None:
    inputs = [zeros(3, 2, 4), zeros(1, 15, 4), zeros(1, 15, 5)]
    with pytest.raises(Exception, match=r"same role|only an LSTM"):
        call("GRU", inputs, 2, input_roles=[0, 1, 2], output_roles=roles)


# ---- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("width", [2, 64], ids=["one-window", "many"])
def test_the_maximum_beside_nan_gets_the_gradient(place: int, width: int) -> None:
    window = numbers(5, 1, 4, 2)
    window[place] = np.nan
    x = np.tile(window.reshape(2, 2), (1, width // 2))[None, None]
    dy = np.ones((1, 1, 1, width // 2), np.float32)
    (dx,) = call("MaxPoolGrad", [x, dy], kernel_shape=[2, 2], strides=[2, 2])
    expected = (window == np.nanmax(window)).reshape(2, 2)
    np.testing.assert_array_equal(dx[0, 0], np.tile(expected, (1, width // 2)))


@pytest.mark.parametrize("x", [1e36, -1e36, 1e30, -1e30, 3e38, -3e38])
def test_smooth_activations_far_from_zero_are_straight(x: float) -> None:
    given, one = numbers(*[x] * 20), np.ones(20, np.float32)
    above = x > 0
    for kind in ("Gelu", "GeluTanh", "Swish", "Mish"):
        np.testing.assert_array_equal(call(kind, [given])[0], given * above, err_msg=kind)
        (dx,) = call(f"{kind}Grad", [one, given])
        np.testing.assert_allclose(dx, one * above, atol=1e-30, err_msg=kind)


def test_celu_with_a_negative_alpha() -> None:
    x = numbers(-2, -1, 0, 1)
    (dx,) = call("CeluGrad", [np.ones(4, np.float32), x], alpha=-1.0)
    np.testing.assert_allclose(dx, [np.e**2, np.e, 1, 1], rtol=1e-6)


def test_any_nan_among_scores_is_seen() -> None:
    nan = np.array([0xFFFFFFFF], np.uint32).view(np.float32)
    q = np.ones((1, 1, 1, 1), np.float32)
    k = np.concatenate([nan, numbers(1)]).reshape(1, 1, 2, 1)
    o, _ = call("Attention", [q, k, np.full((1, 1, 2, 1), 0.25, np.float32)], 2)
    assert np.isnan(o).all()


def test_a_loss_over_many_classes_adds_them_up_in_parts() -> None:
    classes = 250_000
    x = np.full((1, classes, 3), np.log(0.3), np.float32)
    x[:, 0] = 0
    loss, _ = call("SoftmaxCrossEntropy", [x, np.zeros((1, 3), np.int64)], 2)
    np.testing.assert_allclose(loss, np.log(1 + 0.3 * (classes - 1)), rtol=1e-6)


def test_outputs_of_one_tensor_are_not_inputs_of_another(native_library: object) -> None:
    """Tasks of an optimizer run in any order, so memory of one tensor is not that of another."""
    import onnxruntime as ort
    from onnx import helper

    from native.harness import session_of

    names = ["rate", "step", *(f"{n}{i}" for i in "ab" for n in ("p", "g", "m", "v"))]
    made = [f"{n}{i}_new" for i in "ab" for n in ("p", "m", "v")]
    opsets = [helper.make_opsetid("", 18)]
    body = [helper.make_node("Identity", ["pa"], [output]) for output in made]
    function = helper.make_function("ai.onnxtrain", "AdamW_0", names, made, body, opsets)
    node = helper.make_node("AdamW_0", names, made, domain="ai.onnxtrain", chunks=[0, 0])
    types = {"rate": (1, [1]), "step": (7, [1])}
    graph = helper.make_graph(
        [node], "graph",
        [helper.make_tensor_value_info(n, *types.get(n, (1, [64]))) for n in names],
        [helper.make_tensor_value_info(n, 1, [64]) for n in made],
    )  # fmt: skip
    model = helper.make_model(
        graph, functions=[function], ir_version=10,
        opset_imports=[*opsets, helper.make_opsetid("ai.onnxtrain", 1)],
    )  # fmt: skip
    runtime = session_of(model, native=True)
    values = {n: ort.OrtValue.ortvalue_from_numpy(np.ones(64, np.float32)) for n in names[2:]}
    values["rate"] = ort.OrtValue.ortvalue_from_numpy(numbers(0.1))
    values["step"] = ort.OrtValue.ortvalue_from_numpy(np.array([1]))

    def bound(**others: str) -> Any:
        binding = runtime.io_binding()
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        for name in made:
            source = others.get(name, name.removesuffix("_new"))
            binding.bind_ortvalue_output(name, values[source])
        return binding

    runtime.run_with_iobinding(bound())
    for other in ("pb", "gb", "ma"):
        with pytest.raises(Exception, match="an output overlaps"):
            runtime.run_with_iobinding(bound(pa_new=other, pb_new="vb", vb_new="pb"))


@pytest.mark.parametrize(("channels", "groups"), [(3, 1), (8, 8)], ids=["few", "depthwise"])
def test_pixels_that_no_window_reads_do_not_matter(channels: int, groups: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, channels, 6, 6)).astype(np.float32)
    dy = rng.normal(size=(1, 8, 2, 2)).astype(np.float32)
    how = {"kernel_shape": [3, 3], "strides": [2, 2], "group": groups}
    (expected,) = call("ConvGradWeight", [x, dy], **how)
    x[..., 5, :] = x[..., 5] = np.nan
    (found,) = call("ConvGradWeight", [x, dy], **how)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
