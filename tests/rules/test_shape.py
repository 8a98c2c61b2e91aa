"""Specs of rules/shape.py."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import onnxtrain
from gradcheck import Spec, check_gradient, check_spec, ids, run


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


SPECS = [
    Spec("Reshape", [(2, 3, 4), ints(4, 6)], constants=[1], eps=1.0),
    Spec("Reshape", [(2, 3, 4), ints(0, -1)], id="zero-and-minus-one", constants=[1], eps=1.0),
    Spec("Reshape", [(2, 3, 4), ints(-1, 2)], id="shape-at-run-time", eps=1.0),
    Spec("Reshape", [(2, 0, 3), ints(0, 6)], {"allowzero": 1}, id="allowzero", constants=[1]),
    Spec("Flatten", [(2, 3, 4)], eps=1.0),
    Spec("Flatten", [(2, 3, 4)], {"axis": -1}, id="negative-axis", eps=1.0),
    Spec("Flatten", [(2, 3, 4)], {"axis": 0}, id="axis-0", eps=1.0),
    Spec("Squeeze", [(2, 1, 3, 1), ints(1, -1)], constants=[1], eps=1.0),
    Spec("Squeeze", [(2, 1, 3, 1)], id="no-axes", eps=1.0),
    Spec("Squeeze", [(2, 1, 3, 1), ints(1)], id="axes-at-run-time", eps=1.0),
    Spec("Unsqueeze", [(2, 3), ints(0, -1)], constants=[1], eps=1.0),
    Spec("Unsqueeze", [(2, 3), ints(1)], id="axes-at-run-time", eps=1.0),
    Spec("Transpose", [(2, 3, 4)], {"perm": [1, 2, 0]}, eps=1.0),
    Spec("Transpose", [(2, 3, 4)], id="no-perm", eps=1.0),
    Spec("Concat", [(2, 3), (2, 1), (2, 4)], {"axis": 1}, eps=1.0),
    Spec("Concat", [(2, 3, 2), (2, 5, 2)], {"axis": -2}, id="negative-axis", eps=1.0),
    Spec("Concat", [(2, 3)], {"axis": 0}, id="one-input", eps=1.0),
    Spec("Concat", [(2, 3), (0, 3)], {"axis": 0}, id="empty-part", wrt=[0], eps=1.0),
    Spec("Split", [(6, 2)], {"num_outputs": 3}, outputs=3, of=0, eps=1.0),
    Spec("Split", [(2, 7), ints(1, 4, 2)], {"axis": -1}, id="sizes", constants=[1],
         outputs=3, of=1, eps=1.0),
    Spec("Split", [(2, 7), ints(1, 4, 2)], {"axis": 1}, id="sizes-at-run-time",
         outputs=3, of=2, eps=1.0),
    Spec("Split", [(3, 7)], {"axis": 1, "num_outputs": 3}, id="ragged", outputs=3, of=2, eps=1.0),
    Spec("Split", [(3, 7)], {"axis": 1, "num_outputs": 1}, id="one-output", eps=1.0),
    Spec("Expand", [(3, 1), ints(2, 3, 4)], constants=[1], eps=1.0),
    Spec("Expand", [(3, 4), ints(1, 1)], id="smaller-shape", constants=[1], eps=1.0),
    Spec("Expand", [(3, 1), ints(2, 3, 4)], id="shape-at-run-time", eps=1.0),
    Spec("Expand", [(), ints(2, 3)], id="scalar", eps=1.0),
    Spec("Tile", [(2, 3), ints(2, 3)], constants=[1], eps=1.0),
    Spec("Tile", [(2, 3, 2), ints(1, 2, 1)], id="one-axis", constants=[1], eps=1.0),
    Spec("Tile", [(2, 3), ints(1, 1)], id="once", constants=[1], eps=1.0),
    Spec("Tile", [(2, 3), ints(3, 2)], id="repeats-at-run-time", eps=1.0),
    Spec("ReverseSequence", [(4, 3, 2), ints(1, 4, 2)], eps=1.0),
    Spec("ReverseSequence", [(3, 4), ints(4, 1, 3)], {"batch_axis": 0, "time_axis": 1},
         id="batch-first", eps=1.0),
    Spec("Trilu", [(2, 4, 3)], eps=1.0),
    Spec("Trilu", [(4, 4), np.array(-1, np.int64)], {"upper": 0}, id="lower-k", eps=1.0),
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_gradient(spec: Spec) -> None:
    check_spec(spec)


@pytest.mark.parametrize("spec", [s for s in SPECS if s.symbolic], ids=ids)
def test_gradient_with_symbolic_dimensions(spec: Spec) -> None:
    check_spec(spec, symbolic=True)


def graph_of(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model('<ir_version: 10, opset_import: ["" : 18]>\n' + text)


def test_concat_of_a_value_with_itself() -> None:
    model = graph_of("g (float[2,3] p) => (float[2,6] y) { y = Concat<axis = 1>(p, p) }")
    p = np.arange(6, dtype=np.float32).reshape(2, 3)
    check_gradient(model, {"p": p}, ["p"], "y", eps=1.0)


def test_split_with_some_outputs_in_use() -> None:
    model = graph_of("""
        g (float[6,n] x) => (float[2,n] y)
        { a, b, c = Split<num_outputs = 3>(x)  y = Mul(a, c) }""")
    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    check_gradient(model, {"x": x}, ["x"], "y", eps=1.0)


def test_split_with_an_output_without_name() -> None:
    node = helper.make_node("Split", ["x"], ["a", ""], num_outputs=2)
    info = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [n, 2])
        for name, n in (("x", 3), ("a", 2))
    ]
    opset = helper.make_opsetid("", 18)
    graph = helper.make_graph([node], "g", info[:1], info[1:])
    model = helper.make_model(graph, opset_imports=[opset], ir_version=10)
    extended = onnxtrain.gradient(model, "x")
    ct = np.array([[1, 2], [3, 4]], np.float32)
    _, dx = run(extended, {"x": np.zeros((3, 2), np.float32), "a_grad": ct})
    np.testing.assert_array_equal(dx, [[1, 2], [3, 4], [0, 0]])
