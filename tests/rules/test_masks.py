"""Masks: multiplied with where gradients are finite, selected by where they may not be."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from onnxtrain.offline.autodiff.engine import differentiate
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.training_graph import build_training_graphs


def model_of(nodes: list[onnx.NodeProto]) -> onnx.ModelProto:
    """x · w, then some nodes up to z, then the mean."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        *nodes,
        helper.make_node("ReduceMean", ["z"], ["loss"], keepdims=0),
    ]
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])],
        [numpy_helper.from_array(np.eye(4, dtype=np.float32), "w"),
         numpy_helper.from_array(np.float32(6.0), "six"),
         numpy_helper.from_array(np.float32(0.0), "zero")],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def node(op: str, *names: str) -> onnx.NodeProto:
    *inputs, output = names
    return helper.make_node(op, inputs, [output])


def kinds_of(nodes: list[onnx.NodeProto]) -> set[str]:
    graphs = build_training_graphs(model_of(nodes), ["loss"], ["w"])
    return {n.op_type for n in graphs.training.graph.node if n.name.startswith("r_grad")}


@pytest.mark.parametrize(
    ("tail", "multiplies"),
    [
        ([node("Identity", "r", "z")], True),
        ([node("MatMul", "r", "w", "z")], True),
        ([node("Add", "r", "h", "s"), node("Tanh", "s", "z")], True),
        ([node("Sqrt", "r", "z")], False),
        ([node("Sqrt", "r", "s"), node("Add", "s", "r", "z")], False),
        ([node("Reshape", "r", "shape", "s"), node("Log", "s", "z")], False),
        ([node("Sqrt", "r", "s"), node("MatMul", "s", "w", "z")], False),
        ([node("MatMul", "r", "w", "s"), node("Sqrt", "s", "z")], True),
    ],
    ids=["end", "product", "bounded", "root", "root-and-more", "through-a-view", "root-first",
         "root-behind-a-product"],
)  # fmt: skip
def test_where_a_mask_is_multiplied_with(tail: list[onnx.NodeProto], multiplies: bool) -> None:
    head = [helper.make_node("Relu", ["h"], ["r"], name="r")]
    shape = helper.make_node("Constant", [], ["shape"], value_ints=[-1])
    kinds = kinds_of([*head, shape, *tail])
    assert ("Where" in kinds) is not multiplies
    assert ("Mul" in kinds) is multiplies


@pytest.mark.parametrize("op", ["Relu", "Clip"])
def test_the_root_of_a_dead_unit_has_no_gradient(op: str) -> None:
    """d√relu(x)/dx at 0 is 0, not 0 · ∞."""
    inputs = ["h"] if op == "Relu" else ["h", "zero", "six"]
    nodes = [helper.make_node(op, inputs, ["r"]), node("Sqrt", "r", "z")]
    graphs = build_training_graphs(model_of(nodes), ["loss"], ["w"])
    session = ort.InferenceSession(graphs.training.SerializeToString())
    feeds = {
        "x": np.float32([[-1, 0, 4, 1]]),
        "w": np.eye(4, dtype=np.float32),
        "w_grad.accumulation.buffer": np.zeros((4, 4), np.float32),
        "lazy_reset_grad": np.array([True]),
    }
    (gradient,) = session.run(["w_grad.accumulation.out"], feeds)
    assert np.isfinite(gradient).all()
    np.testing.assert_allclose(gradient[2], [0, 0, 0.25, 0.5], rtol=1e-6)


def test_a_given_seed_may_be_infinite() -> None:
    """The seed of `gradient` is an input: what is masked out stays 0 whatever comes in."""
    relu = model_of([node("Relu", "h", "z")])
    relu.graph.output[0].CopyFrom(helper.make_tensor_value_info("z", TensorProto.FLOAT, ["n", 4]))
    del relu.graph.node[-1]
    extended = onnxtrain.gradient(relu, ["x"])
    session = ort.InferenceSession(extended.SerializeToString())
    feeds = {"x": np.float32([[-1, 2, -3, 4]]), "z_grad": np.full((1, 4), np.inf, np.float32)}
    (h_grad,) = session.run(["x_grad"], feeds)
    assert np.isnan(h_grad).all(), "0 · ∞ of the product with w, in torch as well"


@pytest.mark.parametrize("shape", [(8, 4, 1, 1), (8, 4), (5, 1), (1, 1, 1), (4,)], ids=str)
def test_scalars_take_the_rank_of_a_tensor_with_a_last_axis_of_one(shape: tuple[int, ...]) -> None:
    x, scalar = ir.Value(name="x"), ir.Value(name="s")
    x.dtype = scalar.dtype = ir.DataType.FLOAT
    x.shape, scalar.shape = ir.Shape(shape), ir.Shape([])
    graph = ir.Graph([x, scalar], [], nodes=[], name="g", opset_imports={"": 18})
    op = Ops(graph, 18)
    results = [op.Mul(x, 2.0), op.Add(scalar, x), op.Sub(x, scalar)]
    graph.outputs.extend(results)
    slow = len(shape) > 1 and shape[-1] == 1 and max(shape) > 1
    for result in results:
        ranks = {len(v.shape or ()) for v in result.producer().inputs}  # type: ignore[union-attr]
        assert (ranks == {len(shape)}) is (slow or not shape)
        assert tuple(result.shape or ()) == shape
    session = ort.InferenceSession(ir.to_proto(ir.Model(graph, ir_version=8)).SerializeToString())
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    found = session.run(None, {"x": array, "s": np.array(3, np.float32)})
    for got, expected in zip(found, (array * 2, array + 3, array - 3), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_differentiating_without_a_word_on_seeds_is_careful() -> None:
    x, seed = ir.Value(name="x"), ir.Value(name="seed")
    x.dtype = seed.dtype = ir.DataType.FLOAT
    x.shape = seed.shape = ir.Shape([3])
    graph = ir.Graph([x, seed], [], nodes=[], name="g", opset_imports={"": 18})
    op = Ops(graph, 18)
    y = op.Relu(x)
    found = differentiate(op, list(graph), {y: seed}, [x])[x]
    assert found is not None and found.producer().op_type == "Where"  # type: ignore[union-attr]
