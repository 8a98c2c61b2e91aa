"""Loop: models in the text format of onnx, with static and symbolic sizes and several trip counts."""

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
MODELS = {
    "rnn": ("n,3", """{
        y = Loop (n, c, h) <body = step (int64 i, bool go, float[n,3] a) => (bool on, float[n,3] b) {
            on = Identity(go)
            row = Gather(x, i)
            p = MatMul(row, w) q = MatMul(a, w) r = Add(p, q) s = Add(r, v) b = Tanh(s) }>
    }"""),
    "captured-only": ("n,3", """{
        y = Loop (n, c, h) <body = step (int64 i, bool go, float[n,3] a) => (bool on, float[n,3] b) {
            on = Identity(go) m = MatMul(h, w) b = Mul(m, v) }>
    }"""),
}  # fmt: skip


def model_of(name: str, t: object, n: object) -> onnx.ModelProto:
    out, text = MODELS[name]
    whole = HEADER.format(t=t, n=n, out=out) + text
    if not isinstance(n, str):
        whole = whole.replace("[n,", f"[{n},").replace("[t,", f"[{t},")
    return onnx.parser.parse_model(whole)


def feeds_of(n: int, c: bool = True) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    shapes = {"x": (4, 2, 3), "w": (3, 3), "v": (3,), "h": (2, 3)}
    arrays = {k: rng.uniform(-1, 1, s).astype(np.float32) for k, s in shapes.items()}
    limit = np.array(1.5, np.float32)
    return {**arrays, "n": np.array(n), "c": np.array(c), "limit": limit}


@pytest.mark.parametrize("sizes", [(4, 2), ("t", "n")], ids=["static", "symbolic"])
@pytest.mark.parametrize("name", MODELS)
def test_gradient(name: str, sizes: tuple[object, object]) -> None:
    model = model_of(name, *sizes)
    used = {i for n in model.graph.node for a in n.attribute for m in a.g.node for i in m.input}
    used |= {i for n in model.graph.node for i in n.input}
    wrt = [v for v in ("x", "w", "v", "h") if v in used]
    for trips in (4, 1, 3, 0):
        check_gradient(model, feeds_of(trips), wrt, "y")
