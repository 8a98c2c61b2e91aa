"""Models with functions of their own: calls are replaced by what they stand for."""

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from gradcheck import check_emitted, run
from graphs import model, value
from onnxtrain.errors import MissingGradientError, ModelError

node = helper.make_node
A = np.array([-1.0, 2.0], np.float32)


def function(
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    nodes: Sequence[onnx.NodeProto],
    *attributes: str,
    opset: int = 18,
    overload: str = "",
    **defaults: float,
) -> onnx.FunctionProto:
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("my", 1)]
    made = helper.make_function(
        "my", name, inputs, outputs, nodes, imports, attributes,
        [helper.make_attribute(key, default) for key, default in defaults.items()],
    )  # fmt: skip
    made.overload = overload
    return made


def call(name: str, inputs: Sequence[str], outputs: Sequence[str], **more: object):
    return node(name, inputs, outputs, domain="my", **more)


def calling(
    functions: Sequence[onnx.FunctionProto],
    nodes: Sequence[onnx.NodeProto],
    constants: dict[str, np.ndarray] | None = None,
) -> onnx.ModelProto:
    given = model(nodes, [value("x", [2])], [value("y", None)], constants, domains=["my"])
    given.functions.extend(functions)
    given.ir_version = 10
    return given


def gradient_of(given: onnx.ModelProto, runnable: bool = True) -> np.ndarray:
    """Return the gradient of the sum; the forward value has to be what it was."""
    before = given.SerializeToString(deterministic=True)
    extended = onnxtrain.gradient(given, "x")
    assert given.SerializeToString(deterministic=True) == before
    check_emitted(extended)
    y, dx = run(extended, {"x": A, "y_grad": np.ones(2, np.float32)})
    if runnable:
        np.testing.assert_allclose(y, run(given, {"x": A})[0], rtol=1e-6)
    return dx


def leaky() -> onnx.NodeProto:
    made = node("LeakyRelu", ["a"], ["z"])
    made.attribute.add(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT)
    return made


def sin(**more: object) -> onnx.FunctionProto:
    return function("F", ["a"], ["z"], [node("Sin", ["a"], ["z"])], **more)


def test_attributes() -> None:
    asked = function("F", ["a"], ["z"], [leaky()], "slope")
    np.testing.assert_allclose(
        gradient_of(calling([asked], [call("F", ["x"], ["y"], slope=0.5)])), [0.5, 1]
    )
    np.testing.assert_allclose(gradient_of(calling([asked], [call("F", ["x"], ["y"])])), [0.01, 1])
    default = function("F", ["a"], ["z"], [leaky()], slope=0.25)
    np.testing.assert_allclose(
        gradient_of(calling([default], [call("F", ["x"], ["y"])])), [0.25, 1]
    )
    np.testing.assert_allclose(
        gradient_of(calling([default], [call("F", ["x"], ["y"], slope=0.5)])), [0.5, 1]
    )


def test_overloads() -> None:
    other = function("F", ["a"], ["z"], [node("Exp", ["a"], ["z"])], overload="exp")
    given = calling([sin(overload="sin"), other], [call("F", ["x"], ["y"], overload="exp")])
    np.testing.assert_allclose(gradient_of(given), np.exp(A), rtol=1e-6)


def test_functions_that_call_functions_and_names_that_repeat() -> None:
    inner = function("I", ["a"], ["z"], [node("Sin", ["a"], ["t"]), node("Neg", ["t"], ["z"])])
    outer = function("F", ["a"], ["z"], [call("I", ["a"], ["t"]), call("I", ["t"], ["z"])])
    given = calling([inner, outer], [call("F", ["x"], ["t"]), node("Neg", ["t"], ["y"])])
    expected = -np.cos(np.sin(A)) * np.cos(A)
    np.testing.assert_allclose(gradient_of(given), expected, rtol=1e-5)


def branch(name: str, nodes: Sequence[onnx.NodeProto]) -> onnx.GraphProto:
    return helper.make_graph(nodes, name, [], [value(nodes[-1].output[0], None)])


def test_a_name_inside_that_a_later_branch_has_too() -> None:
    """The body is written where the branch sees it, so the names must differ."""
    made = function("F", ["a"], ["z"], [node("Sin", ["a"], ["t"]), node("Neg", ["t"], ["z"])])
    then_branch = branch("then", [node("Neg", ["q"], ["t"])])
    else_branch = branch("else", [node("Exp", ["q"], ["e"])])
    given = calling(
        [made],
        [call("F", ["x"], ["q"]), node("ReduceSum", ["x"], ["s"], keepdims=0),
         node("Cast", ["s"], ["c"], to=TensorProto.BOOL),
         node("If", ["c"], ["y"], then_branch=then_branch, else_branch=else_branch)],
    )  # fmt: skip
    np.testing.assert_allclose(gradient_of(given), np.cos(A), rtol=1e-6)


