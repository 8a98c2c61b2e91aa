"""BatchNorm between two convolutions: its output is computed again for the weight gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from native.harness import assert_near, gradient_with_functions, kinds_of, run, run_both
from native.kernel_calls import call

Array = np.ndarray[Any, Any]
SHAPES = [(2, 3, 9, 9), (3, 16, 8, 8), (1, 5, 4, 4), (5, 4, 2, 1), (4, 3, 17, 5)]
AGAIN = "BatchNormConvGradWeight"


def model_of(
    shape: tuple[int, ...],
    activation: str = "Relu",
    kernel: int = 3,
    group: int = 1,
    step: int = 1,
) -> Any:
    """y = Conv(activation(BatchNormalization(x)), w)."""
    channels = shape[1]
    norm = ["scale", "bias", "mean", "var"]
    nodes = [helper.make_node("BatchNormalization", ["x", *norm], ["normalized"])]
    inner = "normalized"
    if activation:
        bounds = ["zero", "six"] if activation == "Clip" else []
        nodes.append(helper.make_node(activation, ["normalized", *bounds], ["active"]))
        inner = "active"
    window = {"pads": [kernel // 2] * 4, "strides": [step] * 2, "group": group}
    nodes.append(helper.make_node("Conv", [inner, "w"], ["y"], **window))
    w = (2 * group, channels // group, kernel, kernel)
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    inputs += [helper.make_tensor_value_info(n, TensorProto.FLOAT, [channels]) for n in norm]
    inputs.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, w))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    constants = [
        helper.make_tensor(n, TensorProto.FLOAT, [], [v]) for n, v in (("zero", 0.0), ("six", 6.0))
    ]
    used = constants if activation == "Clip" else []
    graph = helper.make_graph(nodes, "graph", inputs, [y], used)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return onnx.shape_inference.infer_shapes(model)


def feeds_of(model: Any) -> dict[str, Array]:
    random = np.random.default_rng(0)
    feeds = {}
    for value in (*model.graph.input, *model.graph.output):
        dims = [d.dim_value for d in value.type.tensor_type.shape.dim]
        name = "y_grad" if value.name == "y" else value.name
        feeds[name] = random.normal(size=dims).astype(np.float32)
    feeds["var"] = np.abs(feeds["var"]) + 0.1
    return feeds


def gradient_of(model: Any) -> Any:
    return gradient_with_functions(model, ["x", "scale", "bias", "w"], bn="batch")


@pytest.mark.parametrize("activation", ["", "Relu", "Clip"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_like_the_function(shape: tuple[int, ...], activation: str) -> None:
    model = model_of(shape, activation)
    made = gradient_of(model)
    assert AGAIN in kinds_of(made)
    assert_near(*run_both(made, feeds_of(model)), ulps=64)


def test_a_convolution_with_strides() -> None:
    model = model_of((2, 6, 10, 10), step=2)
    assert_near(*run_both(gradient_of(model), feeds_of(model)), ulps=64)


@pytest.mark.parametrize(("kernel", "group"), [(1, 1), (3, 4)])
def test_where_it_would_take_long_the_output_is_kept(kernel: int, group: int) -> None:
    model = model_of((2, 4, 6, 6), kernel=kernel, group=group)
    made = gradient_of(model)
    assert AGAIN not in kinds_of(made)
    assert_near(*run_both(made, feeds_of(model)), ulps=64)


def test_what_the_model_returns_is_kept() -> None:
    model = model_of((2, 4, 6, 6))
    model.graph.output.append(
        helper.make_tensor_value_info("active", TensorProto.FLOAT, [2, 4, 6, 6])
    )
    assert AGAIN not in kinds_of(gradient_of(model))


def test_what_the_backward_pass_is_given_is_empty() -> None:
    """The copy of the output takes no memory between the passes."""
    model = gradient_of(model_of((2, 4, 6, 6)))
    layer = next(n for n in model.graph.node if n.op_type.startswith("BatchNorm_"))
    model.graph.output.append(
        helper.make_tensor_value_info(layer.output[6], TensorProto.FLOAT, None)
    )
    found = run(model, feeds_of(model_of((2, 4, 6, 6))), native=True)[-1]
    assert found.shape == (0,)


def test_what_does_not_fit_is_an_error() -> None:
    image, channel = np.ones((2, 4, 6, 6), np.float32), np.ones(4, np.float32)
    fine = [np.zeros(0, np.float32), image[:, :3], image, channel, channel, channel, channel]
    window = {"pads": [1] * 4, "kernel_shape": [3, 3]}
    call(AGAIN, fine, 2, **window)
    for place, wrong in [(1, image[:1]), (1, channel), (2, channel), (3, image), (6, channel[:2])]:
        given = list(fine)
        given[place] = wrong
        with pytest.raises(Exception, match=AGAIN):
            call(AGAIN, given, 2, **window)
    with pytest.raises(Exception, match="7 inputs"):
        call(AGAIN, fine[:6], 2, **window)
