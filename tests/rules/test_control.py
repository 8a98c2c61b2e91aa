"""If: models in the text format of onnx, each checked with the condition true and false."""

import numpy as np
import onnx
import onnx.parser
import pytest

import onnxtrain
from gradcheck import check_emitted, check_gradient
from onnxtrain.errors import MissingGradientError, NotDifferentiableError

# Inputs of every model: x and w of shape (2, 3), the conditions c and d, and v of shape (3).
ALSO_TESTED = ("If",)  # by whole models, not by Specs
HEADER = """
<ir_version: 10, opset_import: ["" : 18]>
model (float[{n},3] x, float[{n},3] w, float[3] v, bool c, bool d) => (float[{out}] y)
"""

MODELS = {
    "both-use-all": """{
        y = If (c) <
            then_branch = yes () => (float[n,3] p) { q = Mul(x, w) p = Tanh(q) },
            else_branch = no () => (float[n,3] p) { q = Add(x, w) r = Mul(q, q) p = Mul(r, v) }>
    }""",
    "each-uses-its-own": """{
        y = If (c) <
            then_branch = yes () => (float[n,3] p) { p = Mul(x, v) },
            else_branch = no () => (float[n,3] p) { p = Exp(w) }>
    }""",
    "within-a-chain": """{
        a = Mul(x, w)
        b = If (c) <
            then_branch = yes () => (float[n,3] p) { q = Sin(a) p = Mul(q, x) },
            else_branch = no () => (float[n,3] p) { p = Mul(a, a) }>
        e = Mul(b, a)
        y = Mul(e, v)
    }""",
    "returns-outer-value": """{
        a = Mul(x, w)
        b = If (c) <
            then_branch = yes () => (float[n,3] p) { p = Identity(a) },
            else_branch = no () => (float[n,3] p) { p = Mul(x, v) }>
        y = Mul(b, b)
    }""",
    "returns-constant": """{
        a = If (c) <
            then_branch = yes () => (float[3] p) { p = Constant<value_floats = [1.0, 2.0, 3.0]>() },
            else_branch = no () => (float[3] p) { p = Mul(v, v) }>
        b = Mul(x, w)
        y = Mul(a, b)
    }""",
    "nested": """{
        y = If (c) <
            then_branch = yes () => (float[n,3] p) {
                a = Mul(x, w)
                p = If (d) <
                    then_branch = yes_yes () => (float[n,3] q) { r = Mul(a, x) q = Tanh(r) },
                    else_branch = yes_no () => (float[n,3] q) { q = Mul(a, v) }>
            },
            else_branch = no () => (float[n,3] p) {
                b = If (d) <
                    then_branch = no_yes () => (float[n,3] q) { q = Sin(x) },
                    else_branch = no_no () => (float[n,3] q) { q = Mul(w, v) }>
                e = Mul(b, w)
                p = Mul(e, v)
            }>
    }""",
    "several-outputs": """{
        a, b, i = If (c) <
            then_branch = yes () => (float[n,3] p, float[n,3] q, int64[2] s) {
                p = Mul(x, w) q = Mul(p, v) s = Shape(x) },
            else_branch = no () => (float[n,3] p, float[n,3] q, int64[2] t) {
                q = Exp(x) p = Mul(q, w) t = Shape(w) }>
        e = Reshape(b, i)
        y = Mul(a, e)
    }""",
    "one-output-unused": """{
        y, b = If (c) <
            then_branch = yes () => (float[n,3] p, float[n,3] q) { p = Mul(x, w) q = Mul(p, v) },
            else_branch = no () => (float[n,3] p, float[n,3] q) { q = Exp(x) p = Mul(w, v) }>
    }""",
    "one-value-twice": """{
        a, b = If (c) <
            then_branch = yes () => (float[n,3] p, float[n,3] q) {
                r = Mul(x, w) p = Identity(r) q = Identity(r) },
            else_branch = no () => (float[n,3] p, float[n,3] q) { q = Exp(x) p = Mul(w, v) }>
        y = Mul(a, b)
    }""",
    "shapes-differ": """{
        y = If (c) <
            then_branch = yes () => (float[k,3] p) { q = Mul(x, w) p = Concat<axis = 0>(q, x) },
            else_branch = no () => (float[n,3] p) { p = Mul(w, v) }>
    }""",
    "ranks-differ": """{
        axes = Constant<value_ints = [0]>()
        a = If (c) <
            then_branch = yes () => (float[n,3] p) { p = Mul(x, w) },
            else_branch = no () => (float[1,n,3] p) { q = Mul(w, v) p = Unsqueeze(q, axes) }>
        b = Exp(a)
        y = Sin(b)
    }""",
    "initializer-inside": """{
        y = If (c) <
            then_branch = yes () => (float[n,3] p)
                <float[3] k = {1.0, -2.0, 3.0}> { q = Mul(x, w) p = Mul(q, k) },
            else_branch = no () => (float[n,3] p)
                <float[3] k2 = {3.0, 2.0, 1.0}> { p = Mul(w, k2) }>
    }""",
    "returns-initializer": """{
        a = If (c) <
            then_branch = yes () => (float[3] k) <float[3] k = {1.0, -2.0, 3.0}> { },
            else_branch = no () => (float[3] p) { p = Mul(v, v) }>
        b = Mul(x, w)
        y = Mul(a, b)
    }""",
    "dropout-out-of-training": """{
        y = If (c) <
            then_branch = yes () => (float[n,3] p) <float r = {0.5}, bool t = {0}>
                { q = Dropout(x, r, t) p = Mul(q, w) },
            else_branch = no () => (float[n,3] p) { p = Mul(x, v) }>
    }""",
    "shape-only-in-one": """{
        y = If (c) <
            then_branch = yes () => (float[n,3] p) { s = Shape(w) p = Expand(v, s) },
            else_branch = no () => (float[n,3] p) { p = Mul(x, x) }>
    }""",
}  # fmt: skip
NOT_USED = {"initializer-inside": "v", "shape-only-in-one": "w"}
OPEN_SHAPES = {"shapes-differ": "m,3", "ranks-differ": None}


