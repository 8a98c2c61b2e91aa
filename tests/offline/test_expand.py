"""Expansion by definition: operators whose rules are taken away are differentiated all the same."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import onnxtrain
import onnxtrain.offline.autodiff.rules  # registers the rules
from gradcheck import Spec, check_gradient, check_spec, ids
from onnxtrain.errors import MissingGradientError
from onnxtrain.offline.autodiff import registry

NORM = [(2, 3, 4), (4,), (4,)]
SPECS = [
    Spec("Mish", [(2, 3)]),
    Spec("Mish", [(2, 3)], opset=22, id="opset22"),
    Spec("HardSwish", [(2, 3)], away_from=(-3, 3)),
    # second opinion: not defined for float64
    Spec("Celu", [(2, 3)], {"alpha": 0.7}, away_from=(0,), second_opinion=False),
    Spec("Softplus", [(2, 3)]),
    Spec("Softplus", [(2, 3)], opset=26, id="opset26"),
    # second opinion: the evaluator rounds to float32
    Spec("Gelu", [(2, 3)], opset=20, second_opinion=False),
    Spec("Gelu", [(2, 3)], {"approximate": "tanh"}, opset=20, id="tanh"),
    Spec("Swish", [(2, 3)], {"alpha": 0.7}, opset=24),
    Spec("Softmax", [(2, 3)], {"axis": 0}),
    Spec("LogSoftmax", [(2, 3)], opset=26),
    Spec("LayerNormalization", NORM, {"epsilon": 0.1}),
    # second opinion: the mean is float32
    Spec("LayerNormalization", [(2, 3, 4), (3, 4), (3, 4)], {"axis": 1, "epsilon": 0.1},
         outputs=2, of=1, wrt=[0], id="mean", second_opinion=False),
    Spec("RMSNormalization", NORM[:2], {"epsilon": 0.1}, opset=23),
    # second opinion: the operator computes in float32
    Spec("GroupNormalization", [(2, 6, 4), (6,), (6,)], {"num_groups": 3, "epsilon": 0.1},
         opset=21, second_opinion=False),
    Spec("PRelu", [(2, 3), (3,)], away_from=(0,)),
    Spec("Elu", [(2, 3)], away_from=(0,)),
    Spec("Selu", [(2, 3)], away_from=(0,)),
    Spec("HardSigmoid", [(2, 3)]),
    Spec("LeakyRelu", [(2, 3)], away_from=(0,)),
    Spec("ThresholdedRelu", [(2, 3)], {"alpha": 0.5}, away_from=(0.5,)),
    Spec("Softsign", [(2, 3)], away_from=(0,)),
    Spec("Relu", [(2, 3)], away_from=(0,)),
    Spec("Clip", [(2, 3), None, np.array(0.5, np.float32)], wrt=[0], away_from=(0.5,),
         id="without-min"),
    Spec("ReduceL1", [(2, 3), np.array([1])], constants=[1], away_from=(0,)),
    Spec("ReduceL2", [(2, 3), np.array([1])], {"keepdims": 0}, constants=[1]),
    Spec("ReduceLogSumExp", [(2, 3)]),
    Spec("ReduceSumSquare", [(2, 3)]),
    Spec("Shrink", [(2, 3)], {"lambd": 0.5, "bias": 0.2}, away_from=(-0.5, 0.5)),
    Spec("NegativeLogLikelihoodLoss", [(4, 3), np.array([0, 2, 1, 1])]),
    Spec("SoftmaxCrossEntropyLoss", [(4, 3), np.array([0, 2, 1, 1])]),
    Spec("CenterCropPad", [(4, 5), np.array([6, 3])], constants=[1], symbolic=False),
    Spec("DepthToSpace", [(1, 8, 2, 3)], {"blocksize": 2}, opset=18),
    Spec("SpaceToDepth", [(1, 2, 4, 6)], {"blocksize": 2}, opset=18),
]  # fmt: skip
SPECS = [
    Spec(**{**spec.__dict__, "expanded": True})
    for spec in SPECS
    if onnx.defs.get_schema(spec.op, spec.opset).has_function
    or onnx.defs.get_schema(spec.op, spec.opset).has_context_dependent_function
]


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict]:
    """The registered rules, to take some away for the time of a test."""
    copy = dict(registry._rules)
    monkeypatch.setattr(registry, "_rules", copy)
    yield copy


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_gradient_by_definition(spec: Spec, symbolic: bool, rules: dict) -> None:
    if symbolic and not spec.symbolic:
        pytest.skip("the definition of the operator needs static shapes")
    rules.pop(("", spec.op), None)
    check_spec(spec, symbolic)
    assert registry.lookup(spec.op, "", spec.opset) is None


def test_definitions_are_expanded_in_turn(rules: dict) -> None:
    for op in ("Mish", "Softplus"):
        rules.pop(("", op))
    check_spec(Spec("Mish", [(2, 3)], expanded=True))


def parsed(text: str, opset: int = 18) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> {text}')


MIDDLE = parsed(
    "g (float[2, 3] x) => (float[2, 3] y, float[2, 3] m) "
    "{ a = Exp (x) m = Mish (a) s = Softmax (m) y = Mul (s, m) }"
)
BRANCH = parsed(
    "g (bool c, float[2, 3] x) => (float[2, 3] y) { y = If (c) <"
    "then_branch = t () => (float[2, 3] a) { a = Mish (x) },"
    "else_branch = e () => (float[2, 3] b) { b = Softmax (x) }> }"
)


def test_values_inside_a_model_keep_their_names(rules: dict) -> None:
    del rules["", "Mish"], rules["", "Softmax"]
    x = {"x": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)}
    for wrt in (["x"], ["m"], ["a", "m"]):
        model = onnxtrain.gradient(MIDDLE, wrt, of="y")
        assert [o.name for o in model.graph.output] == ["y", "m", *(f"{n}_grad" for n in wrt)]
        session = ort.InferenceSession(model.SerializeToString())
        actual = session.run(None, {**x, "y_grad": np.ones((2, 3), np.float32)})
        rules.update(_ALL)
        ruled = onnxtrain.gradient(MIDDLE, wrt, of="y")
        session = ort.InferenceSession(ruled.SerializeToString())
        wanted = session.run(None, {**x, "y_grad": np.ones((2, 3), np.float32)})
        del rules["", "Mish"], rules["", "Softmax"]
        for a, w in zip(actual, wanted, strict=True):
            np.testing.assert_allclose(a, w, rtol=1e-4, atol=1e-6)


_ALL = dict(registry._rules)


@pytest.mark.parametrize("taken", [True, False])
def test_branches_are_expanded(taken: bool, rules: dict) -> None:
    del rules["", "Mish"], rules["", "Softmax"]
    feeds = {"c": np.array(taken), "x": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)}
    model = onnxtrain.gradient(BRANCH, ["x"], of="y")
    run = ort.InferenceSession(model.SerializeToString()).run
    ct = np.arange(6, dtype=np.float32).reshape(2, 3)
    dx = run(["x_grad"], {**feeds, "y_grad": ct})[0]
    step, t = 1e-2, np.cos(feeds["x"] * 7)
    y = [run(["y"], {**feeds, "x": feeds["x"] + s * t, "y_grad": ct})[0] for s in (step, -step)]
    assert (dx * t).sum() == pytest.approx(((y[0] - y[1]) * ct).sum() / (2 * step), rel=1e-2)


def test_what_is_refused_is_not_expanded(rules: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    del rules["", "Mish"]
    monkeypatch.setitem(registry._refused, ("", "Mish"), "for the sake of the test")
    with pytest.raises(MissingGradientError, match="for the sake of the test"):
        onnxtrain.gradient(MIDDLE, ["x"], of="y")


def test_straight_through_comes_before_a_definition(rules: dict) -> None:
    del rules["", "Mish"]
    model = onnxtrain.gradient(MIDDLE, ["a"], of="m", straight_through=["Mish"])
    assert "Mish" in {n.op_type for n in model.graph.node}


def test_no_constant_of_a_definition_is_computed_at_run_time(rules: dict) -> None:
    del rules["", "RMSNormalization"]
    text = "g (float[2, 3] x, float[3] s) => (float[2, 3] y) { y = RMSNormalization (x, s) }"
    model = check_gradient(
        parsed(text, 23),
        {"x": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3), "s": np.ones(3, np.float32)},
        ["x", "s"], "y",
    )  # fmt: skip
    assert not {"Shape", "Size", "Range"} & {n.op_type for n in model.graph.node}
