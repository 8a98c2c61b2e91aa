"""Specs of rules/deform_conv.py."""

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from gradcheck import Spec, check_gradient, check_spec, ids


def deform(
    id: str, x: tuple[int, ...], w: tuple[int, ...], bias: bool = False, mask: bool = False,
    **attrs: Any,
) -> Spec:  # fmt: skip
    """A DeformConv, with offsets between the kinks of interpolation, some beyond the border."""
    taps, groups = w[2] * w[3], attrs.get("offset_group", 1)
    ones, none = [1, 1], [0, 0, 0, 0]
    space = [
        (x[i + 2] + attrs.get("pads", none)[i] + attrs.get("pads", none)[i + 2]
         - attrs.get("dilations", ones)[i] * (w[i + 2] - 1) - 1)
        // attrs.get("strides", ones)[i] + 1
        for i in (0, 1)
    ]  # fmt: skip
    rng = np.random.default_rng(len(id))
    shape = (x[0], groups * taps * 2, *space)
    offset = rng.integers(-2, 2, size=shape) + rng.uniform(0.2, 0.8, size=shape)
    inputs = [x, w, offset.astype(np.float32)]
    if bias or mask:
        inputs.append((w[0],) if bias else None)
    if mask:
        inputs.append((x[0], groups * taps, *space))
    attrs["kernel_shape"] = list(w[2:])
    # The reference evaluator rounds positions to float32; see the test in float64 below.
    return Spec("DeformConv", inputs, attrs, id=id, opset=19, eps=0.01, rtol=2e-3,
                second_opinion=False)  # fmt: skip


SPECS = [
    deform("plain", (2, 3, 5, 4), (4, 3, 2, 2)),
    deform("bias-mask", (2, 3, 5, 4), (4, 3, 3, 2), bias=True, mask=True, pads=[1] * 4),
    deform("mask", (1, 2, 4, 4), (2, 2, 2, 2), mask=True),
    deform("grouped", (2, 4, 5, 4), (6, 2, 2, 2), mask=True, group=2, offset_group=2),
    deform("offset-groups", (1, 4, 4, 4), (2, 4, 2, 2), offset_group=4),
    deform("strided-dilated", (1, 2, 7, 8), (2, 2, 3, 2), strides=[2, 3], dilations=[2, 1],
           pads=[1, 2, 0, 1]),
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_gradient(spec: Spec) -> None:
    check_spec(spec)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [s for s in SPECS if s.symbolic], ids=ids)
def test_gradient_with_symbolic_dimensions(spec: Spec) -> None:
    check_spec(spec, symbolic=True)


@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_gradient_in_float64(spec: Spec) -> None:
    """onnxruntime has this operator in double precision, so there is no need of another engine."""
    rng = np.random.default_rng(2)
    feeds = {
        f"x{i}": np.asarray(rng.standard_normal(a) if isinstance(a, tuple) else a, np.float64)
        for i, a in enumerate(spec.inputs)
        if a is not None
    }
    names = ["" if a is None else f"x{i}" for i, a in enumerate(spec.inputs)]
    graph = helper.make_graph(
        [helper.make_node("DeformConv", names, ["y"], name="node", **spec.attrs)],
        "one",
        [helper.make_tensor_value_info(n, TensorProto.DOUBLE, a.shape) for n, a in feeds.items()],
        [helper.make_tensor_value_info("y", TensorProto.DOUBLE, None)],
    )
    opsets = [helper.make_opsetid("", spec.opset)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    check_gradient(model, feeds, list(feeds), of="y", eps=1e-5, rtol=1e-7)
