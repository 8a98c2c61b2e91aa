"""Models that are not well formed: the error names the part that is wrong, and what is wrong."""

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, TensorProto, helper, numpy_helper

import onnxtrain
from graphs import linear, model, value
from onnxtrain.errors import ModelError, NotDifferentiableError, OnnxTrainError


def refusal(given: onnx.ModelProto, wrt: str = "x") -> str:
    with pytest.raises(ModelError) as caught:
        onnxtrain.gradient(given, wrt)
    assert caught.value.__cause__ is None, "foreseen"
    return str(caught.value)


def changed(change: Callable[[onnx.ModelProto], object]) -> onnx.ModelProto:
    given = linear()
    change(given)
    return given


def tensor(**fields: object) -> onnx.TensorProto:
    return onnx.TensorProto(name="w", **fields)


FLOAT, STRING, INT4 = TensorProto.FLOAT, TensorProto.STRING, TensorProto.INT4

TENSORS = {
    "short": (tensor(data_type=FLOAT, dims=[3, 2], raw_data=bytes(23)), "24"),
    "long": (tensor(data_type=FLOAT, dims=[3, 2], raw_data=bytes(28)), "24"),
    "no-data": (tensor(data_type=FLOAT, dims=[3, 2]), "holds 0"),
    "large-without-data": (tensor(data_type=FLOAT, dims=[3, 2**40]), "holds 0"),
    "twice": (
        tensor(data_type=FLOAT, dims=[3, 2], raw_data=bytes(24), float_data=[1.0] * 6),
        "raw_data and in float_data",
    ),
    "wrong-field": (tensor(data_type=FLOAT, dims=[2], int64_data=[1, 2]), "int64_data"),
    "negative": (tensor(data_type=FLOAT, dims=[-3, 2], raw_data=bytes(24)), "negative"),
    "no-type": (tensor(dims=[3, 2], raw_data=bytes(24)), "no element type"),
    "unknown-type": (tensor(data_type=99, dims=[3, 2], raw_data=bytes(24)), "99"),
    "raw-strings": (tensor(data_type=STRING, dims=[2], raw_data=bytes(24)), "STRING"),
    "odd-nibbles": (tensor(data_type=INT4, dims=[3], raw_data=bytes(1)), "needs 2"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_are_not_what_they_claim(name: str) -> None:
    wrong, words = TENSORS[name]
    message = refusal(changed(lambda m: m.graph.initializer[0].CopyFrom(wrong)))
    assert "'w'" in message and words in message, message
    given = linear()
    del given.graph.initializer[0]
    given.graph.node.insert(0, helper.make_node("Constant", [], ["w"], "weight", value=wrong))
    message = refusal(given)
    assert "'weight'" in message and words in message, message


def sparse(given: onnx.ModelProto) -> None:
    added = given.graph.sparse_initializer.add(dims=[4])
    added.values.CopyFrom(numpy_helper.from_array(np.ones(1, np.float32), "s"))
    added.indices.CopyFrom(numpy_helper.from_array(np.zeros(1, np.int64)))


def attribute(**fields: object) -> Callable[[onnx.ModelProto], object]:
    return lambda m: m.graph.node[3].attribute.append(AttributeProto(**fields))


def opset(domain: str, version: int) -> Callable[[onnx.ModelProto], object]:
    return lambda m: m.opset_import.append(helper.make_opsetid(domain, version))


def node(op: str, inputs: list[str], outputs: list[str]) -> Callable[[onnx.ModelProto], object]:
    return lambda m: m.graph.node.append(helper.make_node(op, inputs, outputs, "added"))


def set_name(field: str) -> Callable[[onnx.ModelProto], object]:
    return lambda m: setattr(getattr(m.graph, field)[0], "name", "")


STRUCTURE = {
    "sparse-initializer": (sparse, ["'s'", "sparse"]),
    "attribute-without-type": (attribute(name="axes"), ["'axes'", "'mean'", "no type"]),
    "attribute-without-name": (attribute(type=2, i=1), ["'mean'", "without a name"]),
    "attribute-twice": (attribute(name="keepdims", type=2, i=1), ["'keepdims'", "twice"]),
    "opset-twice": (opset("ai.onnx", 17), ["18", "17"]),
    "no-operator": (node("", ["x"], ["z"]), ["'added'", "op_type"]),
    "constant-without-value": (node("Constant", [], ["z"]), ["'added'", "0 attributes"]),
    "undefined-input": (node("Relu", ["ghost"], ["z"]), ["'added'", "'ghost'", "not there"]),
    "made-twice": (node("Relu", ["x"], ["h"]), ["two values 'h'", "'bias'", "'added'"]),
    "made-and-given": (node("Relu", ["x"], ["w"]), ["two values 'w'", "initializer"]),
    "cycle": (node("Relu", ["z"], ["z"]), ["cycle", "'added'"]),
    "input-twice": (lambda m: m.graph.input.append(value("x", [2])), ["two values 'x'"]),
    "initializer-twice": (
        lambda m: m.graph.initializer.append(m.graph.initializer[0]), ["two values 'w'"],
    ),
    "undefined-output": (lambda m: m.graph.output.append(value("o", [2])), ["'o'", "not there"]),
    "nameless-input": (set_name("input"), ["input", "no name"]),
    "nameless-output": (set_name("output"), ["output", "no name"]),
    "nameless-initializer": (set_name("initializer"), ["initializer", "no name"]),
    "default-of-another-type": (
        lambda m: m.graph.input.append(value("w", [3, 9])), ["'w'", "[3,9]", "[3, 2]"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STRUCTURE)
def test_structure(name: str) -> None:
    change, words = STRUCTURE[name]
    message = refusal(changed(change))
    for word in words:
        assert word in message, message


def branches(then_nodes: list[onnx.NodeProto]) -> onnx.ModelProto:
    then_branch = helper.make_graph(then_nodes, "then", [], [value("t", None)])
    else_branch = helper.make_graph(
        [helper.make_node("Exp", ["x"], ["e"])], "else", [], [value("e", None)]
    )
    return model(
        [helper.make_node("If", ["c"], ["y"], "if", then_branch=then_branch,
                          else_branch=else_branch)],
        [value("x", [2]), value("c", [], TensorProto.BOOL)],
        [value("y", [2])],
    )  # fmt: skip


def test_a_branch_that_uses_what_is_not_there() -> None:
    message = refusal(branches([helper.make_node("Sin", ["ghost"], ["t"], "sin")]))
    assert "'sin'" in message and "'ghost'" in message


def test_a_cycle_through_a_branch() -> None:
    assert "'if'" in refusal(branches([helper.make_node("Add", ["x", "y"], ["t"], "add")]))


def test_a_sparse_constant() -> None:
    values = numpy_helper.from_array(np.ones(1, np.float32))
    stored = helper.make_sparse_tensor(values, numpy_helper.from_array(np.array([1])), [2])
    given = model(
        [helper.make_node("Constant", [], ["k"], "constant", sparse_value=stored),
         helper.make_node("Mul", ["x", "k"], ["y"])],
        [value("x", [2])], [value("y", [2])],
    )  # fmt: skip
    message = refusal(given)
    assert "'constant'" in message and "sparse" in message


@pytest.mark.parametrize(
    ("op", "attributes", "words"),
    [
        ("Pad", {"mode": "mirror"}, "reflect"),
        ("Conv", {"auto_pad": "SAME"}, "SAME_UPPER"),
        ("Conv", {"group": 3}, "group=3"),
        ("Conv", {"group": 0}, "group=0"),
        ("Conv", {"kernel_shape": [2, 2]}, "kernel_shape=[2, 2]"),
        ("Conv", {"dilations": [9, 9]}, "do not fit"),
    ],
)
def test_attributes_that_onnx_does_not_check(op: str, attributes: dict, words: str) -> None:
    second = np.zeros(8, np.int64) if op == "Pad" else np.zeros((2, 2, 3, 3), np.float32)
    given = model(
        [helper.make_node(op, ["x", "w"], ["y"], "it", **attributes)],
        [value("x", [1, 2, 6, 6])],
        [value("y", None)],
        {"w": second},
    )
    message = refusal(given)
    assert "'it'" in message and words in message, message


def test_an_unforeseen_error_names_the_node() -> None:
    """onnx does not look at the weights of an LSTM."""
    given = model(
        [helper.make_node("LSTM", ["x", "w", "r"], ["y"], "layer", hidden_size=4)],
        [value("x", [5, 2, 3])],
        [value("y", None)],
        {"w": np.zeros((1, 16, 3), np.float32), "r": np.zeros(1, np.float32)},
    )
    with pytest.raises(ModelError, match=r"LSTM \(node 'layer'\).*'r' FLOAT\[1\]") as caught:
        onnxtrain.gradient(given, "x")
    assert caught.value.__cause__ is not None


def test_text_that_is_not_utf8() -> None:
    damaged = linear().SerializeToString().replace(b"product", b"pro\xffuct")
    with pytest.raises(OnnxTrainError):
        onnxtrain.gradient(onnx.ModelProto.FromString(damaged), "x")


@pytest.mark.parametrize("wrt", [None, 3, b"w", ["w", 3], [b"w"]])
def test_wrt_of_another_kind(wrt: object) -> None:
    with pytest.raises(OnnxTrainError, match="wrt is a name or a sequence of names"):
        onnxtrain.gradient(linear(), wrt)


@pytest.mark.parametrize("wrt", ["", [""], ["w", ""]])
def test_an_empty_name(wrt: object) -> None:
    with pytest.raises(OnnxTrainError, match="no value ''"):
        onnxtrain.gradient(linear(), wrt)


def test_other_arguments_of_another_kind() -> None:
    with pytest.raises(OnnxTrainError, match="of is the name of an output"):
        onnxtrain.gradient(linear(), "w", of=1)
    with pytest.raises(OnnxTrainError, match="straight_through is"):
        onnxtrain.gradient(linear(), "w", straight_through=None)
    with pytest.raises(OnnxTrainError, match="bn is"):
        onnxtrain.gradient(linear(), "w", bn="none")


@pytest.mark.parametrize("wrt", [("w", "b"), ["w", "b", "w"], dict.fromkeys("wb"), iter("wb")])
def test_names_come_in_any_collection(wrt: object) -> None:
    extended = onnxtrain.gradient(linear(), wrt)
    assert [o.name for o in extended.graph.output][2:] == ["w_grad", "b_grad"]


def test_a_set_of_names_has_an_order() -> None:
    extended = onnxtrain.gradient(linear(), {"x", "w", "b"})
    assert [o.name for o in extended.graph.output][2:] == ["b_grad", "w_grad", "x_grad"]


def test_what_is_an_output_without_being_computed() -> None:
    for name, shape in (("x", ["batch", 3]), ("w", [3, 2])):
        given = linear()
        given.graph.output.append(value(name, shape))
        for wrt, words in ((name, "itself"), ("b", "does not depend")):
            with pytest.raises(NotDifferentiableError, match=words):
                onnxtrain.gradient(given, wrt, of=name)
