"""Sums over many elements keep their digits: kernels add them up in parts."""

from __future__ import annotations

import numpy as np
import pytest

from native.kernel_calls import Array, call

ONE = np.float32(0.1)  # the errors of equal numbers all have one sign


@pytest.fixture(autouse=True)
def needs_library(native_library: object) -> None:
    if native_library is None:
        pytest.skip("there is no compiler to build the native library")


def filled(*shape: int) -> Array:
    return np.full(shape, ONE)


def assert_near_number(found: Array, expected: float) -> None:
    ulps = np.abs(found.astype(np.float64) - expected).max() / (abs(expected) * 2.0**-23)
    assert ulps < 40, f"{ulps:.0f} units in the last place"


@pytest.mark.parametrize(
    ("inputs", "outputs", "kernel"),
    [(1024, 8, 5), (512, 8, 3), (64, 3, 9), (2048, 48, 3), (4096, 1, 1)],
)
def test_convolutions(inputs: int, outputs: int, kernel: int) -> None:
    """Few channels on one side, Winograd's transform, products."""
    x, w = filled(1, inputs, 12, 12), filled(outputs, inputs, kernel, kernel)
    (y,) = call("Conv", [x, w])
    assert_near_number(y, inputs * kernel**2 * float(ONE) ** 2)


def test_input_gradients_of_first_layers() -> None:
    dy, w = filled(1, 64, 9, 9), filled(64, 3, 7, 7)
    (dx,) = call("ConvGradInput", [dy, w, np.array([1, 3, 15, 15])], kernel_shape=[7, 7])
    assert_near_number(dx[0, :, 7, 7], 64 * 49 * float(ONE) ** 2)


@pytest.mark.parametrize("keys", [100, 8192])
def test_attention_over_many_keys(keys: int) -> None:
    q, k = filled(1, 1, 3, 8), filled(1, 1, keys, 8)
    o, _ = call("Attention", [q, k, k], 2)
    assert_near_number(o, float(ONE))


def test_recurrent_layers_with_wide_inputs() -> None:
    inputs, hidden = 4096, 16
    x, w = filled(1, 2, inputs), np.full((1, hidden, inputs), np.float32(1e-3))
    r = np.zeros((1, hidden, hidden), np.float32)
    roles = {"input_roles": [0, 1, 2], "output_roles": [0]}
    (y,) = call("RNN", [x, w, r], **roles)  # its function is tanh
    assert_near_number(y, np.tanh(inputs * float(ONE) * float(np.float32(1e-3))))


def test_a_single_key_gives_queries_and_keys_no_gradient() -> None:
    """Adam would make steps of full size of what rounding leaves there."""
    rng = np.random.default_rng(0)
    q, k, v, d_o = (rng.normal(size=(4, 2, 1, 64)).astype(np.float32) for _ in range(4))
    o, kept = call("Attention", [q, k, v], 2)
    dq, dk, dv = call("AttentionGrad", [d_o, q, k, v, o, kept], 3)
    np.testing.assert_array_equal([dq, dk], np.zeros((2, *q.shape), np.float32))
    np.testing.assert_allclose(dv, d_o, rtol=1e-6)
