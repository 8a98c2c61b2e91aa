"""Which blocks of frozen networks become one call, and which stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from graphs import model, value
from onnxtrain.offline.passes.native_kernels import fit_to_kernels
from onnxtrain.offline.writer.functions import write_functions

WIDE, SIDE = 32, 48  # an image of 288 KB


def block(
    batch: int | str = "batch",
    side: int | str = SIDE,
    wide: int = WIDE,
    kind: int = TensorProto.FLOAT,
    **depthwise: Any,
) -> onnx.ModelProto:
    """An inverted residual with ReLU6 on 8 channels, its input added to the output."""
    element = helper.tensor_dtype_to_np_dtype(kind)
    shapes = {
        "w0": (wide, 8, 1, 1), "b0": (wide,), "w1": (wide, 1, 3, 3), "b1": (wide,),
        "w2": (8, wide, 1, 1), "b2": (8,),
    }  # fmt: skip
    constants = {name: np.ones(shape, element) for name, shape in shapes.items()}
    constants |= {"low": np.array(0, element), "high": np.array(6, element)}
    attributes = {"group": wide, "pads": [1, 1, 1, 1], **depthwise}
    nodes = [
        helper.make_node("Conv", ["x", "w0", "b0"], ["h0"]),
        helper.make_node("Clip", ["h0", "low", "high"], ["h1"]),
        helper.make_node("Conv", ["h1", "w1", "b1"], ["h2"], **attributes),
        helper.make_node("Clip", ["h2", "low", "high"], ["h3"]),
        helper.make_node("Conv", ["h3", "w2", "b2"], ["h4"]),
        helper.make_node("Add", ["x", "h4"], ["h5"]),
        helper.make_node("Identity", ["h5"], ["y"]),
    ]
    shape = [batch, 8, side, side]
    return model(nodes, [value("x", shape, kind)], [value("y", None, kind)], constants)


def written(given: onnx.ModelProto, *, native: bool = True) -> onnx.ModelProto:
    made = ir.from_proto(onnx.shape_inference.infer_shapes(given, strict_mode=True))
    if native:
        fit_to_kernels(made.graph)
    functions = write_functions(made, native)
    proto = ir.to_proto(made)
    proto.functions.extend(functions)
    return proto


def operators(given: onnx.ModelProto) -> list[str]:
    return [node.op_type.partition("_")[0] for node in given.graph.node]


PLAIN = ["Conv", "Clip", "Conv", "Clip", "Conv", "Add", "Identity"]


def test_a_block_is_one_call() -> None:
    made = written(block())
    assert operators(made) == ["InvertedResidual", "Identity"]
    (function,) = made.functions
    assert [node.op_type for node in function.node if node.op_type != "Constant"] == PLAIN[:-1]
    onnx.checker.check_model(made)
    call = made.graph.node[0]
    assert list(call.input) == ["x", "w0", "b0", "w1", "b1", "w2", "b2", "x"]
    found = {a.name: helper.get_attribute_value(a) for a in call.attribute}
    assert found == {
        "expands": 1, "has_residual": 1, "biases": [1, 1, 1], "norms": [0, 0, 0],
        "strides": [1, 1], "pads": [1, 1, 1, 1], "low_0": 0, "high_0": 6, "low_1": 0, "high_1": 6,
        "expansion_strides": [1, 1], "expansion_pads": [0, 0, 0, 0],
    }  # fmt: skip


@pytest.mark.parametrize("batch", [1, 16, "batch"])
def test_any_batch(batch: int | str) -> None:
    assert operators(written(block(batch))) == ["InvertedResidual", "Identity"]


def test_plain_where_kernels_are_not_wanted() -> None:
    made = written(block(), native=False)
    assert operators(made) == PLAIN
    assert not made.functions


def hidden_is_an_output(given: onnx.ModelProto) -> None:
    given.graph.output.append(value("h1", None))


def hidden_is_read_again(given: onnx.ModelProto) -> None:
    given.graph.node.append(helper.make_node("ReduceMean", ["h3"], ["mean"]))
    given.graph.output.append(value("mean", None))


def weights_are_an_input(given: onnx.ModelProto) -> None:
    given.graph.input.append(value("w1", [WIDE, 1, 3, 3]))


def bounds_are_an_input(given: onnx.ModelProto) -> None:
    given.graph.node[3].input[2] = "bound"
    given.graph.input.append(value("bound", []))


@pytest.mark.parametrize(
    "change", [hidden_is_an_output, hidden_is_read_again, weights_are_an_input]
)
def test_what_others_read_or_set_stays(change: Callable[[onnx.ModelProto], None]) -> None:
    given = block()
    change(given)
    found = operators(written(given))
    if change is hidden_is_an_output:  # the rest is a block without an expansion
        assert found == ["Conv", "Clip", "InvertedResidual", "Identity"]
    else:
        assert found[: len(PLAIN)] == PLAIN


def test_other_activations_end_a_block() -> None:
    given = block()
    bounds_are_an_input(given)
    assert operators(written(given)) == PLAIN


@pytest.mark.parametrize(
    "given",
    [
        block(dilations=[2, 2], pads=[2, 2, 2, 2]),
        block(auto_pad="SAME_UPPER", pads=None),
        block(side="side"),
        block(side=14),
        block(kind=TensorProto.FLOAT16),
        block(kind=TensorProto.DOUBLE),
    ],
    ids=["dilated", "auto_pad", "unknown size", "small", "half", "double"],
)
def test_what_the_kernel_does_not_do_stays(given: onnx.ModelProto) -> None:
    assert operators(written(given)) == PLAIN


def test_the_first_layer_belongs_to_a_block_and_deep_ones_do_not() -> None:
    for channels, expected in ((3, ["InvertedResidual"]), (16, ["Conv", "InvertedResidual"])):
        shapes = {"w0": (WIDE, channels, 3, 3), "w1": (WIDE, 1, 3, 3), "w2": (8, WIDE, 1, 1)}
        nodes = [
            helper.make_node("Conv", ["x", "w0"], ["h0"], strides=[2, 2], pads=[1, 1, 1, 1]),
            helper.make_node("Conv", ["h0", "w1"], ["h1"], group=WIDE, pads=[1, 1, 1, 1]),
            helper.make_node("Conv", ["h1", "w2"], ["y"]),
        ]
        x = value("x", ["batch", channels, 2 * SIDE, 2 * SIDE])
        constants = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
        assert operators(written(model(nodes, [x], [value("y", None)], constants))) == expected


def test_a_sum_of_another_shape_stays_outside() -> None:
    given = block()
    given.graph.node[5].input[0] = "b2"
    given.graph.initializer[5].dims[:] = [8, 1, 1]
    given.graph.node[4].input.pop()
    assert operators(written(given)) == ["InvertedResidual", "Add", "Identity"]


def test_padding_wider_than_the_kernel_stays() -> None:
    for above, expected in ((2, ["InvertedResidual", "Identity"]), (3, [*PLAIN[:5], "Identity"])):
        given = block(pads=[above, 1, 1, 1])
        del given.graph.node[5]
        given.graph.node[5].input[0] = "h4"
        assert operators(written(given)) == expected
