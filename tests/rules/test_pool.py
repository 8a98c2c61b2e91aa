"""Specs of rules/pool.py."""

from typing import Any

import numpy as np
import onnx
import pytest
from gradcheck import Spec, check_emitted, check_spec, ids, run
from onnx import TensorProto, helper

import onnxtrain
from onnxtrain.errors import ModelError

torch = pytest.importorskip("torch")


def max_pool(id: str, x: tuple[int, ...], **attrs: Any) -> Spec:
    """A MaxPool whose inputs are so far apart that a step never changes the winner."""
    outputs = attrs.pop("outputs", 1)
    # The reference evaluator gives wrong indices with stride 1, and pads unevenly only so far.
    second_opinion = "strides" in attrs
    wide = float(np.prod(x)) / 4
    return Spec("MaxPool", [x], attrs, id=id, outputs=outputs, domain=(-wide, wide), apart=0.4,
                eps=0.01, rtol=1e-3, second_opinion=second_opinion)  # fmt: skip


def average(id: str, x: tuple[int, ...], **attrs: Any) -> Spec:
    opset = 19 if "dilations" in attrs else 18
    return Spec("AveragePool", [x], attrs, id=id, opset=opset, eps=1.0, rtol=1e-5)


SPECS = [
    max_pool("tiles", (2, 3, 6, 4), kernel_shape=[2, 2], strides=[2, 2]),
    max_pool("tiles-ragged", (2, 3, 7, 8), kernel_shape=[2, 3], strides=[2, 3]),
    max_pool("tiles-ceil", (1, 2, 5, 7), kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1),
    max_pool("tiles-with-indices", (2, 2, 4, 4), kernel_shape=[2, 2], strides=[2, 2], outputs=2),
    max_pool("overlapping", (1, 2, 7, 6), kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
    max_pool("overlapping-with-indices", (1, 2, 7, 6), kernel_shape=[3, 2], outputs=2),
    max_pool("columns-first", (1, 2, 5, 6), kernel_shape=[3, 2], outputs=2, storage_order=1),
    max_pool("1d", (2, 3, 9), kernel_shape=[3], strides=[2]),
    max_pool("3d", (1, 2, 4, 5, 4), kernel_shape=[2, 3, 2], strides=[2, 1, 2]),
    max_pool("dilated", (1, 2, 7, 8), kernel_shape=[3, 2], dilations=[2, 3]),
    max_pool("asymmetric", (1, 2, 5, 6), kernel_shape=[3, 3], pads=[2, 0, 1, 2]),
    max_pool("ceil", (1, 2, 6, 7), kernel_shape=[3, 2], strides=[2, 3], ceil_mode=1),
    max_pool("gaps", (1, 2, 7, 8), kernel_shape=[2, 2], strides=[3, 4]),
    max_pool("same-upper", (1, 2, 5, 6), kernel_shape=[2, 3], strides=[2, 2], auto_pad="SAME_UPPER"),
    max_pool("same-lower", (1, 2, 5, 6), kernel_shape=[2, 3], strides=[2, 2], auto_pad="SAME_LOWER"),
    max_pool("valid", (1, 2, 5, 6), kernel_shape=[2, 2], strides=[2, 2], auto_pad="VALID"),
    average("tiles", (2, 3, 6, 4), kernel_shape=[2, 2], strides=[2, 2]),
    average("tiles-ragged", (2, 2, 7, 8), kernel_shape=[2, 3], strides=[2, 3]),
    average("tiles-ceil", (2, 2, 7, 8), kernel_shape=[2, 3], strides=[2, 3], ceil_mode=1),
    average("stride-1", (2, 3, 6, 5), kernel_shape=[3, 2]),
    average("padded", (2, 2, 6, 5), kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2]),
    average("padded-counted", (2, 2, 6, 5), kernel_shape=[3, 3], pads=[1, 0, 2, 1], count_include_pad=1),
    average("asymmetric", (1, 2, 5, 6), kernel_shape=[3, 3], pads=[2, 0, 1, 2]),
    average("ceil", (1, 2, 6, 7), kernel_shape=[3, 2], strides=[2, 3], ceil_mode=1),
    average("ceil-padded", (1, 2, 7, 7), kernel_shape=[4, 3], strides=[3, 3], pads=[1] * 4, ceil_mode=1),
    average("ceil-counted", (1, 2, 7, 7), kernel_shape=[4, 3], strides=[3, 3], pads=[1] * 4, ceil_mode=1,
            count_include_pad=1),
    average("dilated", (1, 2, 7, 8), kernel_shape=[3, 2], dilations=[2, 3], pads=[1, 1, 1, 1]),
    average("dilated-ceil-counted", (1, 2, 7, 8), kernel_shape=[3, 2], dilations=[2, 3], strides=[3, 2],
            pads=[1, 1, 1, 1], ceil_mode=1, count_include_pad=1),
    average("gaps", (1, 2, 7, 8), kernel_shape=[2, 2], strides=[3, 4]),
    average("1d", (2, 3, 9), kernel_shape=[3], strides=[2], pads=[1, 1]),
    average("3d", (1, 2, 4, 5, 4), kernel_shape=[2, 3, 2], strides=[2, 1, 2], pads=[1, 1, 0, 0, 1, 1]),
    average("same-upper", (1, 2, 5, 6), kernel_shape=[2, 3], strides=[2, 2], auto_pad="SAME_UPPER"),
    average("same-lower", (1, 2, 5, 6), kernel_shape=[2, 3], strides=[2, 2], auto_pad="SAME_LOWER"),
    average("same-counted", (1, 2, 5, 6), kernel_shape=[2, 3], strides=[2, 2], auto_pad="SAME_UPPER",
            count_include_pad=1),
    average("valid", (1, 2, 5, 6), kernel_shape=[2, 2], strides=[2, 1], auto_pad="VALID"),
    Spec("LpPool", [(2, 2, 5, 6)], {"kernel_shape": [3, 2]}, rtol=1e-3),
    Spec("LpPool", [(2, 2, 6, 6)], {"kernel_shape": [2, 3], "strides": [2, 3], "p": 3}, id="p3-tiles"),
    Spec("LpPool", [(2, 2, 5, 6)], {"kernel_shape": [3, 2], "strides": [2, 2], "p": 1, "pads": [1, 0, 1, 1]},
         id="p1-padded", away_from=(0,), eps=0.05),
    Spec("LpPool", [(1, 2, 7, 8)], {"kernel_shape": [3, 2], "dilations": [2, 3], "pads": [1, 1, 0, 1]},
         id="dilated"),
    Spec("LpPool", [(1, 2, 7, 7)], {"kernel_shape": [2, 3], "strides": [2, 2], "ceil_mode": 1}, id="ceil",
         second_opinion=False),  # the reference evaluator counts beyond the end
    Spec("LpPool", [(1, 2, 5, 6)], {"kernel_shape": [2, 3], "strides": [2, 2], "auto_pad": "SAME_UPPER"},
         id="same-upper"),
    Spec("LpPool", [(2, 2, 7)], {"kernel_shape": [3], "p": 4}, id="1d"),
    Spec("GlobalAveragePool", [(2, 3, 4, 5)], eps=1.0, rtol=1e-5),
    Spec("GlobalAveragePool", [(2, 3, 4)], id="1d", eps=1.0, rtol=1e-5),
    Spec("GlobalMaxPool", [(2, 3, 4, 5)], domain=(-30, 30), apart=0.4),
    Spec("GlobalMaxPool", [(2, 3, 2, 3, 2)], id="3d", domain=(-30, 30), apart=0.4,
         second_opinion=False),  # the reference evaluator returns three dimensions
    # The reference evaluator has no GlobalLpPool.
    Spec("GlobalLpPool", [(2, 3, 4, 5)], second_opinion=False),
    Spec("GlobalLpPool", [(2, 3, 4, 5)], {"p": 3}, id="p3", second_opinion=False),
    Spec("GlobalLpPool", [(2, 3, 4, 5)], {"p": 1}, id="p1", second_opinion=False, away_from=(0,)),
    Spec("MaxUnpool", [(1, 1, 2, 2), np.array([[[[5, 7], [13, 10]]]], np.int64)],
         {"kernel_shape": [2, 2], "strides": [2, 2]}, wrt=[0], eps=1.0),
    Spec("MaxUnpool", [(1, 1, 2, 2), np.array([[[[5, 7], [13, 24]]]], np.int64), np.array([1, 1, 5, 5])],
         {"kernel_shape": [2, 2], "strides": [2, 2]}, id="output-shape", wrt=[0], eps=1.0, constants=[2],
         second_opinion=False),  # the reference evaluator scatters before it grows the output
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_gradient(spec: Spec) -> None:
    check_spec(spec)


@pytest.mark.parametrize("spec", [s for s in SPECS if s.symbolic], ids=ids)
def test_gradient_with_symbolic_dimensions(spec: Spec) -> None:
    check_spec(spec, symbolic=True)
