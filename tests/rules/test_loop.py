"""Loop: models in the text format of onnx, of static and symbolic sizes, with few and no steps."""

import re
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from gradcheck import check_gradient

# Inputs of every model: x of shape (4, 2, 3), w (3, 3), v (3), h (2, 3), the trip count n, the
# condition c and a limit.
ALSO_TESTED = ("Loop",)  # by whole models, not by Specs
HEADER = """
<ir_version: 10, opset_import: ["" : 18]>
model (float[{t},{n},3] x, float[3,3] w, float[3] v, float[{n},3] h, int64 n, bool c, float limit)
    => (float[{out}] y)
"""
STEP = "body = step (int64 i, bool go, float[n,3] a) => (bool on, float[n,3] b)"
MODELS = {
    "rnn": ("n,3", """{
        y = Loop (n, c, h) <STEP {
            on = Identity(go)
            row = Gather(x, i)
            p = MatMul(row, w) q = MatMul(a, w) r = Add(p, q) s = Add(r, v) b = Tanh(s) }>
    }"""),
    "no-condition": ("n,3", """{
        y = Loop (n, , h) <STEP { on = Identity(go) m = MatMul(a, w) b = Sin(m) }>
    }"""),
    "no-trip-count": ("n,3", """{
        y = Loop ( , c, h) <STEP {
            m = MatMul(a, w) b = Sin(m) one = Constant<value_int = 1>() j = Add(i, one)
            on = Less(j, n) }>
    }"""),
    "ends-early": ("n,3", """{
        y, all = Loop (n, c, h) <
            body = step (int64 i, bool go, float[n,3] a) => (bool on, float[n,3] b, float[n,3] d) {
            row = Gather(x, i) d = Mul(row, v) b = Add(a, d)
            size = ReduceSumSquare<keepdims = 0>(b) on = Less(size, limit) }>
    }"""),
    "collects": ("k,n,3", """{
        last, y = Loop (n, c, h) <
            body = step (int64 i, bool go, float[n,3] a) => (bool on, float[n,3] b, float[n,3] d) {
            on = Identity(go) row = Gather(x, i) m = MatMul(a, w) b = Mul(m, row) d = Mul(b, b) }>
    }"""),
    "collects-and-carries": ("k,n,3", """{
        last, all = Loop (n, c, h) <
            body = step (int64 i, bool go, float[n,3] a) => (bool on, float[n,3] b, float[n,3] d) {
            on = Identity(go) row = Gather(x, i) m = MatMul(a, w) b = Mul(m, row) d = Mul(b, v) }>
        y = Mul(last, all)
    }"""),
    "no-state": ("k,n,3", """{
        y = Loop (n, c) <body = step (int64 i, bool go) => (bool on, float[n,3] d) {
            on = Identity(go) row = Gather(x, i) m = MatMul(row, w) d = Mul(m, h) }>
    }"""),
    "two-states-that-swap": ("n,3", """{
        p, q = Loop (n, c, h, h) <
            body = step (int64 i, bool go, float[n,3] a, float[n,3] b)
                => (bool on, float[n,3] e, float[n,3] f) {
            on = Identity(go) e = Mul(b, v) f = MatMul(a, w) }>
        y = Mul(p, q)
    }"""),
    "counts": ("n,3", """{
        zero = Constant<value_int = 0>()
        y, last = Loop (n, c, h, zero) <
            body = step (int64 i, bool go, float[n,3] a, int64 k)
                => (bool on, float[n,3] b, int64 l) {
            on = Identity(go) row = Gather(x, k) factor = Cast<to = 1>(i) m = Mul(row, factor)
            q = MatMul(a, w) b = Add(q, m) one = Constant<value_int = 1>() l = Add(k, one) }>
    }"""),
    "keeps-a-state": ("n,3", """{
        p, q = Loop (n, c, h, v) <
            body = step (int64 i, bool go, float[n,3] a, float[3] k)
                => (bool on, float[n,3] b, float[3] l) {
            on = Identity(go) b = Mul(a, k) l = Identity(k) }>
        y = Mul(p, q)
    }"""),
    "forgets-a-state": ("n,3", """{
        y = Loop (n, c, h) <STEP { on = Identity(go) row = Gather(x, i) b = Mul(row, v) }>
    }"""),
    "a-weight-is-a-state": ("3,3", """{
        y = Loop (n, c, w) <
            body = step (int64 i, bool go, float[3,3] a) => (bool on, float[3,3] b) {
            on = Identity(go) m = MatMul(a, w) d = Mul(m, v) b = Tanh(d) }>
    }"""),
    "returns-captured": ("n,3", """{
        m = MatMul(h, w)
        y = Loop (n, c, h) <STEP { on = Identity(go) b = Identity(m) }>
    }"""),
    "another-axis": ("4,3", """{
        zero = Constant<value_int = 0>()
        start = Gather<axis = 1>(x, zero)
        two = Constant<value_int = 2>()
        less = Min(n, two)
        y = Loop (less, c, start) <
            body = step (int64 i, bool go, float[t,3] a) => (bool on, float[t,3] b) {
            on = Identity(go) row = Gather<axis = 1>(x, i) m = MatMul(row, w) b = Mul(a, m) }>
    }"""),
    "looks-up": ("n,3", """{
        y = Loop (n, c, h) <STEP {
            on = Identity(go) three = Constant<value_ints = [3, 3]>() j = Mod(i, three)
            rows = Gather(w, j) m = Mul(a, rows) b = Add(m, v) }>
    }"""),
    "gemm": ("n,3", """{
        y = Loop (n, c, h) <STEP {
            on = Identity(go) m = Gemm<alpha = 0.5, beta = 2.0, transB = 1>(a, w, v) b = Sin(m) }>
    }"""),
    "branches": ("n,3", """{
        y = Loop (n, c, h) <STEP {
            on = Identity(go) two = Constant<value_int = 2>() r = Mod(i, two)
            odd = Cast<to = 9>(r) row = Gather(x, i)
            b = If (odd) <
                then_branch = yes () => (float[n,3] p) { q = MatMul(a, w) p = Mul(q, row) },
                else_branch = no () => (float[n,3] p) { q = Add(row, v) p = Mul(q, a) }> }>
    }"""),
    "in-a-branch": ("n,3", """{
        y = If (c) <
            then_branch = yes () => (float[n,3] p) {
                p = Loop (n, c, h) <STEP { on = Identity(go) m = MatMul(a, w) b = Sin(m) }> },
            else_branch = no () => (float[n,3] p) { p = Mul(h, v) }>
    }"""),
    "nested": ("n,3", """{
        y = Loop (n, c, h) <STEP {
            on = Identity(go) row = Gather(x, i) one = Constant<value_int = 1>() k = Add(i, one)
            e = Loop (k, go, a) <
                body = inner (int64 j, bool go2, float[n,3] f) => (bool on2, float[n,3] g) {
                on2 = Identity(go2) m = MatMul(f, w) o = Mul(m, row) g = Add(o, a) }>
            b = Mul(e, v) }>
    }"""),
    "nested-and-collected": ("n,3", """{
        y = Loop (n, c, h) <STEP {
            on = Identity(go) three = Constant<value_int = 3>()
            e, all = Loop (three, go, a) <
                body = inner (int64 j, bool go2, float[n,3] f)
                    => (bool on2, float[n,3] g, float[n,3] d) {
                on2 = Identity(go2) m = MatMul(f, w) g = Tanh(m) d = Mul(f, v) }>
            axes = Constant<value_ints = [0]>()
            sum = ReduceSum<keepdims = 0>(all, axes)
            b = Add(e, sum) }>
    }"""),
    "scan-inside": ("n,3", """{
        y = Loop (n, c, h) <STEP {
            on = Identity(go)
            b = Scan<num_scan_inputs = 1,
                body = inner (float[n,3] f, float[n,3] r) => (float[n,3] g) {
                m = MatMul(f, w) o = Mul(m, r) g = Add(o, a) }>(a, x) }>
    }"""),
    "grows": ("k,3", """{
        y = Loop (n, c, h) <STEP {
            on = Identity(go) row = Gather(x, i) m = MatMul(a, w) s = Sin(m)
            b = Concat<axis = 0>(s, row) }>
    }"""),
    "grows-and-collects": ("k,3", """{
        p, all = Loop (n, c, h) <
            body = step (int64 i, bool go, float[m,3] a) => (bool on, float[k,3] b, float[3] d) {
            on = Identity(go) row = Gather(x, i) m = MatMul(a, w) s = Sin(m)
            b = Concat<axis = 0>(s, row) axes = Constant<value_ints = [0]>()
            d = ReduceSum<keepdims = 0>(b, axes) }>
        axes0 = Constant<value_ints = [0]>()
        sum = ReduceSum<keepdims = 0>(all, axes0)
        y = Mul(p, sum)
    }"""),
    "shrinks": ("k,n,3", """{
        y = Loop (n, c, x) <
            body = step (int64 i, bool go, float[k,n,3] a) => (bool on, float[l,n,3] b) {
            on = Identity(go) one = Constant<value_ints = [1]>() end = Constant<value_ints = [99]>()
            zero = Constant<value_ints = [0]>() rest = Slice(a, one, end, zero)
            m = MatMul(rest, w) b = Tanh(m) }>
    }"""),
    "widens-at-first": ("n,3", """{
        axes = Constant<value_ints = [0]>()
        v2 = Unsqueeze(v, axes)
        y = Loop (n, c, v2) <
            body = step (int64 i, bool go, float[k,3] a) => (bool on, float[l,3] b) {
            on = Identity(go) row = Gather(x, i) m = MatMul(a, w) s = Add(m, row) b = Tanh(s) }>
    }"""),
}  # fmt: skip


