"""`replace_classifier` on models without an ordinary last layer: a new one, or an error of ours."""

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, TensorProto, helper, numpy_helper

import onnxtrain
from graphs import model, value
from onnxtrain.errors import ModelError, OnnxTrainError

node = helper.make_node
X, Y = value("x", ["n", 3]), value("y", ["n", 2])
W = {"w": np.ones((3, 2), np.float32)}
INT64, STRING = TensorProto.INT64, TensorProto.STRING


def layer(op: str = "MatMul", weight: object = None, **attributes: object) -> onnx.ModelProto:
    weight = W["w"] if weight is None else weight
    return model([node(op, ["x", "w"], ["y"], "layer", **attributes)], [X], [Y], {"w": weight})


def in_branch() -> onnx.ModelProto:
    branches = {
        name: helper.make_graph(
            [node("MatMul", ["x", "w"], [name])], name, [], [value(name, ["n", 2])]
        )
        for name in ("then_branch", "else_branch")
    }
    return model([node("If", ["c"], ["y"], **branches)], [X, value("c", [], 9)], [Y], W)


def shared() -> onnx.ModelProto:
    nodes = [
        node("MatMul", ["x", "w"], ["h"]), node("MatMul", ["h", "v"], ["g"]),
        node("MatMul", ["g", "w"], ["y"]),
    ]  # fmt: skip
    return model(nodes, [X], [Y, value("h", ["n", 2])], {**W, "v": np.ones((2, 3), np.float32)})


def wrong_attribute(name: str, kind: int, **content: object) -> onnx.ModelProto:
    made = layer("Gemm")
    made.graph.node[0].attribute.append(AttributeProto(name=name, type=kind, **content))
    return made


def behind(*nodes: onnx.NodeProto, **arrays: object) -> onnx.ModelProto:
    first = node("MatMul", ["x", "w"], ["h"], "layer")
    return model([first, *nodes], [X], [value("y", None)], {**W, **arrays})


def without_name() -> onnx.ModelProto:
    made = layer()
    data = made.SerializeToString().replace(b"layer", b"\xff\xfe\xc0\x80l")
    return onnx.ModelProto.FromString(data)


def convolution(**attributes: object) -> onnx.ModelProto:
    return model(
        [node("Conv", ["x", "w"], ["y"], **attributes)],
        [value("x", ["n", 4, 5, 5])], [value("y", None)], {"w": np.ones((4, 4, 1, 1), np.float32)},
    )  # fmt: skip


ODD: dict[str, Callable[[], onnx.ModelProto]] = {
    "no-nodes": lambda: model([], [X], [X]),
    "empty": onnx.ModelProto,
    "constant-output": lambda: model([], [X], [value("w", [3, 2])], W),
    "weights-alone": lambda: model([node("MatMul", ["v", "w"], ["y"])], [X], [Y], {
        **W, "v": np.ones((4, 3), np.float32)}),
    "no-inputs": lambda: model([node("MatMul", ["w", "w"], ["y"])], [], [Y], {
        "w": np.ones((2, 2), np.float32)}),
    "twice-the-output": lambda: model([node("MatMul", ["x", "w"], ["y"])], [X], [Y, Y], W),
    "integers": lambda: model([node("MatMul", ["x", "w"], ["y"])], [value("x", ["n", 3], INT64)],
        [value("y", ["n", 2], INT64)], {"w": np.ones((3, 2), np.int64)}),
    "quantized": lambda: model([node("MatMulInteger", ["x", "w"], ["y"])],
        [value("x", ["n", 3], TensorProto.INT8)], [value("y", None, TensorProto.INT32)],
        {"w": np.ones((3, 2), np.int8)}),
    "shared": shared,
    "in-a-branch": in_branch,
    "no-rows": lambda: layer(weight=np.ones((0, 2), np.float32)),
    "no-columns": lambda: layer(weight=np.ones((3, 0), np.float32)),
    "vector": lambda: layer(weight=np.ones(3, np.float32)),
    "scalar": lambda: layer(weight=np.ones((), np.float32)),
    "computed-weight": lambda: model([node("MatMul", ["x", "x"], ["y"])], [X], [Y]),
    "group-0": lambda: convolution(group=0),
    "group-negative": lambda: convolution(group=-2),
    "group-large": lambda: convolution(group=2**62),
    "text-for-a-number": lambda: wrong_attribute("transB", AttributeProto.STRING, s=b"yes"),
    "numbers-for-a-number": lambda: wrong_attribute("transB", AttributeProto.INTS, ints=[1]),
    "graph-for-a-number": lambda: wrong_attribute("transB", AttributeProto.GRAPH),
    "reference": lambda: wrong_attribute("transB", AttributeProto.INT, ref_attr_name="gone"),
    "cast-to-nothing": lambda: behind(node("Cast", ["h"], ["y"])),
    "cast-to-unknown": lambda: behind(node("Cast", ["h"], ["y"], to=99)),
    "concat-without-axis": lambda: behind(node("Concat", ["h", "h"], ["y"])),
    "softmax-beyond": lambda: behind(node("Softmax", ["h"], ["y"], axis=2**40)),
    "reshape-to-texts": lambda: behind(node("Reshape", ["h", "s"], ["y"]), s=np.array(["a", "b"])),
    "reshape-to-floats": lambda: behind(node("Reshape", ["h", "s"], ["y"]), s=np.float32([0.5])),
    "reshape-to-nothing": lambda: behind(node("Reshape", ["h"], ["y"])),
    "add-nothing": lambda: behind(node("Add", ["h", ""], ["y"])),
    "add-itself": lambda: behind(node("Add", ["h", "h"], ["y"])),
    "squeeze-all": lambda: behind(node("Squeeze", ["h", "s"], ["y"]), s=np.array([7])),
    "name-of-other-bytes": without_name,
    "unknown-operator": lambda: behind(node("Nothing", ["h"], ["y"])),
    "other-domain": lambda: behind(node("Own", ["h"], ["y"], domain="my")),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("options", [{}, {"after": "h"}, {"after": "x"}, {"of": "y"}], ids=str)
def test_odd_models(name: str, options: dict[str, str]) -> None:
    given = ODD[name]()
    try:
        replaced = onnxtrain.replace_classifier(given, 5, **options)
    except OnnxTrainError as error:
        assert len(str(error)) > 20
    else:
        assert {t.name for t in replaced.model.graph.initializer} >= set(replaced.parameters)


@pytest.mark.parametrize("name", ODD)
def test_other_functions(name: str) -> None:
    for function in (onnxtrain.inspect, lambda given: onnxtrain.gradient(given, "w")):
        try:
            function(ODD[name]())
        except OnnxTrainError as error:
            assert len(str(error)) > 20


def test_groups_that_divide_nothing() -> None:
    with pytest.raises(ModelError, match="0 groups"):
        onnxtrain.replace_classifier(convolution(group=0), 5)


def test_weights_of_no_size() -> None:
    with pytest.raises(ModelError, match="no elements"):
        onnxtrain.replace_classifier(layer(weight=np.ones((0, 2), np.float32)), 5)


def test_a_shared_weight_stays_where_it_is_used_otherwise() -> None:
    replaced = onnxtrain.replace_classifier(shared(), 5, of="y")
    stored = {t.name: numpy_helper.to_array(t).shape for t in replaced.model.graph.initializer}
    assert stored["w"] == (3, 2) and stored["head.weight"] == (3, 5)
