"""Specs of rules/conv.py, conv_data.py and conv_weight.py."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import onnxtrain
from gradcheck import Spec, check_emitted, check_spec, ids, run
from onnxtrain.errors import ModelError, ShapeInferenceError
from onnxtrain.offline.autodiff.rules import conv_data, conv_weight


def conv(id: str, x: tuple[int, ...], w: tuple[int, ...], bias: bool = False, **attrs: Any) -> Spec:
    """A Conv; with its kernel stated, so that the weight may be symbolic too. Bilinear: step 1."""
    inputs = [x, w, (w[0],)] if bias else [x, w]
    # Strided, it is differentiated by ConvTranspose, whose groups the reference evaluator mixes up.
    second_opinion = attrs.get("group", 1) == 1 or "strides" not in attrs
    return Spec("Conv", inputs, {"kernel_shape": list(w[2:]), **attrs}, id=id, eps=1.0, rtol=1e-5,
                second_opinion=second_opinion)  # fmt: skip


def transposed(
    id: str, x: tuple[int, ...], w: tuple[int, ...], bias: bool = False, **attrs: Any
) -> Spec:
    groups = attrs.get("group", 1)
    inputs = [x, w, (w[1] * groups,)] if bias else [x, w]
    return Spec(
        "ConvTranspose", inputs, {"kernel_shape": list(w[2:]), **attrs}, id=id, eps=1.0, rtol=1e-5,
        # The reference evaluator mixes up the groups, and knows no auto_pad with dilations.
        second_opinion=groups == 1 and "auto_pad" not in attrs and "output_shape" not in attrs,
    )  # fmt: skip


SPECS = [
    conv("plain", (2, 3, 5, 6), (4, 3, 3, 2), bias=True),
    conv("1d", (2, 3, 9), (4, 3, 3), bias=True, strides=[2], pads=[1, 0]),
    conv("3d", (1, 2, 4, 5, 4), (3, 2, 2, 3, 2), bias=True, pads=[0, 1, 1, 0, 1, 0], strides=[1, 2,
         1]),
    conv("many-taps", (2, 2, 200), (3, 2, 90), strides=[7], pads=[5, 9]),
    conv("pointwise", (2, 3, 4, 4), (5, 3, 1, 1)),
    conv("pointwise-strided", (2, 3, 5, 6), (5, 3, 1, 1), strides=[2, 3]),
    conv("pointwise-padded", (2, 3, 3, 4), (5, 3, 1, 1), pads=[1, 0, 0, 1]),
    conv("pointwise-padded-behind", (2, 3, 3, 4), (5, 3, 1, 1), pads=[0, 0, 1, 2]),
    conv("pointwise-grouped", (2, 4, 3, 4), (6, 2, 1, 1), group=2),
    conv("asymmetric", (1, 2, 5, 4), (3, 2, 3, 3), pads=[2, 0, 1, 3]),
    conv("ragged", (2, 2, 8, 9), (3, 2, 3, 3), strides=[3, 2], pads=[1, 0, 0, 0]),
    conv("dilated", (2, 2, 8, 7), (3, 2, 3, 2), dilations=[2, 3], pads=[1, 2, 3, 1]),
    conv("dilated-strided", (2, 2, 9, 8), (3, 2, 3, 2), dilations=[2, 3], strides=[2, 3],
         pads=[1] * 4),
    conv("grouped", (2, 4, 5, 5), (6, 2, 3, 3), bias=True, group=2, pads=[1] * 4),
    conv("grouped-strided", (3, 4, 6, 5), (6, 2, 3, 3), group=2, pads=[1] * 4, strides=[2, 2]),
    conv("depthwise", (2, 3, 6, 5), (3, 1, 3, 3), bias=True, group=3, pads=[1] * 4),
    conv("depthwise-strided", (2, 3, 6, 7), (3, 1, 3, 3), group=3, pads=[1] * 4, strides=[2, 2]),
    conv("depthwise-multiplied", (2, 3, 6, 5), (6, 1, 3, 3), group=3, dilations=[2, 1], pads=[2, 0,
         1, 1]),
    conv("depthwise-many", (2, 2, 4, 4), (12, 1, 2, 2), group=2),
    conv("pads-beyond-kernel", (1, 2, 4, 4), (3, 2, 2, 2), pads=[3, 2, 2, 3]),
    conv("stride-beyond-kernel", (2, 2, 8, 8), (3, 2, 2, 2), strides=[3, 4]),
    conv("same-upper", (2, 2, 5, 6), (3, 2, 2, 3), auto_pad="SAME_UPPER"),
    conv("same-lower", (2, 2, 5, 6), (3, 2, 2, 4), auto_pad="SAME_LOWER"),
    conv("same-upper-strided", (2, 2, 6, 7), (3, 2, 3, 2), auto_pad="SAME_UPPER", strides=[2, 3]),
    conv("same-lower-strided", (2, 2, 7, 6), (3, 2, 4, 3), auto_pad="SAME_LOWER", strides=[2, 2]),
    conv("same-grouped-strided", (2, 4, 6, 6), (4, 1, 3, 3), auto_pad="SAME_LOWER", strides=[2, 2],
         group=4),
    conv("same-unreached", (1, 2, 7, 8), (3, 2, 1, 1), auto_pad="SAME_UPPER", strides=[3, 3]),
    conv("valid", (2, 2, 6, 5), (3, 2, 3, 2), auto_pad="VALID", strides=[2, 1]),
    conv("many-channels", (3, 24, 5, 4), (20, 24, 3, 3), pads=[1] * 4),
    conv("many-channels-even-batch", (4, 24, 5, 4), (20, 24, 3, 3), pads=[1] * 4, strides=[2, 1]),
    conv("wide", (1, 40, 3, 3), (80, 40, 3, 3), pads=[1] * 4),
    transposed("plain", (2, 3, 4, 3), (3, 4, 3, 2), bias=True),
    transposed("1d", (2, 3, 5), (3, 2, 3), bias=True, strides=[2], pads=[1, 0], output_padding=[1]),
    transposed("3d", (1, 2, 3, 2, 3), (2, 3, 2, 3, 2), strides=[2, 1, 1], pads=[0, 1, 1, 1, 0, 0]),
    transposed("pointwise", (2, 3, 4, 4), (3, 5, 1, 1)),
    transposed("pointwise-strided", (2, 3, 4, 4), (3, 5, 1, 1), strides=[2, 3]),
    transposed("strided", (2, 3, 4, 3), (3, 2, 3, 3), strides=[2, 3], pads=[1, 0, 0, 2]),
    transposed("output-padding", (2, 3, 4, 3), (3, 2, 3, 3), strides=[2, 3], pads=[1] * 4,
               output_padding=[1, 2]),
    transposed("dilated", (2, 3, 4, 3), (3, 2, 3, 2), dilations=[2, 3], strides=[2, 1], pads=[1, 0,
               1, 2]),
    transposed("grouped", (2, 4, 3, 4), (4, 3, 3, 2), bias=True, group=2, strides=[2, 1]),
    transposed("depthwise", (2, 3, 3, 4), (3, 1, 3, 3), group=3, strides=[2, 2], pads=[1] * 4),
    transposed("depthwise-multiplied", (2, 3, 3, 4), (3, 2, 3, 3), group=3),
    transposed("output-shape", (2, 3, 4, 3), (3, 2, 4, 3), strides=[2, 2], output_shape=[9, 6]),
    transposed("output-shape-upper", (2, 3, 4, 3), (3, 2, 4, 3), strides=[2, 2], output_shape=[7,
               6],
               auto_pad="SAME_UPPER"),
    transposed("output-shape-larger", (2, 3, 4, 3), (3, 2, 3, 3), strides=[2, 2], output_shape=[10,
               7]),
    transposed("same-upper", (2, 3, 4, 3), (3, 2, 3, 4), strides=[2, 1], auto_pad="SAME_UPPER"),
    transposed("same-lower", (2, 3, 4, 3), (3, 2, 3, 4), strides=[2, 1], auto_pad="SAME_LOWER"),
    transposed("same-dilated", (2, 3, 4, 3), (3, 2, 3, 2), strides=[2, 1], dilations=[2, 2],
               auto_pad="SAME_UPPER"),
    transposed("valid", (2, 3, 4, 3), (3, 2, 3, 2), strides=[2, 1], auto_pad="VALID"),
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_gradient(spec: Spec) -> None:
    check_spec(spec)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [s for s in SPECS if s.symbolic], ids=ids)
def test_gradient_with_symbolic_dimensions(spec: Spec) -> None:
    check_spec(spec, symbolic=True)


# ---- each formulation, whatever would be chosen by shape ---------------------------------------

RAGGED = conv("ragged", (2, 2, 8, 9), (3, 2, 3, 3), strides=[3, 2], pads=[1, 0, 0, 0])
DILATED = conv("dilated", (2, 2, 8, 7), (3, 2, 3, 2), dilations=[2, 3], pads=[1, 2, 3, 1])
GAPS = conv("gaps", (2, 3, 8, 9), (4, 3, 2, 2), strides=[3, 4], dilations=[1, 2])
LINE = conv("1d", (2, 3, 9), (4, 3, 3), strides=[2], pads=[1, 0])
VOLUME = conv("3d", (2, 2, 4, 5, 4), (3, 2, 2, 3, 2), pads=[0, 1, 1, 0, 1, 0], strides=[1, 2, 1])
GROUPED = conv("grouped", (2, 4, 6, 5), (6, 2, 3, 3), group=2, pads=[1] * 4, strides=[2, 1])
DEEP = conv("deep", (2, 3, 6, 7), (3, 1, 3, 3), group=3, pads=[2, 1, 0, 1], dilations=[2, 1])
DEEP_LINE = conv("deep-1d", (2, 3, 9), (3, 1, 4), group=3, pads=[2, 1])
DEEP_VOLUME = conv("deep-3d", (1, 2, 4, 3, 4), (2, 1, 2, 3, 2), group=2, pads=[1, 1, 0, 0, 1, 1])
DEEP_STRIDED = conv("deep-s", (2, 3, 8, 7), (3, 1, 3, 2), group=3, pads=[1] * 4, strides=[3, 2])
SAME = conv("same", (2, 2, 6, 7), (3, 2, 3, 2), auto_pad="SAME_UPPER", strides=[2, 3])

DENSE = [RAGGED, DILATED, GAPS, LINE, VOLUME, SAME]
WEIGHT_FORMULATIONS = {
    "columns": [*DENSE, GROUPED, DEEP, DEEP_STRIDED],
    "per image": DENSE,
    "halves": DENSE,
    "folded": [*DENSE, GROUPED, DEEP, DEEP_STRIDED],
    "exchanged": [*DENSE, GROUPED, DEEP, DEEP_LINE, DEEP_VOLUME, DEEP_STRIDED],
    "depthwise": [DEEP, DEEP_LINE, DEEP_VOLUME, DEEP_STRIDED],
    "depthwise shifted": [DEEP, DEEP_LINE, DEEP_VOLUME],
    "depthwise conv": [DEEP, DEEP_LINE, DEEP_VOLUME, DEEP_STRIDED],
    "depthwise columns": [DEEP, DEEP_LINE, DEEP_VOLUME, DEEP_STRIDED],
}
NEEDS_STATIC_SHAPES = ("depthwise conv", "products")
DATA_FORMULATIONS = {
    "conv": [DILATED, DEEP, DEEP_LINE, DEEP_VOLUME],
    "conv transpose": [*DENSE, GROUPED, DEEP, DEEP_LINE, DEEP_VOLUME, DEEP_STRIDED],
    "products": DENSE,
}


def each(table: dict[str, list[Spec]]) -> list[Any]:
    return [
        pytest.param(name, spec, symbolic, id=f"{name}-{spec.id}{'-symbolic' * symbolic}")
        for name, specs in table.items()
        for spec in specs
        for symbolic in (False, True)
        if not (symbolic and name in NEEDS_STATIC_SHAPES)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "spec", "symbolic"), each(WEIGHT_FORMULATIONS))
def test_every_weight_formulation(
    monkeypatch: pytest.MonkeyPatch, name: str, spec: Spec, symbolic: bool
) -> None:
    monkeypatch.setattr(conv_weight, "choose", lambda *_: name)
    check_spec(replace(spec, wrt=[1], second_opinion=False), symbolic)  # one engine is enough here


@pytest.mark.parametrize(("name", "spec", "symbolic"), each(DATA_FORMULATIONS))
def test_every_data_formulation(
    monkeypatch: pytest.MonkeyPatch, name: str, spec: Spec, symbolic: bool
) -> None:
    monkeypatch.setattr(conv_data, "choose", lambda *_: name)
    check_spec(replace(spec, wrt=[0], second_opinion=False), symbolic)


def test_every_formulation_is_tested() -> None:
    assert {*WEIGHT_FORMULATIONS, "pointwise"} == set(conv_weight.FORMULATIONS)
    assert set(DATA_FORMULATIONS) == set(conv_data.SPREADS)


CHOICES = [  # batch, channels, size, filters, kernel, stride, groups: weight, data
    ((16, 64, 32, 64, 3, 1, 1), "halves", "conv"),
    ((15, 64, 32, 64, 3, 1, 1), "per image", "conv"),
    ((16, 512, 4, 512, 3, 1, 1), "folded", "products"),
    ((16, 256, 8, 512, 3, 2, 1), "folded", "products"),
    ((16, 3, 32, 64, 3, 1, 1), "columns", "conv transpose"),
    ((4, 96, 56, 24, 1, 1, 1), "pointwise", "conv"),
    ((4, 144, 56, 144, 3, 1, 144), "depthwise shifted", "conv"),
    ((4, 96, 112, 96, 3, 2, 96), "depthwise conv", "conv transpose"),
    ((4, 960, 7, 960, 3, 1, 960), "depthwise", "conv"),
]


@pytest.mark.parametrize(("shape", "weight", "data"), CHOICES, ids=str)
def test_choice_by_shape(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], weight: str, data: str
) -> None:
    chosen: dict[str, str] = {}

    def record(module: Any) -> None:
        original = module.choose

        def choose(*args: Any) -> str:
            chosen[module.__name__.rsplit(".", 1)[1]] = name = original(*args)
            return name

        monkeypatch.setattr(module, "choose", choose)

    record(conv_weight)
    record(conv_data)
    n, c, size, k, kernel, stride, groups = shape
    onnxtrain.gradient(
        one_node(
            "Conv", [(n, c, size, size), (k, c // groups, kernel, kernel)],
            strides=[stride] * 2, pads=[kernel // 2] * 4, group=groups,
        ),
        ["x0", "x1"],
    )  # fmt: skip
    assert chosen == {"conv_weight": weight, "conv_data": data}


# ---- against torch -----------------------------------------------------------------------------


def random_configurations(count: int, transposed: bool) -> list[dict[str, Any]]:
    """Draw attributes at random, and keep those that leave something of the output."""
    rng = np.random.default_rng(11 + transposed)
    found: list[dict[str, Any]] = []
    while len(found) < count:
        rank = int(rng.integers(1, 4))
        group = int(rng.choice([1, 1, 2, 3]))
        c = {
            "group": group,
            "batch": int(rng.integers(1, 4)),
            "inputs": group * int(rng.integers(1, 4)),
            "outputs": group * int(rng.integers(1, 4)),
            "size": [int(i) for i in rng.integers(3, 9 if rank < 3 else 6, size=rank)],
            "kernel": [int(i) for i in rng.integers(1, 5 if rank < 3 else 4, size=rank)],
            "strides": [int(i) for i in rng.integers(1, 4, size=rank)],
            "dilations": [int(i) for i in rng.integers(1, 4, size=rank)],
            "pads": [int(i) for i in rng.integers(0, 4, size=rank)],
            "bias": bool(rng.integers(2)),
            "symbolic": bool(rng.integers(2)),
        }
        axes = range(rank)
        extent = [c["dilations"][i] * (c["kernel"][i] - 1) + 1 for i in axes]
        if transposed:
            c["output_padding"] = [int(rng.integers(0, s)) for s in c["strides"]]
            left = [
                (c["size"][i] - 1) * c["strides"][i] + extent[i] - 2 * c["pads"][i] for i in axes
            ]
        else:
            left = [c["size"][i] + 2 * c["pads"][i] - extent[i] + 1 for i in axes]
        if min(left) > 0:
            found.append(c)
    return found


def configuration_id(c: dict[str, Any]) -> str:
    return "-".join(
        f"{key[0]}{''.join(str(i) for i in np.atleast_1d(c[key]))}"
        for key in ("size", "kernel", "strides", "dilations", "pads", "group")
    )


@pytest.mark.parametrize("c", random_configurations(60, transposed=False), ids=configuration_id)
def test_conv_equals_torch(c: dict[str, Any]) -> None:
    weight = (c["outputs"], c["inputs"] // c["group"], *c["kernel"])
    function = getattr(torch.nn.functional, f"conv{len(c['size'])}d")
    compare_with_torch("Conv", c, weight, function, {})


@pytest.mark.parametrize("c", random_configurations(60, transposed=True), ids=configuration_id)
def test_conv_transpose_equals_torch(c: dict[str, Any]) -> None:
    weight = (c["inputs"], c["outputs"] // c["group"], *c["kernel"])
    function = getattr(torch.nn.functional, f"conv_transpose{len(c['size'])}d")
    extra = {"output_padding": c["output_padding"]}
    compare_with_torch("ConvTranspose", c, weight, function, extra)


def compare_with_torch(
    op: str, c: dict[str, Any], weight: tuple[int, ...], function: Any, extra: dict[str, Any]
) -> None:
    rng = np.random.default_rng(5)
    shapes = [
        (c["batch"], c["inputs"], *c["size"]),
        weight,
        *([(c["outputs"],)] if c["bias"] else []),
    ]
    arrays = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    inputs = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in arrays]
    result = function(
        *inputs, stride=c["strides"], padding=c["pads"], dilation=c["dilations"],
        groups=c["group"], **extra,
    )  # fmt: skip
    ct = rng.standard_normal(tuple(result.shape)).astype(np.float32)
    expected = torch.autograd.grad(result, inputs, torch.tensor(ct, dtype=torch.float64))
    model = one_node(
        op, [("n", c["inputs"], *"hwd"[: len(c["size"])]) if c["symbolic"] else shapes[0],
        *shapes[1:]],
        group=c["group"], strides=c["strides"], dilations=c["dilations"], pads=c["pads"] * 2,
        **extra,
    )  # fmt: skip
    wrt = [f"x{i}" for i in range(len(arrays))]
    extended = onnxtrain.gradient(model, wrt)
    check_emitted(extended)
    feeds = {**dict(zip(wrt, arrays, strict=True)), "y_grad": ct}
    for name, actual, wanted in zip(wrt, run(extended, feeds)[1:], expected, strict=True):
        scale = np.abs(wanted.numpy()).max() + 1e-3
        np.testing.assert_allclose(
            actual / scale, wanted.numpy() / scale, atol=1e-5, err_msg=f"d{name}"
        )


def one_node(
    op: str, shapes: Sequence[Sequence[int | str]], kind: int = TensorProto.FLOAT, **attrs: Any
) -> onnx.ModelProto:
    names = [f"x{i}" for i in range(len(shapes))]
    graph = helper.make_graph(
        [helper.make_node(op, names, ["y"], name="node", **attrs)],
        "one",
        [
            helper.make_tensor_value_info(n, kind, list(s))
            for n, s in zip(names, shapes, strict=True)
        ],
        [helper.make_tensor_value_info("y", kind, None)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def test_half_precision() -> None:
    rng = np.random.default_rng(4)
    shapes = [(2, 4, 6, 6), (8, 2, 3, 3), (8,)]
    arrays = [rng.uniform(-1, 1, size=s).astype(np.float16) for s in shapes]
    ct = rng.uniform(-1, 1, size=(2, 8, 3, 3)).astype(np.float16)
    results = []
    for kind, dtype in ((TensorProto.FLOAT16, np.float16), (TensorProto.FLOAT, np.float32)):
        model = one_node("Conv", shapes, kind=kind, group=2, strides=[2, 2], pads=[1] * 4)
        extended = onnxtrain.gradient(model, ["x0", "x1", "x2"])
        feeds = {f"x{i}": a.astype(dtype) for i, a in enumerate(arrays)}
        results.append(run(extended, {**feeds, "y_grad": ct.astype(dtype)}))
    for half, single in zip(*results, strict=True):
        assert half.dtype == np.float16
        np.testing.assert_allclose(half.astype(np.float32), single, rtol=2e-2, atol=2e-2)


def test_unknown_kernel_is_refused() -> None:
    model = one_node("Conv", [("n", 3, "h", "w"), ("k", "c", "a", "b")])
    with pytest.raises(ShapeInferenceError, match=r"kernel size of Conv 'node'.*kernel_shape"):
        onnxtrain.gradient(model, ["x1"])


def test_output_padding_of_a_stride_is_refused() -> None:
    attrs = {"output_padding": [0, 1], "dilations": [1, 2]}
    model = one_node("ConvTranspose", [(1, 2, 4, 4), (2, 2, 3, 3)], **attrs)
    with pytest.raises(ModelError, match=r"output_padding=\[0, 1\] with strides=\[1, 1\]"):
        onnxtrain.gradient(model, ["x0"])


def test_disputed_output_padding_is_refused() -> None:
    attrs = {"auto_pad": "SAME_UPPER", "output_padding": [1], "strides": [2]}
    model = one_node("ConvTranspose", [(1, 2, 4), (2, 2, 3)], **attrs)
    with pytest.raises(ModelError, match=r"auto_pad=SAME_UPPER and output_padding"):
        onnxtrain.gradient(model, ["x0"])
