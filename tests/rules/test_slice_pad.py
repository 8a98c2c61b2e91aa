"""Specs of rules/crop.py."""

import numpy as np
import onnx
import pytest
import torch

from gradcheck import Spec, check_gradient, check_spec, ids, vjp


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def frame(mode: str, *numbers: int, shape: tuple[int, ...] = (2, 5, 4), **more: object) -> Spec:
    entries = {"id": mode, "constants": [1], "eps": 1.0, **more}
    return Spec("Pad", [shape, ints(*numbers)], {"mode": mode}, **entries)


FAR, BEFORE_ALL = np.iinfo(np.int64).max, np.iinfo(np.int64).min
MIDDLE = [(4, 6), ints(1, 2), ints(3, 6), ints(0, 1)]

# Where pads are negative, in the operator or in its gradient, there is no second opinion: the
# reference evaluator leaves padding to numpy, which knows no negative pads. Torch does, see below.
SPECS = [
    Spec("Slice", MIDDLE, constants=[1, 2, 3], eps=1.0),
    Spec("Slice", MIDDLE, id="all-at-run-time", eps=1.0),
    Spec("Slice", MIDDLE, id="bounds-at-run-time", constants=[3], eps=1.0),
    Spec("Slice", MIDDLE[:3], id="no-axes", constants=[1, 2], eps=1.0),
    Spec("Slice", MIDDLE[:3], id="no-axes-at-run-time", eps=1.0),
    Spec("Slice", [(4, 6), ints(1), ints(3)], id="fewer-bounds-than-axes", constants=[1, 2],
         eps=1.0),
    Spec("Slice", [(4, 6), ints(-3), ints(-1), ints(-1)], id="from-the-end", constants=[1, 2, 3],
         eps=1.0),
    Spec("Slice", [(4, 6), ints(-9), ints(FAR), ints(1)], id="beyond", constants=[1, 2, 3],
         eps=1.0),
    Spec("Slice", [(4, 6), ints(-9), ints(FAR), ints(1)], id="beyond-at-run-time", constants=[3],
         eps=1.0),
    Spec("Slice", [(4, 6), ints(8), ints(FAR), ints(1)], id="nothing", constants=[1, 2, 3],
         eps=1.0),
    Spec("Slice", [(4, 6), ints(3), ints(2), ints(1)], id="nothing-at-run-time", constants=[3],
         eps=1.0),
    Spec("Slice", [(4, 6, 3), ints(0, 1), ints(FAR, 5), ints(0, -2), ints(2, 3)], id="steps",
         constants=[1, 2, 3, 4], eps=1.0),
    Spec("Slice", [(4, 6), ints(1), ints(FAR), ints(-1), ints(2)], id="steps-last-axis",
         constants=[1, 2, 3, 4], eps=1.0),
    Spec("Slice", [(6,), ints(0), ints(FAR), ints(0), ints(2)], id="steps-vector",
         constants=[1, 2, 3, 4], eps=1.0),
    Spec("Slice", [(4, 6), ints(4, -1), ints(0, BEFORE_ALL), ints(1, 0), ints(-2, -1)],
         id="backwards", constants=[1, 2, 3, 4], eps=1.0),
    Spec("Slice", [(4, 6), ints(FAR), ints(1), ints(1), ints(-3)], id="backwards-beyond",
         constants=[1, 2, 3, 4], eps=1.0),
    Spec("Slice", [(4, 6), ints(4, 0), ints(0, 3), ints(1, 0), ints(-2, 1)],
         id="backwards-at-run-time", constants=[3], eps=1.0),
    Spec("Slice", [(4, 6), ints(4, 0), ints(0, 3), ints(1, 0), ints(-2, 1)],
         id="backwards-all-at-run-time", eps=1.0),
    Spec("Slice", [(4, 6), ints(1, 0), ints(3, 6), None, ints(1, 2)], id="steps-without-axes",
         constants=[1, 2, 4], eps=1.0),
    Spec("Slice", [(4, 6), *(np.array([n], np.int32) for n in (1, -1, 1))], id="int32", eps=1.0),
    Spec("Slice", [(4, 6), *(np.array([n], np.int32) for n in (1, -1, 1, 2))], id="int32-constant",
         constants=[1, 2, 3, 4], eps=1.0),
    frame("constant", 0, 1, 2, 0, 3, 0),
    frame("constant", 0, 1, 2, 0, 3, 0, id="pads-at-run-time", constants=[], second_opinion=False),
    frame("constant", 0, -1, 2, 0, 3, -2, id="negative", second_opinion=False),
    frame("constant", 0, -1, 2, 0, 3, -2, id="negative-at-run-time", constants=[],
          second_opinion=False),
    frame("constant", 0, -1, -2, 0, 0, -1, id="crop", second_opinion=False),
    Spec("Pad", [(2, 3), ints(1, 0, 2, 1), ()], id="value", constants=[1], eps=1.0),
    Spec("Pad", [(2, 3), ints(1, -1, 2, 1), ()], id="value-negative", second_opinion=False,
         eps=1.0),
    Spec("Pad", [(2, 3, 4), ints(1, 2, 3, 0), (), ints(-1, 0)], id="axes", constants=[1, 3],
         eps=1.0),
    Spec("Pad", [(2, 3, 4), ints(1, 2, 3, 0), None, ints(-1, 0)], id="axes-no-value",
         constants=[3], second_opinion=False, eps=1.0),
    Spec("Pad", [(2, 3, 4), ints(1, 2, 3, 0), None, ints(-1, 0)], id="axes-at-run-time",
         second_opinion=False, eps=1.0),
    Spec("Pad", [(2, 3, 4), ints(1, 3), None, np.array([1], np.int32)], id="axes-int32",
         second_opinion=False, eps=1.0),
    frame("reflect", 0, 2, 3, 0, 1, 0),
    frame("reflect", 0, 4, 3, 0, 4, 3, id="reflect-overlapping"),
    frame("reflect", 0, 2, 3, 0, 1, 0, id="reflect-at-run-time", constants=[]),
    frame("edge", 1, 2, 0, 0, 6, 1),
    frame("edge", 1, 2, 0, 0, 6, 1, id="edge-at-run-time", constants=[]),
    frame("wrap", 0, 2, 3, 0, 5, 0, opset=19),
    frame("wrap", 0, 2, 3, 0, 5, 0, id="wrap-at-run-time", opset=19, constants=[]),
    frame("reflect", 0, 2, -1, 0, -1, 2, id="reflect-negative", second_opinion=False),
    frame("edge", 0, 2, -1, 0, -1, 2, id="edge-negative", second_opinion=False),
    Spec("Pad", [(2, 5, 4), ints(1, 2, 3, 0), None, ints(-1, 1)], {"mode": "reflect"},
         id="reflect-axes", constants=[1, 3], eps=1.0),
    Spec("Pad", [(2, 5, 4), ints(1, 2, 3, 0), None, ints(-1, 1)], {"mode": "edge"},
         id="edge-axes-at-run-time", eps=1.0),
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_gradient(spec: Spec) -> None:
    check_spec(spec)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [s for s in SPECS if s.symbolic], ids=ids)
