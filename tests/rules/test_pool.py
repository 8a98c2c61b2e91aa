"""Specs of rules/pool.py."""

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import onnxtrain
from gradcheck import Spec, check_emitted, check_spec, ids, run
from onnxtrain.errors import ModelError


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
    # With dilations and ceil_mode, the reference evaluator counts taps beyond the padding.
    second_opinion = not ("dilations" in attrs and "ceil_mode" in attrs)
    return Spec("AveragePool", [x], attrs, id=id, opset=opset, eps=1.0, rtol=1e-5,
                second_opinion=second_opinion)  # fmt: skip


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
    max_pool("same-upper", (1, 2, 5, 6), kernel_shape=[2, 3], strides=[2, 2],
             auto_pad="SAME_UPPER"),
    max_pool("same-lower", (1, 2, 5, 6), kernel_shape=[2, 3], strides=[2, 2],
             auto_pad="SAME_LOWER"),
    max_pool("valid", (1, 2, 5, 6), kernel_shape=[2, 2], strides=[2, 2], auto_pad="VALID"),
    average("tiles", (2, 3, 6, 4), kernel_shape=[2, 2], strides=[2, 2]),
    average("tiles-ragged", (2, 2, 7, 8), kernel_shape=[2, 3], strides=[2, 3]),
    average("tiles-ceil", (2, 2, 7, 8), kernel_shape=[2, 3], strides=[2, 3], ceil_mode=1),
    average("stride-1", (2, 3, 6, 5), kernel_shape=[3, 2]),
    average("padded", (2, 2, 6, 5), kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2]),
    average("padded-counted", (2, 2, 6, 5), kernel_shape=[3, 3], pads=[1, 0, 2, 1],
            count_include_pad=1),
    average("asymmetric", (1, 2, 5, 6), kernel_shape=[3, 3], pads=[2, 0, 1, 2]),
    average("ceil", (1, 2, 6, 7), kernel_shape=[3, 2], strides=[2, 3], ceil_mode=1),
    average("ceil-padded", (1, 2, 7, 7), kernel_shape=[4, 3], strides=[3, 3], pads=[1] * 4,
            ceil_mode=1),
    average("ceil-counted", (1, 2, 7, 7), kernel_shape=[4, 3], strides=[3, 3], pads=[1] * 4,
            ceil_mode=1,
            count_include_pad=1),
    average("dilated", (1, 2, 7, 8), kernel_shape=[3, 2], dilations=[2, 3], pads=[1, 1, 1, 1]),
    average("dilated-ceil-counted", (1, 2, 7, 8), kernel_shape=[3, 2], dilations=[2, 3],
            strides=[3, 2],
            pads=[1, 1, 1, 1], ceil_mode=1, count_include_pad=1),
    average("gaps", (1, 2, 7, 8), kernel_shape=[2, 2], strides=[3, 4]),
    average("1d", (2, 3, 9), kernel_shape=[3], strides=[2], pads=[1, 1]),
    average("3d", (1, 2, 4, 5, 4), kernel_shape=[2, 3, 2], strides=[2, 1, 2], pads=[1, 1, 0, 0, 1,
            1]),
    average("same-upper", (1, 2, 5, 6), kernel_shape=[2, 3], strides=[2, 2], auto_pad="SAME_UPPER"),
    average("same-lower", (1, 2, 5, 6), kernel_shape=[2, 3], strides=[2, 2], auto_pad="SAME_LOWER"),
    average("same-counted", (1, 2, 5, 6), kernel_shape=[2, 3], strides=[2, 2],
            auto_pad="SAME_UPPER",
            count_include_pad=1),
    average("valid", (1, 2, 5, 6), kernel_shape=[2, 2], strides=[2, 1], auto_pad="VALID"),
    Spec("LpPool", [(2, 2, 5, 6)], {"kernel_shape": [3, 2]}, rtol=1e-3),
    Spec("LpPool", [(2, 2, 6, 6)], {"kernel_shape": [2, 3], "strides": [2, 3], "p": 3},
         id="p3-tiles"),
    Spec("LpPool", [(2, 2, 5, 6)], {"kernel_shape": [3, 2], "strides": [2, 2], "p": 1, "pads": [1,
         0, 1, 1]},
         id="p1-padded", away_from=(0,), eps=0.05),
    Spec("LpPool", [(1, 2, 7, 8)], {"kernel_shape": [3, 2], "dilations": [2, 3], "pads": [1, 1, 0,
         1]},
         id="dilated"),
    Spec("LpPool", [(1, 2, 7, 7)], {"kernel_shape": [2, 3], "strides": [2, 2], "ceil_mode": 1},
         id="ceil",
         second_opinion=False),  # the reference evaluator counts beyond the end
    Spec("LpPool", [(1, 2, 5, 6)], {"kernel_shape": [2, 3], "strides": [2, 2],
         "auto_pad": "SAME_UPPER"},
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
    Spec("MaxUnpool", [(1, 1, 2, 2), np.array([[[[5, 7], [13, 24]]]], np.int64), np.array([1, 1, 5,
         5])],
         {"kernel_shape": [2, 2], "strides": [2, 2]}, id="output-shape", wrt=[0], eps=1.0,
         constants=[2],
         second_opinion=False),  # the reference evaluator scatters before it grows the output
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_gradient(spec: Spec) -> None:
    check_spec(spec)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [s for s in SPECS if s.symbolic], ids=ids)