def model_of(name: str, n: object) -> onnx.ModelProto:
    """Parse a model; `n` is the size of the first axis, a number or a symbol."""
    out = OPEN_SHAPES.get(name, f"{n},3")
    header = HEADER.format(n=n, out=out)
    if out is None:
        header = header.replace("[None]", "")
    model = onnx.parser.parse_model(header + MODELS[name].replace("[n,", f"[{n},"))
    return model


def feeds_of(c: bool, d: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    x, w, v = (rng.uniform(-1, 1, s).astype(np.float32) for s in ((2, 3), (2, 3), (3,)))
    return {"x": x, "w": w, "v": v, "c": np.array(c), "d": np.array(d)}


@pytest.mark.parametrize("n", [2, "n"], ids=["static", "symbolic"])
@pytest.mark.parametrize("c", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_gradient(name: str, c: bool, n: object) -> None:
    model = model_of(name, n)
    wrt = [v for v in ("x", "w", "v") if v not in NOT_USED.get(name, "")]
    for d in (True, False) if name == "nested" else (True,):
        check_gradient(model, feeds_of(c, d), wrt, "y")


def test_what_a_branch_uses_for_its_shape_alone_has_no_gradient() -> None:
    model = model_of("shape-only-in-one", 2)
    with pytest.raises(NotDifferentiableError, match="'w'"):
        onnxtrain.gradient(model, "w")


def gradient_nodes(model: onnx.ModelProto) -> dict[str, list[str]]:
    """Return the operators in the two branches of the If that was added."""
    (added,) = [n for n in model.graph.node if n.op_type == "If"][1:]
    return {a.name: [n.op_type for n in a.g.node] for a in added.attribute}


def test_branches_hold_nothing_that_the_gradient_does_not_need() -> None:
    branches = gradient_nodes(onnxtrain.gradient(model_of("one-output-unused", 2), ["x"]))
    guard = ["IsNaN", "Equal", "And", "Where"]  # w is fed, and may be infinite
    assert branches == {"then_branch": ["Mul", *guard], "else_branch": ["Expand"]}


MISSING = """{
    y = If (c) <
        then_branch = yes () => (float[2,3] p) <float[2,3] q, float[3] r, float[2,3] s> {
            [first] q = Unknown(x)
            [unneeded] r = Unknown(v)
            s = Mul(q, r)
            p = If (d) <
                then_branch = inner () => (float[2,3] t) { [second] t = Unknown(s) },
                else_branch = other () => (float[2,3] t) { t = Neg(s) }>
        },
        else_branch = no () => (float[2,3] p) { p = Mul(w, v) }>
}"""


def test_operators_without_rule_are_listed_from_all_branches() -> None:
    header = HEADER.format(n=2, out="2,3").replace('"" : 18', '"" : 18, "custom" : 1')
    text = header + MISSING.replace("Unknown", "custom.Unknown")
    with pytest.raises(MissingGradientError) as caught:
        onnxtrain.gradient(onnx.parser.parse_model(text), ["x"])
    assert [item.node for item in caught.value.missing] == ["first", "second"]


RANDOM = """{
    y = If (c) <
        then_branch = yes () => (float[2,3] p) {
            q = RandomNormalLike(x)
            p = %s(x, q)
        },
        else_branch = no () => (float[2,3] p) { p = Mul(w, x) }>
}"""


def test_random_numbers_that_the_gradient_needs_are_refused() -> None:
    header = HEADER.format(n=2, out="2,3")
    noise_added = onnx.parser.parse_model(header + RANDOM % "Add")
    check_emitted(onnxtrain.gradient(noise_added, ["x"]))
    noise_multiplied = onnx.parser.parse_model(header + RANDOM % "Mul")
    with pytest.raises(NotDifferentiableError, match="RandomNormalLike"):
        onnxtrain.gradient(noise_multiplied, ["x"])
