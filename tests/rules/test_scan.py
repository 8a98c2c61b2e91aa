"""Scan: in all directions and along all axes, in models in the text format of onnx."""

import numpy as np
import onnx
import onnx.parser
import pytest

import onnxtrain
from gradcheck import check_gradient
from onnxtrain.errors import NotDifferentiableError

ALSO_TESTED = ("Scan",)  # by whole models, not by Specs
# Inputs of every model: x of shape (4, 2, 3), z (2, 4), w (3, 3), h (2, 3).
HEADER = """
<ir_version: 10, opset_import: ["" : 18]>
model (float[{t},{n},3] x, float[{n},{t}] z, float[3,3] w, float[{n},3] h) => (float[{out}] y)
"""
STEP = """body = step (float[n,3] a, float[n,3] row, float[n] s) => (float[n,3] b, float[n,3] d) {
    axes = Constant<value_ints = [1]>() factor = Unsqueeze(s, axes)
    p = MatMul(row, w) q = MatMul(a, w) r = Add(p, q) e = Tanh(r) b = Mul(e, factor) d = Mul(b, row)
}"""
MODELS = {
    "both-outputs": ("t,n,3", """{
        last, all = Scan<num_scan_inputs = 2, scan_input_axes = [0, 1], STEP>(h, x, z)
        y = Mul(last, all)
    }"""),
    "last-state-alone": ("n,3", """{
        y, all = Scan<num_scan_inputs = 2, scan_input_axes = [0, -1], STEP>(h, x, z)
    }"""),
    "backwards": ("t,n,3", """{
        last, all = Scan<num_scan_inputs = 2, scan_input_axes = [0, 1],
            scan_input_directions = [1, 0], scan_output_directions = [1], STEP>(h, x, z)
        y = Mul(last, all)
    }"""),
    "all-backwards": ("t,n,3", """{
        last, y = Scan<num_scan_inputs = 2, scan_input_axes = [0, 1],
            scan_input_directions = [1, 1], STEP>(h, x, z)
    }"""),
    "stacks-along-the-middle": ("n,t,3", """{
        last, y = Scan<num_scan_inputs = 2, scan_input_axes = [0, 1], scan_output_axes = [1], STEP>
            (h, x, z)
    }"""),
    "stacks-along-the-last": ("n,3,t", """{
        last, y = Scan<num_scan_inputs = 2, scan_input_axes = [0, 1], scan_output_axes = [-1],
            scan_output_directions = [1], STEP>(h, x, z)
    }"""),
    "no-state": ("t,n,3", """{
        y = Scan<num_scan_inputs = 1, body = step (float[n,3] row) => (float[n,3] d) {
            p = MatMul(row, w) q = Sin(p) d = Mul(q, h) }>(x)
    }"""),
    "two-states": ("n,3", """{
        p, q, all = Scan<num_scan_inputs = 1,
            body = step (float[n,3] a, float[3,3] m, float[n,3] row)
                => (float[n,3] b, float[3,3] o, float[n,3] d) {
            e = MatMul(row, m) b = Add(a, e) o = MatMul(m, w) d = Mul(b, b) }>(h, w, x)
        axes = Constant<value_ints = [0]>()
        r = ReduceSum<keepdims = 0>(all, axes)
        s = MatMul(p, q)
        y = Mul(r, s)
    }"""),
    "scans-weights": ("n,3", """{
        y = Scan<num_scan_inputs = 1, body = step (float[n,3] a, float[n,3] m) => (float[n,3] b) {
            p = Mul(a, m) b = Sin(p) }>(h, x)
    }"""),
    "loop-inside": ("n,3", """{
        two = Constant<value_int = 2>()
        y = Scan<num_scan_inputs = 1, body = step (float[n,3] a, float[n,3] row) => (float[n,3] b) {
            b = Loop (two, , a) <body = inner (int64 i, bool go, float[n,3] e)
                => (bool on, float[n,3] f) {
                on = Identity(go) m = MatMul(e, w) f = Mul(m, row) }> }>(h, x)
    }"""),
    "in-a-scan": ("n,3", """{
        y = Scan<num_scan_inputs = 1, body = step (float[n,3] a, float[n,3] row) => (float[n,3] b) {
            b, ignored = Scan<num_scan_inputs = 1, scan_input_directions = [1],
                body = inner (float[n,3] e, float[n,3] k) => (float[n,3] f, float[n,3] g) {
                m = MatMul(e, w) o = Mul(m, row) f = Mul(o, k) g = Add(f, k) }>(a, x) }>(h, x)
    }"""),
}  # fmt: skip


