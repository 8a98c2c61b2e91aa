"""Random numbers in the bodies of If, Loop and Scan: both passes draw the same."""

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

import onnxtrain
from onnxtrain.errors import NotDifferentiableError
from onnxtrain.format.names import RANDOM_SEED
from onnxtrain.offline.training_graph import build_training_graphs

HEADER = """
<ir_version: 10, opset_import: ["" : 18]>
model (float[n,8] x, int64 t) => (float loss)
    <float[8] w = {{1.0, 0.9, 1.1, 1.2, 0.8, 1.0, 1.1, 0.9}}, float ratio = {{0.4}},
     bool yes = {{1}}> {{
    {body}
    loss = ReduceMean<keepdims = 0>(y)
}}
"""
LOOP = """y = Loop (t, yes, x) <
    body = step (int64 i, bool go, float[n,8] a) => (bool on, float[n,8] b) {{
    on = Identity(go) {} b = Mul(e, w) }}>"""
BODIES = {
    "dropout": LOOP.format("e = Dropout(a, ratio, yes)"),
    "normal": LOOP.format("z = RandomNormalLike(a) e = Mul(a, z)"),
    "nested": LOOP.format("""two = Constant<value_int = 2>()
        e = Loop (two, go, a) <body = inner (int64 j, bool go2, float[n,8] c)
            => (bool on2, float[n,8] d) { on2 = Identity(go2) d = Dropout(c, ratio, yes) }>"""),
    "scan": """pad = Constant<value_ints = [0]>() xs = Unsqueeze(x, pad)
        both = Concat<axis = 0>(xs, xs)
        y = Scan<num_scan_inputs = 1, body = step (float[n,8] a, float[n,8] r) => (float[n,8] b)
            { p = Mul(a, w) q = Dropout(p, ratio, yes) b = Add(q, r) }>(x, both)""",
    "branch": """y = If (yes2) <
        then_branch = a () => (float[n,8] b) { p = Dropout(x, ratio, yes) b = Mul(p, w) },
        else_branch = c () => (float[n,8] d) { d = Mul(x, w) }>""",
}  # fmt: skip


def model_of(name: str) -> onnx.ModelProto:
    text = HEADER.format(body=BODIES[name])
    if name == "branch":
        text = text.replace("int64 t)", "bool yes2)")
    return onnx.parser.parse_model(text)


@pytest.mark.parametrize("name", BODIES)
def test_training_draws_the_same_numbers_in_both_passes(name: str) -> None:
    train = build_training_graphs(model_of(name), ["loss"], ["w"]).training
    session = ort.InferenceSession(train.SerializeToString(), providers=["CPUExecutionProvider"])
    outputs = [o.name for o in session.get_outputs()]
    gradient = next(o for o in outputs if o.startswith("w_grad"))
    rng = np.random.default_rng(0)
    feeds = {
        "x": rng.uniform(1, 2, (16, 8)).astype(np.float32),
        "t": np.array(3),
        "yes2": np.array(True),
        "w": rng.uniform(0.8, 1.2, 8).astype(np.float32),
        "w_grad.accumulation.buffer": np.zeros(8, np.float32),
        "lazy_reset_grad": np.array([True]),
        RANDOM_SEED: np.array([7, 8], np.uint32),
    }
    names = {i.name for i in session.get_inputs()}

    def run(**changed: np.ndarray) -> dict[str, np.ndarray]:
        given = {k: v for k, v in {**feeds, **changed}.items() if k in names}
        return dict(zip(outputs, session.run(None, given), strict=True))

    first, direction, eps = run(), rng.standard_normal(8).astype(np.float32), 1e-2
    ahead, behind = (run(w=feeds["w"] + s * eps * direction)[outputs[0]] for s in (1, -1))
    slope = float(ahead - behind) / (2 * eps)
    found = float(first[gradient] @ direction)
    assert abs(slope - found) < 1e-2 * (np.linalg.norm(first[gradient]) + 1e-3)
    other = run(**{RANDOM_SEED: np.array([9, 8], np.uint32)})
    assert not np.array_equal(other[gradient], first[gradient])
    np.testing.assert_array_equal(run()[gradient], first[gradient])


def test_each_step_draws_its_own_numbers() -> None:
    drawing = """last, y = Loop (t, yes, x) <
        body = step (int64 i, bool go, float[n,8] a) => (bool on, float[n,8] b, float[n,8] e) {
        on = Identity(go) e = RandomNormalLike(a) b = Mul(a, w) }>
        z = ReduceMean<keepdims = 0>(last)"""
    given = onnx.parser.parse_model(HEADER.format(body=drawing).replace("0>(y)", "0>(last)"))
    train = build_training_graphs(given, ["loss", "y"], ["w"]).training
    session = ort.InferenceSession(train.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {
        "x": np.ones((500, 8), np.float32), "t": np.array(3), "w": np.ones(8, np.float32),
        "w_grad.accumulation.buffer": np.zeros(8, np.float32), "lazy_reset_grad": np.array([True]),
        RANDOM_SEED: np.array([1, 2], np.uint32),
    }  # fmt: skip
    drawn = session.run(["y"], feeds)[0].reshape(3, -1)
    assert np.all(np.abs(np.corrcoef(drawn) - np.eye(3)) < 0.05)
    assert np.all(np.abs(drawn.std(axis=1) - 1) < 0.05)


# ---- without a seed: the Loop gives what it drew -------------------------------------------------

DRAWN = {
    "normal": "z = RandomNormalLike(a) e = Mul(a, z)",
    "dropout": """e, mask = Dropout(a, ratio, yes) m = Cast<to = 1>(mask)
        one = Constant<value_float = 0.6>() z = Div(m, one)""",
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_gradient_sees_what_the_loop_drew(name: str) -> None:
    drawing = f"""last, y = Loop (t, yes, x) <
        body = step (int64 i, bool go, float[n,8] a) => (bool on, float[n,8] b, float[n,8] z) {{
        on = Identity(go) {DRAWN[name]} b = Mul(e, w) }}>"""
    text = HEADER.format(body=drawing).replace("0>(y)", "0>(last)")
    given = onnx.parser.parse_model(text.replace("(float loss)", "(float loss, float[k,n,8] y)"))
    model = onnxtrain.gradient(given, ["w", "x"], of="loss")
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.random.default_rng(0).uniform(1, 2, (4, 8)).astype(np.float32)
    loss, drawn, dw, dx = session.run(None, {"x": x, "t": np.array(3)})
    w = onnx.numpy_helper.to_array(given.graph.initializer[0])
    assert drawn.std() > 0.3
    factor = drawn.prod(axis=0) * w**3 / x.size
    np.testing.assert_allclose(loss, (x * factor).sum(), rtol=1e-4)
    np.testing.assert_allclose(dx, factor, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(dw, (x * factor).sum(axis=0) * 3 / w, rtol=1e-4, atol=1e-6)


def test_what_an_inner_loop_draws_is_refused_without_a_seed() -> None:
    with pytest.raises(NotDifferentiableError, match=r"Dropout.*outside of the Loop"):
        onnxtrain.gradient(model_of("nested"), "w")
