"""Every building block, by what it computes."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from graphs import model, value
from onnxtrain import onnxblock
from onnxtrain.onnxblock import blocks
from two_heads import (
    Forward,
    W,
    X,
    Y,
    Z,
    output_names,
    result_of,
    run,
    two_heads,
)

OPERATORS: dict[str, tuple[onnxblock.Block, list[str], np.ndarray]] = {
    "Add": (blocks.Add(), ["y", "z"], Y + Z),
    "Sub": (blocks.Sub(), ["y", "z"], Y - Z),
    "Mul": (blocks.Mul(), ["y", "z"], Y * Z),
    "Div": (blocks.Div(), ["y", "z"], Y / Z),
    "Pow": (blocks.Pow(3.0), ["y"], Y**3),
    "ReduceMean": (blocks.ReduceMean(), ["y"], Y.mean(keepdims=True)),
    "ReduceMean-flat": (blocks.ReduceMean(keepdims=False), ["y"], Y.mean()),
    "ReduceSum": (blocks.ReduceSum(), ["y"], Y.sum(keepdims=True)),
    "ReduceSum-flat": (blocks.ReduceSum(keepdims=False), ["y"], Y.sum()),
    "Sigmoid": (blocks.Sigmoid(), ["y"], 1 / (1 + np.exp(-Y))),
    "Neg": (blocks.Neg(), ["y"], -Y),
    "Abs": (blocks.Abs(), ["y"], abs(Y)),
    "Constant": (blocks.Constant(2.5), [], np.array([2.5])),
    "ReduceAllL2": (
        blocks.ReduceAllL2(), ["y", "z", "w"],
        np.sqrt([(Y**2).sum() + (Z**2).sum() + (W**2).sum()]),
    ),
    "Clip": (blocks.Clip(-0.5, 0.25), ["y"], Y.clip(-0.5, 0.25)),
    "Clip-min": (blocks.Clip(clip_min=0.0), ["y"], Y.clip(0)),
    "Clip-max": (blocks.Clip(clip_max=0.0), ["y"], Y.clip(None, 0)),
    "Clip-none": (blocks.Clip(), ["y"], Y),
    "Cast": (blocks.Cast(TensorProto.DOUBLE), ["y"], Y.astype(np.float64)),
    "Operator": (blocks.Operator("Transpose", perm=[1, 0]), ["y"], Y.T),
}  # fmt: skip


@pytest.mark.parametrize("opset", [13, 18, 21])
@pytest.mark.parametrize("name", OPERATORS)
def test_operator(name: str, opset: int) -> None:
    block, names, expected = OPERATORS[name]
    found = result_of(block, *names, feeds={"x": X}, base=two_heads(opset))
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)


def test_operators_with_attributes_of_every_kind() -> None:
    number = numpy_helper.from_array(np.array([7], np.int64))
    found = result_of(
        lambda y: blocks.Operator("ConstantOfShape", value=number)(blocks.Operator("Shape")(y)),
        "y", feeds={"x": X},
    )  # fmt: skip
    assert found.dtype == np.int64
    assert (found == 7).all()
    found = result_of(
        lambda y: blocks.Operator("ConstantOfShape")(blocks.Operator("Shape")(y)),
        "y", feeds={"x": X},
    )  # fmt: skip
    assert found.dtype == np.float32
    found = result_of(lambda y, z: blocks.Operator("Clip")(y, "", z), "y", "least", feeds={"x": X},
                      base=with_scalar())  # fmt: skip
    np.testing.assert_allclose(found, Y.clip(None, 0.25), rtol=1e-5)


def with_scalar() -> onnx.ModelProto:
    base = two_heads()
    base.graph.initializer.append(numpy_helper.from_array(np.float32(0.25), "least"))
    return base


def test_log() -> None:
    found = result_of(lambda y: blocks.Log()(blocks.Abs()(y)), "y", feeds={"x": X})
    np.testing.assert_allclose(found, np.log(abs(Y)), rtol=1e-4, atol=1e-5)


def test_linear() -> None:
    np.random.seed(3)
    forward = Forward(blocks.Linear(2, 5, alpha=0.5, beta=2.0))
    with onnxblock.base(two_heads()):
        name = forward("y")
    built = forward.to_model_proto()
    weight, bias = (numpy_helper.to_array(t) for t in built.graph.initializer[2:])
    assert weight.shape == (2, 5)
    assert [t.name.split("::")[1] for t in built.graph.initializer[2:]] == [
        "linear.weight",
        "linear.bias",
    ]
    found = run(built, {"x": X})[name]
    np.testing.assert_allclose(found, 0.5 * Y @ weight + 2 * bias, rtol=1e-5, atol=1e-5)
    assert result_of(blocks.Linear(2, 5, bias=False), "y", feeds={"x": X}).shape == (4, 5)


def test_sequence_construct() -> None:
    found = result_of(blocks.SequenceConstruct(), "y", "z", feeds={"x": X})
    np.testing.assert_allclose(found[1], Z, rtol=1e-5)


def test_label_encoder() -> None:
    base = model(
        [helper.make_node("Identity", ["x"], ["y"])],
        [value("x", ["n"], TensorProto.INT64)],
        [value("y", ["n"], TensorProto.INT64)],
    )
    encoder = blocks.LabelEncoder(default_float=-9.0, keys_int64s=[3, 5], values_floats=[0.5, 1.5])
    found = result_of(encoder, "y", feeds={"x": np.array([5, 3, 4])}, base=base)
    assert found.tolist() == [1.5, 0.5, -9.0]


def test_input_like() -> None:
    forward = Forward(lambda y: blocks.Add()(y, blocks.InputLike(y)("other")))
    with onnxblock.base(two_heads()):
        forward("y")
        assert blocks.InputLike("x")().startswith("onnx::")
        with pytest.raises(LookupError, match="no value 'nowhere'"):
            blocks.InputLike("nowhere")("new")
        with pytest.raises(RuntimeError, match="already"):
            blocks.InputLike("y")("x")
    other = forward.to_model_proto().graph.input[1]
    assert other == value("other", ["batch", 2])


def test_pass_through() -> None:
    forward = Forward(blocks.PassThrough())
    with onnxblock.base(two_heads()):
        assert forward("z", "y") == ("z", "y")
    assert output_names(forward.to_model_proto()) == ["z", "y"]