def test_gradient_with_symbolic_dimensions(spec: Spec) -> None:
    check_spec(spec, symbolic=True)


# ---- against torch, with ties ------------------------------------------------------------------


def random_pools(count: int) -> list[dict[str, Any]]:
    """Draw windows at random, within what torch accepts: padding up to half the kernel."""
    rng = np.random.default_rng(3)
    found: list[dict[str, Any]] = []
    while len(found) < count:
        rank = int(rng.integers(1, 4))
        kernel = [int(i) for i in rng.integers(1, 5 if rank < 3 else 4, size=rank)]
        tiles = bool(rng.integers(4) == 0)
        c = {
            "size": [int(i) for i in rng.integers(4, 10 if rank < 3 else 7, size=rank)],
            "kernel": kernel,
            "strides": kernel if tiles else [int(i) for i in rng.integers(1, 4, size=rank)],
            "dilations": [1] * rank if tiles else [int(i) for i in rng.integers(1, 3, size=rank)],
            "pads": [0] * rank if tiles else [int(rng.integers(0, k // 2 + 1)) for k in kernel],
            "ceil": bool(rng.integers(2)),
            "counted": bool(rng.integers(2)),
            "symbolic": bool(rng.integers(2)),
        }
        reach = [
            n + 2 * p - d * (k - 1)
            for n, p, d, k in zip(c["size"], c["pads"], c["dilations"], kernel, strict=True)
        ]
        last = [-(-(r - 1) // s) * s for r, s in zip(reach, c["strides"], strict=True)]
        begins_inside = all(
            begin < n + p for begin, n, p in zip(last, c["size"], c["pads"], strict=True)
        )
        if min(reach) > 0 and (begins_inside or not c["ceil"]):
            found.append(c)
    return found


def pool_id(c: dict[str, Any]) -> str:
    words = [
        f"{key[0]}{''.join(str(i) for i in c[key])}"
        for key in ("size", "kernel", "strides", "dilations", "pads")
    ]
    return "-".join(words + [key for key in ("ceil", "counted", "symbolic") if c[key]])


@pytest.mark.parametrize("c", random_pools(50), ids=pool_id)
def test_max_pool_with_ties_equals_torch(c: dict[str, Any]) -> None:
    x = np.random.default_rng(7).integers(0, 4, size=(2, 3, *c["size"])).astype(np.float32)
    function = getattr(torch.nn.functional, f"max_pool{len(c['size'])}d")
    attrs = {"dilations": c["dilations"]}
    compare_with_torch("MaxPool", c, x, function, {"dilation": c["dilations"]}, attrs)


@pytest.mark.parametrize("c", random_pools(50), ids=pool_id)
def test_average_pool_equals_torch(c: dict[str, Any]) -> None:
    x = np.random.default_rng(7).standard_normal((2, 3, *c["size"])).astype(np.float32)
    function = getattr(torch.nn.functional, f"avg_pool{len(c['size'])}d")
    attrs = {"count_include_pad": int(c["counted"])}
    compare_with_torch("AveragePool", c, x, function, {"count_include_pad": c["counted"]}, attrs)


def compare_with_torch(
    op: str,
    c: dict[str, Any],
    x: Any,
    function: Any,
    options: dict[str, Any],
    attrs: dict[str, Any],
) -> None:
    rank = len(c["size"])
    model = one_node(
        op, ["n", "c", *"hwd"[:rank]] if c["symbolic"] else x.shape,
        kernel_shape=c["kernel"], strides=c["strides"], pads=c["pads"] * 2,
        ceil_mode=int(c["ceil"]), **attrs,
    )  # fmt: skip
    leaf = torch.tensor(x, requires_grad=True)
    y = function(leaf, c["kernel"], c["strides"], c["pads"], ceil_mode=c["ceil"], **options)
    dy = np.random.default_rng(8).standard_normal(tuple(y.shape)).astype(np.float32)
    (expected,) = torch.autograd.grad(y, leaf, torch.tensor(dy))
    extended = onnxtrain.gradient(model, ["x"])
    check_emitted(extended)
    forward, dx = run(extended, {"x": x, "y_grad": dy})
    np.testing.assert_allclose(forward, y.detach().numpy(), atol=1e-5)
    np.testing.assert_allclose(dx, expected.numpy(), atol=1e-5)


def one_node(op: str, shape: Any, opset: int = 18, **attrs: Any) -> onnx.ModelProto:
    graph = helper.make_graph(
        [helper.make_node(op, ["x"], ["y"], name="node", **attrs)],
        "one",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(shape))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


# ---- special values ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "attrs"),
    [
        ("MaxPool", {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ("MaxPool", {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [0, 0, 1, 0]}),
        ("GlobalMaxPool", {}),
    ],
    ids=["tiles", "indices", "global"],
)
@pytest.mark.parametrize("value", [0.0, -3.0], ids=str)
def test_the_first_of_equal_maxima_gets_the_gradient(op: str, attrs: Any, value: float) -> None:
    extended = onnxtrain.gradient(one_node(op, (1, 1, 2, 2), **attrs), ["x"])
    x = np.full((1, 1, 2, 2), value, np.float32)
    dx = run(extended, {"x": x, "y_grad": np.full((1, 1, 1, 1), 5.0, np.float32)})[1]
    np.testing.assert_array_equal(dx, [[[[5, 0], [0, 0]]]])


def test_an_infinite_cotangent_stays_where_it_belongs() -> None:
    model = one_node("MaxPool", (1, 1, 2, 2), kernel_shape=[2, 2], strides=[2, 2])
    x = np.array([[[[1, 4], [2, 3]]]], np.float32)
    feeds = {"x": x, "y_grad": np.full((1, 1, 1, 1), np.inf, np.float32)}
    np.testing.assert_array_equal(
        run(onnxtrain.gradient(model, ["x"]), feeds)[1], [[[[0, np.inf], [0, 0]]]]
    )


@pytest.mark.parametrize("op", ["LpPool", "GlobalLpPool"])
def test_a_norm_of_zero_has_no_gradient(op: str) -> None:
    attrs = {"kernel_shape": [2, 2]} if op == "LpPool" else {}
    extended = onnxtrain.gradient(one_node(op, (1, 1, 2, 2), **attrs), ["x"])
    feeds = {"x": np.zeros((1, 1, 2, 2), np.float32), "y_grad": np.ones((1, 1, 1, 1), np.float32)}
    np.testing.assert_array_equal(run(extended, feeds)[1], np.zeros((1, 1, 2, 2)))


def test_disputed_padding_is_refused() -> None:
    attrs = {"kernel_shape": [3], "dilations": [2], "auto_pad": "SAME_UPPER"}
    with pytest.raises(ModelError, match=r"auto_pad=SAME_UPPER and dilations"):
        onnxtrain.gradient(one_node("LpPool", (1, 1, 9), **attrs), ["x"])


def test_a_window_in_the_padding_is_refused() -> None:
    attrs = {"kernel_shape": [3], "strides": [3], "pads": [1, 1], "ceil_mode": 1}
    with pytest.raises(ModelError, match=r"last window that lies in its padding"):
        onnxtrain.gradient(one_node("AveragePool", (1, 1, 8), **attrs), ["x"])