def test_gradient_with_symbolic_dimensions(spec: Spec) -> None:
    check_spec(spec, symbolic=True)


PADDED = """
    <ir_version: 10, opset_import: ["" : 19]>
    g (float[n,c,h,w] x) => (float[n,c,i,j] y) <int64[8] pads = {0, 0, 2, 1, 0, 0, 3, -1}>
    { y = Pad<mode = "MODE">(x, pads) }"""


@pytest.mark.parametrize(
    ("mode", "in_torch"),
    [("constant", "constant"), ("reflect", "reflect"), ("edge", "replicate"), ("wrap", "circular")],
)
def test_pad_is_what_torch_says(mode: str, in_torch: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 4, 5)).astype(np.float32)
    ct = rng.standard_normal((2, 3, 9, 5)).astype(np.float32)
    model = onnx.parser.parse_model(PADDED.replace("MODE", mode))
    (dx,) = vjp(model, {"x": x}, ["x"], ct)
    leaf = torch.tensor(x, requires_grad=True)
    # torch pads with negative widths in constant mode alone: the crop comes first
    torch.nn.functional.pad(leaf[..., :4], (1, 0, 2, 3), mode=in_torch).backward(torch.tensor(ct))
    np.testing.assert_allclose(dx, leaf.grad, rtol=1e-5, atol=1e-5)


def test_slice_beside_transposes() -> None:
    """The padding stays on its axis when onnxruntime moves transposes through it."""
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 18]>
        g (float[2,3,4] x) => (float[3,4,1] y)
        <int64[1] start = {1}, int64[1] end = {2}, int64[1] axis = {0}>
        { t = Transpose<perm = [0, 2, 1]>(x)
          s = Slice(t, start, end, axis)
          y = Transpose<perm = [2, 1, 0]>(s) }""")
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    check_gradient(model, {"x": x}, ["x"], "y", eps=1.0)
