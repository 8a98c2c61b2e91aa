"""Training with loops in the model: what trains, memory, and derivatives of second order."""

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

import onnxtrain
from gradcheck import run
from onnxtrain.errors import MissingGradientError

HEADER = """
<ir_version: 10, opset_import: ["" : 18]>
model (float[b,8] x) => (float[b,8] y) <int64 n = {3}, bool yes = {1}> {
"""
STEP = "body = step (int64 i, bool go, float[b,8] a) => (bool on, float[b,8] o)"
WEIGHTS = {"w": (8, 8), "c": (8,), "ws": (3, 8, 8), "cs": (3, 8)}
MODELS = {
    "captured": (["w", "c"], f"""y = Loop (n, yes, x) <{STEP} {{
        on = Identity(go) p = MatMul(a, w) q = Add(p, c) o = Tanh(q) }}>"""),
    "one-for-each-step": (["ws", "cs"], f"""y = Loop (n, yes, x) <{STEP} {{
        on = Identity(go) wi = Gather(ws, i) ci = Gather(cs, i)
        p = MatMul(a, wi) q = Add(p, ci) o = Tanh(q) }}>"""),
    "scanned": (["ws", "cs"], """y = Scan<num_scan_inputs = 2,
        body = step (float[b,8] a, float[8,8] wi, float[8] ci) => (float[b,8] o) {
            p = MatMul(a, wi) q = Add(p, ci) o = Tanh(q) }>(x, ws, cs)"""),
    "carried": (["w"], """y, last = Loop (n, yes, x, w) <
        body = step (int64 i, bool go, float[b,8] a, float[8,8] k)
            => (bool on, float[b,8] o, float[8,8] l) {
            on = Identity(go) p = MatMul(a, k) o = Tanh(p) l = Identity(k) }>"""),
    "nested": (["w"], f"""y = Loop (n, yes, x) <{STEP} {{
        on = Identity(go)
        o = Loop (n, go, a) <body = inner (int64 j, bool go2, float[b,8] e)
            => (bool on2, float[b,8] f) {{
            on2 = Identity(go2) p = MatMul(e, w) f = Tanh(p) }}> }}>"""),
}  # fmt: skip


def model_of(name: str, inside: bool = False) -> onnx.ModelProto:
    names, text = MODELS[name]
    model = onnx.parser.parse_model(HEADER + text + "}")
    rng = np.random.default_rng(0)
    place = model.graph.node[0].attribute[0].g if inside else model.graph
    for weight in names:
        array = rng.standard_normal(WEIGHTS[weight]).astype(np.float32) / 2
        place.initializer.append(numpy_helper.from_array(array, weight))
    return model


def batch() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return tuple(rng.standard_normal((4, 8)).astype(np.float32) for _ in range(2))  # type: ignore


def losses(folder: Path, steps: int = 4) -> list[float]:
    session = onnxtrain.TrainingSession(folder)
    session.set_learning_rate(0.1)
    return [float(np.ravel(session.step(*batch())[0])[0]) for _ in range(steps)]


@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
@pytest.mark.parametrize("name", MODELS)
def test_weights_of_bodies_train_by_default(name: str, inside: bool, tmp_path: Path) -> None:
    if inside and name not in ("captured", "one-for-each-step"):
        pytest.skip("an input of the node, or of another body, is not inside of this one")
    onnxtrain.prepare(model_of(name, inside), tmp_path / "a", loss="mse", optimizer="sgd")
    session = onnxtrain.TrainingSession(tmp_path / "a")
    assert session.get_parameters_size() == sum(np.prod(WEIGHTS[w]) for w in MODELS[name][0])
    first, *_, last = losses(tmp_path / "a", 20)
    assert last < 0.9 * first
    session.export_model_for_inferencing(tmp_path / "y.onnx", ["y"])
    before, after = (run(m, {"x": batch()[0]})[0] for m in
                     (model_of(name, inside), onnx.load(tmp_path / "y.onnx")))  # fmt: skip
    np.testing.assert_allclose(before, after, atol=1e-6)


def test_a_memory_budget_computes_steps_again(tmp_path: Path) -> None:
    model, sizes = model_of("captured"), {"b": 512}
    model.graph.initializer[0].int64_data[0] = 30  # steps
    onnxtrain.prepare(
        model, tmp_path / "small", loss="mse", optimizer="sgd", memory_budget=0.6, sizes=sizes
    )
    onnxtrain.prepare(model, tmp_path / "large", loss="mse", optimizer="sgd")
    np.testing.assert_allclose(losses(tmp_path / "small"), losses(tmp_path / "large"), rtol=1e-5)

    def outputs(folder: str) -> int:
        graph = onnx.load(tmp_path / folder / "training_model.onnx").graph
        return next(len(node.output) for node in graph.node if node.op_type == "Loop")

    assert outputs("small") < outputs("large")


SECOND = """
<ir_version: 10, opset_import: ["" : 18]>
model (double[b,3] x, double[3,3] w, double[t,b,3] s, int64 n, bool yes) => (double y) {
    BODY
    y = ReduceSum<keepdims = 0>(z)
}
"""
TWICE = {
    "Loop": """z = Loop (n, yes, x) <
        body = step (int64 i, bool go, double[b,3] a) => (bool on, double[b,3] o) {
        on = Identity(go) r = Gather(s, i) p = MatMul(a, w) q = Mul(p, r) o = Tanh(q) }>""",
    "Scan": """z, all = Scan<num_scan_inputs = 1, scan_input_directions = [1],
        body = step (double[b,3] a, double[b,3] r) => (double[b,3] o, double[b,3] d) {
        p = MatMul(a, w) q = Mul(p, r) o = Tanh(q) d = Mul(o, o) }>(x, s)""",
}


@pytest.mark.parametrize("name", TWICE)
def test_a_gradient_of_a_gradient(name: str) -> None:
    model = onnx.parser.parse_model(SECOND.replace("BODY", TWICE[name]))
    rng = np.random.default_rng(0)
    shapes = {"x": (2, 3), "w": (3, 3), "s": (4, 2, 3)}
    feeds = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    feeds |= {"n": np.array(4), "yes": np.array(True)}
    first = onnxtrain.gradient(model, "w")
    given = {i.name for i in first.graph.input}
    second = onnxtrain.gradient(first, ["w", "x", "s"], of="w_grad")
    (seed,) = [i.name for i in second.graph.input if i.name not in given]
    ct = rng.standard_normal((3, 3))
    results = run(second, {**feeds, seed: ct})[-3:]
    for target, found in zip(("w", "x", "s"), results, strict=True):
        direction, eps = rng.standard_normal(feeds[target].shape), 1e-5
        ahead, behind = (
            run(first, {**feeds, target: feeds[target] + sign * eps * direction})[-1]
            for sign in (1, -1)
        )
        expected = np.sum(ct * (ahead - behind)) / (2 * eps)
        np.testing.assert_allclose(np.sum(found * direction), expected, rtol=1e-5)


def test_a_state_that_grows_has_no_second_gradient() -> None:
    grows = TWICE["Loop"].replace("o = Tanh(q)", "e = Tanh(q) o = Concat<axis = 0>(e, r)")
    text = SECOND.replace("BODY", grows.replace("q = Mul(p, r)", "q = Sin(p)"))
    model = onnx.parser.parse_model(text)
    first = onnxtrain.gradient(model, "w")
    with pytest.raises(MissingGradientError, match="SequenceAt"):
        onnxtrain.gradient(first, "w", of="w_grad")
