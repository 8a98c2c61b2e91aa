"""Ranks that are known only once sizes are folded, or from the form of an operator."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from finite_differences import engine, miss
from gradcheck import vjp

# Graphs from x, and from integers, to y. Each reads a rank that onnx alone does not infer.
GRAPHS = {
    "concat-behind-a-slice-with-computed-bounds": """
        n = Shape<start=1, end=2>(x)
        two = Constant<value_ints=[2]>()
        half = Div(n, two)
        start = Constant<value_ints=[0]>()
        axes = Constant<value_ints=[1]>()
        low = Slice(x, start, half, axes)
        high = Slice(x, half, n, axes)
        minus = Neg(high)
        y = Concat<axis=-1>(minus, low)
    """,
    "slice-with-axes-at-run-time": """
        a = Slice(x, k, m, k)
        b = Concat<axis=0>(a, a)
        y = Relu(b)
    """,
    "split-with-computed-sizes": """
        n = Shape<start=1, end=2>(x)
        rest = Sub(n, m)
        parts = Concat<axis=0>(m, rest)
        a, b = Split<axis=1>(x, parts)
        c = Concat<axis=-1>(b, a)
        d = Constant<value_ints=[1]>()
        y = ReduceL2<keepdims=0>(c, d)
    """,
    "reshape-to-a-computed-shape": """
        n = Shape<start=0, end=1>(x)
        w = Shape<start=1, end=2>(x)
        two = Constant<value_ints=[2]>()
        half = Div(w, two)
        shape = Concat<axis=0>(n, half, two)
        r = Reshape(x, shape)
        t = Transpose<perm=[0, 2, 1]>(r)
        y = Softmax<axis=-1>(t)
    """,
    "tile-and-expand-at-run-time": """
        one = Constant<value_ints=[1]>()
        repeats = Concat<axis=0>(m, one)
        t = Tile(x, repeats)
        wide = Concat<axis=0>(m, one, one)
        e = Expand(t, wide)
        y = Concat<axis=1>(e, e)
    """,
    "squeeze-whose-rank-a-transpose-tells": """
        one = Constant<value_ints=[1]>()
        u = Unsqueeze(x, one)
        s = Squeeze(u)
        t = Transpose<perm=[1, 0]>(s)
        y = Concat<axis=0>(t, t)
    """,
    "range-of-vectors-of-one-element": """
        zero = Constant<value_ints=[0]>()
        one = Constant<value_ints=[1]>()
        n = Shape<start=1, end=2>(x)
        r = Range(zero, n, one)
        f = Cast<to=1>(r)
        y = Mul(x, f)
    """,
}


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("name", GRAPHS)
def test_gradient(name: str, symbolic: bool) -> None:
    dims = "a, b" if symbolic else "3, 4"
    text = f"""
        <ir_version: 10, opset_import: ["" : 18]>
        agraph (float[{dims}] x, int64[1] k, int64[1] m) => (float[] y) {{
            {GRAPHS[name]}
        }}
    """
    model = onnx.parser.parse_model(text)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    feeds = {
        "x": np.random.default_rng(0).uniform(0.5, 1.5, (3, 4)).astype(np.float32),
        "k": np.array([1], np.int64),
        "m": np.array([3], np.int64),
    }
    run = engine(model, feeds)
    y = run(feeds, "y")
    ct = np.random.default_rng(1).standard_normal(y.shape).astype(np.float32)
    (found,) = vjp(model, feeds, ["x"], ct)
    assert miss(run, feeds, "y", {"x": found}, ct, y) <= 1