def test_branches_and_constants_inside() -> None:
    weight = numpy_helper.from_array(np.array([2, 3], np.float32))
    made = function(
        "F", ["a"], ["z"],
        [node("Constant", [], ["k"], value=weight), node("ReduceSum", ["a"], ["s"], keepdims=0),
         node("Cast", ["s"], ["c"], to=TensorProto.BOOL),
         node("If", ["c"], ["z"], then_branch=branch("then", [node("Mul", ["a", "k"], ["t"])]),
              else_branch=branch("else", [call("G", ["a"], ["e"])]))],
    )  # fmt: skip
    other = function("G", ["a"], ["z"], [node("Exp", ["a"], ["z"])])
    given = calling([made, other], [call("F", ["x"], ["q"]), call("F", ["q"], ["y"])])
    np.testing.assert_allclose(gradient_of(given), [4, 9], rtol=1e-6)


def test_what_is_handed_through_keeps_the_names_of_the_model() -> None:
    through = function("F", ["a"], ["a", "z"], [node("Sin", ["a"], ["z"])])
    given = calling([through], [call("F", ["x"], ["y", "q"])])
    np.testing.assert_allclose(gradient_of(given, runnable=False), [1, 1])


def test_optional_inputs_and_outputs() -> None:
    clip = function("F", ["a", "low", "high"], ["z"], [node("Clip", ["a", "low", "high"], ["z"])])
    np.testing.assert_array_equal(gradient_of(calling([clip], [call("F", ["x"], ["y"])])), [1, 1])
    given = calling([clip], [call("F", ["x", "", "h"], ["y"])], {"h": np.array(1, np.float32)})
    np.testing.assert_array_equal(gradient_of(given), [1, 0])
    both = function("F", ["a"], ["z", "u"], [node("Sin", ["a"], ["z"]), node("Neg", ["a"], ["u"])])
    np.testing.assert_array_equal(
        gradient_of(calling([both], [call("F", ["x"], ["", "y"])])), [-1, -1]
    )
    np.testing.assert_allclose(
        gradient_of(calling([both], [call("F", ["x"], ["y"])]), runnable=False),
        np.cos(A),
        rtol=1e-6,
    )


def test_another_opset_inside() -> None:
    given = calling([sin(opset=17)], [call("F", ["x"], ["y"])])
    np.testing.assert_allclose(gradient_of(given), np.cos(A), rtol=1e-6)
    sums = function("F", ["a"], ["z"], [node("ReduceMax", ["a"], ["z"])], opset=13)
    with pytest.raises(ModelError, match=r"ReduceMax.*version 13.*version 18"):
        onnxtrain.gradient(calling([sums], [call("F", ["x"], ["y"])]), "x")


def test_functions_that_multiply() -> None:
    """Forty functions, each of which calls the one before twice."""
    functions = [function("F0", ["a"], ["z"], [node("Sin", ["a"], ["z"])])]
    for level in range(1, 40):
        twice = [call(f"F{level - 1}", ["a"], ["t"]), call(f"F{level - 1}", ["t"], ["z"])]
        functions.append(function(f"F{level}", ["a"], ["z"], twice))
    with pytest.raises(ModelError, match="549,755,813,888"):
        onnxtrain.gradient(calling(functions, [call("F39", ["x"], ["y"])]), "x")


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        ([function("F", ["a"], ["z"], [call("F", ["a"], ["z"])])], "recursive"),
        ([sin(), function("H", [], ["z"], [node("Sin", ["b"], ["z"])])], "'b'"),
        ([function("F", ["a"], ["u"], [node("Sin", ["a"], ["z"])])], "'u'"),
        ([function("F", [], ["z"], [node("Constant", [], ["z"], value_float=1.0)])], "1 inputs"),
        ([function("F", ["a"], [], [])], "1 outputs"),
    ],
    ids=["recursive", "undefined", "undefined-output", "inputs", "outputs"],
)
def test_refused(functions: Sequence[onnx.FunctionProto], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        onnxtrain.gradient(calling(functions, [call("F", ["x"], ["y"])]), "x")


def test_a_function_that_is_missing() -> None:
    with pytest.raises(MissingGradientError, match=r"my\.Gone"):
        onnxtrain.gradient(calling([sin()], [call("Gone", ["x"], ["y"])]), "x")
