"""A node that leaves out what its kernel computes is an error, and nothing is written anywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from native.kernel_calls import Array, call

X = np.ones((4, 3), np.float32)
QUERIES = np.ones((1, 2, 4, 8), np.float32)
IMAGE, CHANNEL = np.ones((2, 3, 4, 4), np.float32), np.ones(3, np.float32)
CASES: dict[str, tuple[list[Array], int, dict[str, Any]]] = {
    "SoftmaxCrossEntropy": ([X, np.array([0, 1, 2, 1])], 2, {}),
    "Attention": ([QUERIES] * 3, 2, {}),
    "BatchNorm": ([IMAGE, CHANNEL, CHANNEL], 4, {}),
    "BatchNormGrad": ([IMAGE, IMAGE, *[CHANNEL] * 4], 3, {}),
    "LayerNorm": ([X, CHANNEL, CHANNEL], 3, {"has_bias": 1, "rows": 1}),
}


@pytest.fixture(autouse=True)
def needs_library(native_library: object) -> None:
    if native_library is None:
        pytest.skip("there is no compiler to build the native library")


@pytest.mark.parametrize("kind", CASES)
def test_each_output(kind: str) -> None:
    inputs, outputs, attributes = CASES[kind]
    call(kind, inputs, outputs, **attributes)
    for place in range(outputs):
        with pytest.raises(Exception, match="an output is left out"):
            call(kind, inputs, outputs, left_out=[place], **attributes)
