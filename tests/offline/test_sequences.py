"""Sequences of tensors, as torch's exporters write split, chunk, unbind and stack."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import onnxtrain
from gradcheck import check_gradient
from graphs import model, value
from onnxtrain.errors import MissingGradientError

node = helper.make_node
X = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
I = {str(i): np.array(i) for i in range(-1, 4)}  # noqa: E741


def of_parts(
    split: onnx.NodeProto, first: str, second: str, dims=("rows", "columns"), **constants
) -> onnx.ModelProto:
    """y = a * a + 2 b for two elements of a sequence."""
    return model(
        [
            split,
            node("SequenceAt", ["parts", first], ["a"]),
            node("SequenceAt", ["parts", second], ["b"]),
            node("Mul", ["a", "a"], ["aa"]),
            node("Sum", ["aa", "b", "b"], ["y"]),
        ],
        [value("x", dims)],
        [value("y", None)],
        {**I, **constants},
    )


def split_to_sequence(*sizes: str, **attributes: int) -> onnx.NodeProto:
    return node("SplitToSequence", ["x", *sizes], ["parts"], **attributes)


CASES = {
    "sizes": of_parts(split_to_sequence("sizes", axis=1), "0", "2", sizes=np.array([2, 2, 2])),
    "width": of_parts(split_to_sequence("2", axis=1), "-1", "0", dims=("rows", 6)),
    "width-symbolic": of_parts(split_to_sequence("2", axis=1), "2", "0"),
    "ones": of_parts(split_to_sequence(), "-1", "0", dims=(4, "columns")),
    "ones-symbolic": of_parts(split_to_sequence(axis=1), "3", "0"),
    "unbind": of_parts(split_to_sequence(axis=-1, keepdims=0), "-1", "1", dims=("rows", 6)),
    "unbind-symbolic": of_parts(split_to_sequence(axis=1, keepdims=0), "-1", "1"),
    "listed": of_parts(node("SequenceConstruct", ["x", "c", "x"], ["parts"]), "2", "1", c=2 * X),
}


@pytest.mark.parametrize("name", CASES)
def test_elements_that_are_known(name: str) -> None:
    extended = check_gradient(CASES[name], {"x": X}, ["x"], "y")
    assert not any("Sequence" in n.op_type for n in extended.graph.node)


def test_a_width_that_run_time_tells() -> None:
    given = of_parts(split_to_sequence("width", axis=1), "0", "1")
    given.graph.input.append(value("width", [], TensorProto.INT64))
    check_gradient(given, {"x": X, "width": np.array(3)}, ["x"], "y")


@pytest.mark.parametrize(("first", "second"), [("0", "1"), ("-1", "1")])
def test_sizes_that_run_time_tells(first: str, second: str) -> None:
    given = of_parts(split_to_sequence("sizes", axis=1), first, second)
    given.graph.input.append(value("sizes", ["count"], TensorProto.INT64))
    check_gradient(given, {"x": X, "sizes": np.array([2, 2, 2])}, ["x"], "y")


def test_parts_of_known_sizes_are_one_split() -> None:
    """Its gradient is one Concat; that of slices would be a Pad for each."""
    extended = onnxtrain.gradient(CASES["sizes"], "x")
    operators = [n.op_type for n in extended.graph.node]
    assert operators.count("Split") == 1
    assert "Slice" not in operators


@pytest.mark.parametrize("new_axis", [0, 1])
def test_concatenated_again(new_axis: int) -> None:
    given = model(
        [
            node("SequenceEmpty", [], ["none"]),
            node("SequenceInsert", ["none", "x"], ["one"]),
            node("Mul", ["x", "x"], ["xx"]),
            node("SequenceInsert", ["one", "xx", "0"], ["two"]),
            node("ConcatFromSequence", ["two"], ["y"], axis=1, new_axis=new_axis),
        ],
        [value("x", ["rows", 6])],
        [value("y", None)],
        I,
    )
    check_gradient(given, {"x": X}, ["x"], "y")


def test_mapped_by_a_body() -> None:
    """As the dynamo exporter writes vstack: what has too few axes gains one."""
    reshape = helper.make_graph(
        [node("Reshape", ["t", "row"], ["reshaped"])], "then", [], [value("reshaped", None)]
    )
    keep = helper.make_graph(
        [node("Identity", ["t"], ["same"], "keep")], "else", [], [value("same", None)]
    )
    body = helper.make_graph(
        [
            node("Shape", ["t"], ["shape"], "count"),
            node("Size", ["shape"], ["rank"]),
            node("CastLike", ["1", "rank"], ["one"]),
            node("LessOrEqual", ["rank", "one"], ["few"]),
            node("If", ["few"], ["made"], then_branch=reshape, else_branch=keep),
        ],
        "body", [value("t", None)], [value("made", None)],
    )  # fmt: skip
    given = model(
        [
            node("ReduceSum", ["x", "0v"], ["m"], keepdims=0),
            node("SequenceConstruct", ["x", "m"], ["list"]),
            node("SequenceMap", ["list"], ["rows"], "map", body=body),
            node("SequenceAt", ["rows", "0"], ["a"]),
            node("SequenceAt", ["rows", "1"], ["b"]),
            node("Concat", ["a", "b"], ["y"], axis=0),
        ],
        [value("x", ["rows", 6])],
        [value("y", None)],
        {**I, "row": np.array([1, -1]), "0v": np.array([0])},
    )
    extended = check_gradient(given, {"x": X}, ["x"], "y")
    assert not {"If", "SequenceMap"} & {n.op_type for n in extended.graph.node}


def test_the_length_is_a_number() -> None:
    given = model(
        [
            split_to_sequence("2", axis=1),
            node("SequenceLength", ["parts"], ["count"]),
            node("Cast", ["count"], ["number"], to=TensorProto.FLOAT),
            node("Mul", ["x", "number"], ["y"]),
        ],
        [value("x", ["rows", 6])],
        [value("y", ["rows", 6])],
        I,
    )
    check_gradient(given, {"x": X}, ["x"], "y")


def test_an_index_that_run_time_tells_is_refused() -> None:
    given = of_parts(split_to_sequence("2", axis=1), "index", "0")
    given.graph.input.append(value("index", [], TensorProto.INT64))
    with pytest.raises(MissingGradientError, match="SequenceAt"):
        onnxtrain.gradient(given, "x")
