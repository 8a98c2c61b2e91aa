"""A batch of one size becomes dynamic where that changes nothing, and is refused elsewhere."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from onnxtrain.errors import ModelError

W = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
node = helper.make_node


def model(between, size=1, tensors=(), dims=(2, 3), more_inputs=()) -> onnx.ModelProto:
    """A model of fixed batch: some nodes from x to h, and a linear layer of six features."""
    graph = helper.make_graph(
        [*between, node("MatMul", ["h", "w"], ["scores"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [size, *dims]), *more_inputs],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, [size, 3])],
        [numpy_helper.from_array(array, name) for name, array in [("w", W), *tensors]],
        value_info=[helper.make_tensor_value_info("h", TensorProto.FLOAT, [size, 6])],
    )
    opset = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opset, ir_version=9)


def shape(*sizes):
    return [("shape", np.array(sizes, np.int64))]


POSSIBLE = {
    "flatten": (1, [node("Flatten", ["x"], ["h"])], ()),
    "reshape-rest": (1, [node("Reshape", ["x", "shape"], ["h"])], shape(1, -1)),
    "reshape-sizes": (4, [node("Reshape", ["x", "shape"], ["h"])], shape(4, 6)),
    "reshape-zero-is-zero": (
        1, [node("Reshape", ["x", "shape"], ["h"], allowzero=1)], shape(1, -1)
    ),
    "reshape-computed": (
        1,
        [
            node("Constant", [], ["one"], value_ints=[1]),
            node("Constant", [], ["six"], value_ints=[6]),
            node("Concat", ["one", "six"], ["to"], axis=0),
            node("Reshape", ["x", "to"], ["h"]),
        ],
        (),
    ),
    "reshape-of-merged-axes": (
        1,
        [
            node("Transpose", ["x"], ["turned"], perm=[1, 0, 2]),  # two, batch, three
            node("Transpose", ["turned"], ["back"], perm=[1, 0, 2]),
            node("Reshape", ["back", "rows"], ["merged"]),
            node("Reshape", ["merged", "shape"], ["h"]),
        ],
        [("rows", np.array([-1, 3])), *shape(1, 6)],
    ),
    "reshape-of-a-weight": (
        1,
        [
            node("Flatten", ["x"], ["flat"]),
            node("Reshape", ["bias", "shape"], ["row"]),
            node("Add", ["flat", "row"], ["h"]),
        ],
        [("bias", np.arange(6, dtype=np.float32)), *shape(1, 6)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", POSSIBLE)
def test_the_batch_becomes_dynamic(tmp_path, case) -> None:
    size, between, tensors = POSSIBLE[case]
    fixed = model(between, size, tensors)
    onnxtrain.prepare(fixed, tmp_path, dynamic_batch=True)
    session = onnxtrain.TrainingSession(tmp_path)
    x = np.random.default_rng(1).normal(size=(7, 2, 3)).astype(np.float32)
    expected = onnxtrain.predict(fixed.SerializeToString(), x)
    np.testing.assert_allclose(session.predict(x), expected, rtol=1e-5, atol=1e-6)
    session.step(x, np.zeros(7, np.int64))
    if case != "reshape-of-merged-axes":
        assert session.module.training_executor.signature.inputs[1].dims == ("batch",)


def test_a_file_with_its_weights_beside_it_will_do(tmp_path) -> None:
    fixed = model([node("Flatten", ["x"], ["h"])])
    path = tmp_path / "model.onnx"
    onnx.save(fixed, path, save_as_external_data=True, location="model.data", size_threshold=0)
    onnxtrain.prepare(path, tmp_path / "artifacts", dynamic_batch=True)
    assert onnxtrain.TrainingSession(tmp_path / "artifacts").predict(
        np.ones((5, 2, 3), np.float32)
    ).shape == (5, 3)


IMPOSSIBLE = {
    "samples are mixed": (
        2,
        [node("Flatten", ["x"], ["flat"]),
         node("ReduceMean", ["flat"], ["mean"], axes=[0], keepdims=1),
         node("Sub", ["flat", "mean"], ["h"])],
        (), "'scores' depends on which samples run together",
    ),
    "a constant for each sample": (
        2,
        [node("Flatten", ["x"], ["flat"]), node("Add", ["flat", "each"], ["h"], name="add_each")],
        [("each", np.ones((2, 6), np.float32))], "the Add node 'add_each' works for this size",
    ),
    "the batch is summed": (
        2,
        [node("Flatten", ["x"], ["flat"]), node("ReduceSum", ["flat", "axes"], ["h"], keepdims=1)],
        [("axes", np.array([0]))], "'scores' depends on which samples run together",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_what_cannot_be_dynamic_is_refused(tmp_path, case) -> None:
    size, between, tensors, message = IMPOSSIBLE[case]
    with pytest.raises(ModelError, match=message) as caught:
        onnxtrain.prepare(model(between, size, tensors), tmp_path, dynamic_batch=True)
    assert "train it with batch_size=2, accumulate=16" in str(caught.value)


def test_a_dynamic_batch_needs_no_help(tmp_path) -> None:
    with pytest.raises(ModelError, match="there is no batch to make dynamic"):
        onnxtrain.prepare(model([node("Flatten", ["x"], ["h"])], "n"), tmp_path, dynamic_batch=True)