def model_of(name: str, t: object, n: object, double: bool = False) -> onnx.ModelProto:
    out, text = MODELS[name]
    whole = HEADER.replace("{out}", out) + text.replace("STEP", STEP)
    whole = whole.replace("{t}", str(t)).replace("{n}", str(n))
    if not isinstance(n, str):
        for size, symbol in ((n, "n"), (t, "t")):
            for before, after in ("[,", "[]", ",,", ",]"):
                whole = whole.replace(f"{before}{symbol}{after}", f"{before}{size}{after}")
    return onnx.parser.parse_model(whole.replace("float", "double") if double else whole)


def feeds_of(dtype: type) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    shapes = {"x": (4, 2, 3), "z": (2, 4), "w": (3, 3), "h": (2, 3)}
    return {k: rng.uniform(-1, 1, s).astype(dtype) for k, s in shapes.items()}


NOT_USED = {"no-state": "z", "two-states": "z", "scans-weights": "zw", "loop-inside": "z",
            "in-a-scan": "z"}  # fmt: skip


def wrt_of(name: str) -> list[str]:
    return [v for v in ("x", "z", "w", "h") if v not in NOT_USED.get(name, "")]


@pytest.mark.parametrize("sizes", [(4, 2), ("t", "n")], ids=["static", "symbolic"])
@pytest.mark.parametrize("name", MODELS)
def test_gradient(name: str, sizes: tuple[object, object]) -> None:
    check_gradient(model_of(name, *sizes), feeds_of(np.float32), wrt_of(name), "y")


@pytest.mark.parametrize("name", MODELS)
def test_gradient_in_double_precision(name: str) -> None:
    model = model_of(name, "t", "n", double=True)
    check_gradient(model, feeds_of(np.float64), wrt_of(name), "y", eps=1e-5, rtol=1e-7)


SCAN_8 = """
<ir_version: 4, opset_import: ["" : 8]>
model (float[4,2] h, float[4,5,2] x) => (float[4,2] y, float[4,5,2] z) {
    y, z = Scan<num_scan_inputs = 1, directions = [1],
        body = step (float[2] a, float[2] e) => (float[2] b, float[2] d) {
            p = Mul(a, e) b = Add(p, e) d = Mul(b, a) }>( , h, x)
}
"""


@pytest.mark.parametrize("of", ["y", "z"])
def test_the_first_scan_ran_over_a_batch(of: str) -> None:
    rng = np.random.default_rng(0)
    feeds = {"h": rng.uniform(-1, 1, (4, 2)), "x": rng.uniform(-1, 1, (4, 5, 2))}
    single = {name: array.astype(np.float32) for name, array in feeds.items()}
    check_gradient(onnx.parser.parse_model(SCAN_8), single, ["h", "x"], of)


def test_a_state_that_an_output_does_not_depend_on_has_no_gradient() -> None:
    text = (
        HEADER.replace("{out}", "2,3").format(t=4, n=2)
        + """{
        y, other = Scan<num_scan_inputs = 1,
            body = step (float[2,3] a, float[3,3] m, float[2,3] row)
                => (float[2,3] b, float[3,3] o) { b = Mul(a, row) o = MatMul(m, m) }>(h, w, x)
    }"""
    )
    with pytest.raises(NotDifferentiableError, match="'w'"):
        onnxtrain.gradient(onnx.parser.parse_model(text), ["w"])
