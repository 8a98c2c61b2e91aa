"""Integers that the model computes from constants, and that ranks depend on."""

import numpy as np
import pytest
from onnx import TensorProto, helper

import onnxtrain
from gradcheck import check_gradient
from graphs import model, value
from onnxtrain.offline.graph.folding import fold_constants

node = helper.make_node
X = np.arange(24, dtype=np.float32).reshape(2, 12) / 10


def unflatten(opset: int, last: str = "sizes"):
    """As torchscript writes x.unflatten(-1, (3, 4)): the place of the axis is counted."""
    return model(
        [
            node("Shape", ["x"], ["shape"]),
            node("Add", ["minus_one", "two"], ["sum"]),
            node("Mod", ["sum", "two"], ["axis"]),
            node("Reshape", ["axis", "one"], ["end"]),
            node("Slice", ["shape", "zero", "end"], ["lead"]),
            node("Concat", ["lead", last], ["target"], axis=0),
            node("Reshape", ["x", "target"], ["parts"]),
            node("Gather", ["parts", "index"], ["part"], axis=1),
            node("Mul", ["part", "part"], ["y"]),
        ],
        [value("x", ["batch", 12])],
        [value("y", None)],
        {
            "minus_one": np.array([-1]), "two": np.array([2]), "one": np.array([1]),
            "zero": np.array([0]), "sizes": np.array([3, 4]), "index": np.array(1),
        },
        opset,
    )  # fmt: skip


@pytest.mark.parametrize("opset", [11, 13, 18, 21])
def test_a_rank_that_follows_from_integer_arithmetic(opset: int) -> None:
    check_gradient(unflatten(opset), {"x": X}, ["x"], "y")


def test_arithmetic_that_fails_is_left_to_run_time() -> None:
    """A branch of the exporter's that is never used may hold nonsense."""
    given = unflatten(18)
    given.graph.node.append(node("Gather", ["sizes", "two"], ["beyond"]))
    given.graph.node.append(node("Div", ["two", "zero"], ["undefined"]))
    assert onnxtrain.gradient(given, "x").graph.output[-1].name == "x_grad"


def test_large_integers_stay_computed() -> None:
    """A mask of ones takes a few bytes in the model, and stays that small."""
    given = model(
        [
            node("Expand", ["one", "shape"], ["ones"]),
            node("Cast", ["ones"], ["mask"], to=TensorProto.FLOAT),
            node("Mul", ["x", "mask"], ["y"]),
        ],
        [value("x", [50000])],
        [value("y", [50000])],
        {"one": np.array([1]), "shape": np.array([50000])},
    )
    assert onnxtrain.gradient(given, "x").ByteSize() < 2000


def test_random_numbers_are_not_folded() -> None:
    """A Dropout of constants in training mode draws anew in each run."""
    given = model(
        [node("Dropout", ["ones", "half", "yes"], ["dropped"])],
        [],
        [value("dropped", [8])],
        {"ones": np.ones(8, np.float32), "half": np.float32(0.5), "yes": np.array(True)},
    )
    assert [n.op_type for n in fold_constants(given).graph.node] == ["Dropout"]
