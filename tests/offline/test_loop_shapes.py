"""The shapes of what a Loop carries from step to step."""

import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from onnxtrain.offline.frontend.canonical_model import canonical_model
from onnxtrain.offline.graph import infer

MODEL = """
<ir_version: 10, opset_import: ["" : 18]>
model (float[b,4] h, float[t,b,4] x, float[4,4] w, int64 n, bool c, float[1,4] one, float scalar)
    => (float[p,q] y)
{
    y = Loop (n, c, START) <
        body = step (int64 i, bool go, float[wrong,names] a) => (bool on, float[other,names2] o) {
        on = Identity(go) row = Gather(x, i) STEP }>
}
"""
CASES = {
    "kept": ("h", "p = MatMul(a, w) q = Add(p, row) o = Tanh(q)", "[b,4]"),
    "grows": ("h", "o = Concat<axis = 0>(a, row)", "[?,4]"),
    "widens-at-first": ("one", "o = Add(a, row)", "[?,4]"),
    "changes-its-rank": ("h", "o = Add(a, x)", "?"),
    "replaces-a-scalar": ("scalar", "o = Sin(x)", "?"),
    "either-branch": (
        "h",
        """z = ReduceSum<keepdims = 0>(a) zero = Constant<value_float = 0.0>() d = Less(z, zero)
        o = If (d) <
            then_branch = yes () => (float[k1,k2] e) { e = Sin(a) },
            else_branch = no () => (float[k3,k4] f) { f = Add(a, row) }>""",
        "[b,4]",
    ),
    "half-of-an-axis": (
        "h",
        """p = MatMul(a, w) s = Shape(p) k = Constant<value_ints = [1]>() d = Gather(s, k)
        two = Constant<value_ints = [2]>() half = Div(d, two) zero = Constant<value_ints = [0]>()
        first = Slice(p, zero, half, k) rest = Slice(p, half, d, k)
        o = Concat<axis = 1>(rest, first)""",
        "[b,4]",
    ),
    "inner-loop": (
        "h",
        """three = Constant<value_int = 3>()
        o = Loop (three, go, a) <body = inner (int64 j, bool go2, float[m1,m2] e)
            => (bool on2, float[m3,m4] f) { on2 = Identity(go2) g = MatMul(e, w) f = Add(g, row) }>
        """,
        "[b,4]",
    ),
}


def described(value: ir.Value) -> str:
    """Write a shape; sizes that nothing outside of the Loop has are open."""
    if value.shape is None:
        return "?"
    dims = [str(d) if isinstance(d, int) or d.value in ("b", "t") else "?" for d in value.shape]
    return f"[{','.join(dims)}]"


@pytest.mark.parametrize("name", CASES)
def test_state(name: str) -> None:
    start, step, expected = CASES[name]
    text = MODEL.replace("START", start).replace("STEP", step)
    if expected == "?":
        text = text.replace("float[p,q] y", "float y").replace("(float y)", "(float[p,q,r] y)")
    graph = canonical_model(onnx.parser.parse_model(text)).graph
    (loop,) = [node for node in graph if node.op_type == "Loop"]
    body = loop.attributes["body"].as_graph()
    assert described(body.inputs[2]) == expected
    assert described(loop.outputs[0]) != "[]"
    if expected != "?":
        assert described(loop.outputs[0]) == described(body.outputs[1]) == expected


def test_ranks_that_inference_drops_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def learn(graph: ir.Graph) -> bool:  # something each time, which contradicts what is declared
        calls.append(graph)
        assert len(calls) < 100
        return True

    monkeypatch.setattr(infer, "learn_ranks", learn)
    text = """<ir_version: 10, opset_import: ["" : 18]>
    model (float[b] x, int64[k] shape) => (float y) {
        r = Reshape(x, shape) y = ReduceSum<keepdims = 0>(r)
    }"""
    infer.infer_shapes(ir.serde.deserialize_model(onnx.parser.parse_model(text)))
    assert calls
