"""A user's own operator: the example of docs/add-a-rule.md is executed as it stands there."""

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

import onnxtrain
from graphs import model, value
from onnxtrain.errors import MissingGradientError, OnnxTrainError
from onnxtrain.offline.autodiff import registry, rule, zero_gradient

PAGE = Path(__file__).parents[2] / "docs" / "add-a-rule.md"


class SquarePlus(OpRun):
    op_domain = "my.company"

    def _run(self, x, b=None):
        return ((x + np.sqrt(x * x + (4.0 if b is None else b))) / 2,)


@pytest.fixture(autouse=True)
def _forget_registrations():
    before = {key: list(rules) for key, rules in registry._rules.items()}
    zeros = dict(registry._zero)
    yield
    registry._rules.clear()
    registry._rules.update(before)
    registry._zero.clear()
    registry._zero.update(zeros)


def own_operator(name: str = "SquarePlus") -> onnx.ModelProto:
    made = model(
        [
            helper.make_node(name, ["x"], ["h"], "own", domain="my.company", b=2.0),
            helper.make_node("Mul", ["h", "w"], ["y"], "scale"),
        ],
        [value("x", ["n", 3])],
        [value("y", ["n", 3])],
        {"w": np.array([1, 2, 3], np.float32)},
        domains=["my.company"],
    )
    made.graph.value_info.append(value("h", ["n", 3]))
    return made


def test_without_a_rule_it_is_an_error() -> None:
    with pytest.raises(MissingGradientError, match=r"my\.company\.SquarePlus"):
        onnxtrain.gradient(own_operator(), "x")


def test_off_the_path_it_needs_no_rule() -> None:
    extended = onnxtrain.gradient(own_operator(), "w")
    assert {o.domain for o in extended.opset_import} == {"", "my.company"}


def test_the_example_of_the_page() -> None:
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    exec(code.group(1), {})
    extended = onnxtrain.gradient(own_operator(), ["x", "w"])
    evaluator = ReferenceEvaluator(extended, new_ops=[SquarePlus])
    x = np.linspace(-2, 2, 6, dtype=np.float32).reshape(2, 3)
    ct = np.arange(6, dtype=np.float32).reshape(2, 3)
    y, dx, dw = evaluator.run(None, {"x": x, "y_grad": ct})
    h = (x + np.sqrt(x * x + 2)) / 2
    w = np.array([1, 2, 3], np.float32)
    np.testing.assert_allclose(y, h * w, rtol=1e-6)
    np.testing.assert_allclose(dx, ct * w * (1 + x / np.sqrt(x * x + 2)) / 2, rtol=1e-5)
    np.testing.assert_allclose(dw, (ct * h).sum(0), rtol=1e-5)
    own = [n for n in extended.graph.node if n.domain == "my.company"]
    assert len(own) == 1, "only the forward node is of the user's domain"


def test_a_declared_zero() -> None:
    zero_gradient("Bucketize", domain="my.company", reason="piecewise constant")
    extended = onnxtrain.gradient(own_operator("Bucketize"), "x")
    assert "Expand" in {n.op_type for n in extended.graph.node}


def test_straight_through_an_own_operator() -> None:
    extended = onnxtrain.gradient(own_operator(), "x", straight_through=["my.company.SquarePlus"])
    evaluator = ReferenceEvaluator(extended, new_ops=[SquarePlus])
    x, ct = np.ones((1, 3), np.float32), np.ones((1, 3), np.float32)
    np.testing.assert_array_equal(evaluator.run(None, {"x": x, "y_grad": ct})[1], [[1, 2, 3]])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda op, node, dy: (op.Cast(dy, to=11),), "DOUBLE"),
        (lambda op, node, dy: (op.ReduceSum(dy, [1], keepdims=0),), "shape"),
        (lambda op, node, dy: (dy, dy), "2 cotangents for the 1 inputs"),
    ],
    ids=["type", "shape", "number"],
)
def test_a_rule_that_breaks_its_promise_is_found_out(wrong, words: str) -> None:
    rule("SquarePlus", domain="my.company")(wrong)
    with pytest.raises(OnnxTrainError, match=words):
        onnxtrain.gradient(own_operator(), "x")


@pytest.mark.parametrize(
    ("since", "expected"), [({}, 5.0), ({"since": 18}, 5.0), ({"since": 19}, None)]
)
def test_an_own_rule_goes_before_the_built_in_one(since: dict, expected: float | None) -> None:
    given = model(
        [helper.make_node("LayerNormalization", ["x", "scale"], ["y"], "norm")],
        [value("x", [2, 3])],
        [value("y", [2, 3])],
        {"scale": np.ones(3, np.float32)},
    )
    built_in = onnxtrain.gradient(given, "x")
    rule("LayerNormalization", **since)(lambda op, node, dy: (dy * 5.0, None))
    feeds = {"x": np.eye(2, 3, dtype=np.float32), "y_grad": np.ones((2, 3), np.float32)}
    found = ReferenceEvaluator(onnxtrain.gradient(given, "x")).run(None, feeds)[1]
    if expected is None:  # it covers newer opsets than that of the model
        np.testing.assert_array_equal(found, ReferenceEvaluator(built_in).run(None, feeds)[1])
    else:
        np.testing.assert_array_equal(found, np.full((2, 3), expected))


def test_the_rule_registered_last_covers_every_opset_from_its_since_on() -> None:
    @rule("Own", domain="my.company", since=3)
    @rule("Own", domain="my.company")
    def first(op, node, dy):
        return (dy,)

    @rule("Own", domain="my.company", since=2)
    def second(op, node, dy):
        return (dy,)

    found = [registry.lookup("Own", "my.company", opset) for opset in (1, 2, 3, 4)]
    assert [r and r.function for r in found] == [first, second, second, second]