# onnxruntime makes the open sizes of a stack zero where there was no step.
NEEDS_A_STEP = ("collects-and-carries",)


def model_of(name: str, t: object, n: object, double: bool = False) -> onnx.ModelProto:
    """Parse a model; `t` and `n` are the first two sizes of x, numbers or symbols."""
    out, text = MODELS[name]
    whole = HEADER.format(t=t, n=n, out=out) + text.replace("STEP", STEP)
    if not isinstance(n, str):
        whole = whole.replace("[n,", f"[{n},").replace("[t,", f"[{t},")
    if double:
        whole = whole.replace("float", "double").replace("to = 1>", "to = 11>")
    return onnx.parser.parse_model(whole)


def feeds_of(n: int, c: bool = True, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    shapes = {"x": (4, 2, 3), "w": (3, 3), "v": (3,), "h": (2, 3)}
    arrays = {k: rng.uniform(-1, 1, s).astype(dtype) for k, s in shapes.items()}
    return {**arrays, "n": np.array(n), "c": np.array(c), "limit": np.array(1.5, dtype)}


def used_inputs(model: onnx.ModelProto) -> list[str]:
    text = onnx.printer.to_text(model).split("=>", 1)[1]
    return [name for name in ("x", "w", "v", "h") if re.search(rf"[(,] *{name}[,)]", text)]


@pytest.mark.parametrize("sizes", [(4, 2), ("t", "n")], ids=["static", "symbolic"])
@pytest.mark.parametrize("name", MODELS)
def test_gradient(name: str, sizes: tuple[object, object]) -> None:
    model = model_of(name, *sizes)
    for trips in (4, 1) if name in NEEDS_A_STEP else (4, 1, 0):
        check_gradient(model, feeds_of(trips), used_inputs(model), "y")


@pytest.mark.parametrize("name", MODELS)
def test_gradient_in_double_precision(name: str) -> None:
    model = model_of(name, "t", "n", double=True)
    feeds = feeds_of(3, dtype=np.float64)
    check_gradient(model, feeds, used_inputs(model), "y", eps=1e-5, rtol=1e-7)


def test_a_condition_that_is_false_from_the_start() -> None:
    model = model_of("rnn", "t", "n")
    check_gradient(model, feeds_of(4, c=False), ["h"], "y")


def test_a_count_and_a_condition_that_are_vectors() -> None:
    text = HEADER.format(t="t", n="n", out="n,3") + MODELS["rnn"][1].replace("STEP", STEP)
    text = text.replace("int64 n, bool c", "int64[1] n, bool[1] c")
    model = onnx.parser.parse_model(
        text.replace("bool go", "bool[1] go").replace("bool on", "bool[1] on")
    )
    feeds = {**feeds_of(3), "n": np.array([3]), "c": np.array([True])}
    check_gradient(model, feeds, ["x", "w", "v", "h"], "y")


def test_the_number_of_a_step_as_a_vector() -> None:
    text = HEADER.format(t="t", n="n", out="n,3") + MODELS["ends-early"][1]
    text = text.replace("int64 i", "int64[1] i").replace(
        "row = Gather(x, i)",
        """
        rows = Gather(x, i) zero = Constant<value_ints = [0]>() row = Squeeze(rows, zero)""",
    )
    model = onnx.parser.parse_model(text)
    check_gradient(model, feeds_of(3), ["x", "v", "h"], "y")
