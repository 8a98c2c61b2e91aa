"""Kernels of cross entropy and of the gradients of softmax: against their functions, and torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from native.harness import assert_near, gradient_with_functions, kinds_of, run, run_both

Array = np.ndarray[Any, Any]
LOSS = {"SoftmaxCrossEntropy", "SoftmaxCrossEntropyGrad"}


def model_of(
    nodes: list[onnx.NodeProto],
    shapes: dict[str, tuple[int, ...]],
    output: tuple[str, tuple[int, ...]],
    weight: Array | None = None,
) -> onnx.ModelProto:
    """A model of some nodes; labels are integers, all else is float."""
    inputs = [
        helper.make_tensor_value_info(
            name, TensorProto.INT64 if name == "labels" else TensorProto.FLOAT, shape
        )
        for name, shape in shapes.items()
    ]
    made = helper.make_tensor_value_info(output[0], TensorProto.FLOAT, output[1])
    constants = [] if weight is None else [numpy_helper.from_array(weight, "weight")]
    graph = helper.make_graph(nodes, "graph", inputs, [made], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def cross_entropy(
    shape: tuple[int, ...], weight: Array | None = None, **attributes: Any
) -> onnx.ModelProto:
    inputs = ["x", "labels", *(["weight"] if weight is not None else [])]
    node = helper.make_node("SoftmaxCrossEntropyLoss", inputs, ["loss"], **attributes)
    labels = (shape[0], *shape[2:])
    size = labels if attributes.get("reduction") == "none" else ()
    return model_of([node], {"x": shape, "labels": labels}, ("loss", size), weight)


def feeds_of(shape: tuple[int, ...], scale: float = 3.0, ignored: int | None = None) -> Any:
    random = np.random.default_rng(1)
    labels = random.integers(0, shape[1], (shape[0], *shape[2:]))
    if ignored is not None:
        labels[random.random(labels.shape) < 0.4] = ignored
    x = (random.normal(size=shape) * scale).astype(np.float32)
    return {"x": x, "labels": labels.astype(np.int64)}


def with_gradient(model: onnx.ModelProto, feeds: Any) -> tuple[onnx.ModelProto, Any]:
    made = gradient_with_functions(model, ["x"])
    for value in made.graph.input:
        if value.name == "loss_grad":
            dims = [d.dim_value for d in value.type.tensor_type.shape.dim]
            dy = np.random.default_rng(2).normal(size=dims).astype(np.float32)
            feeds = {**feeds, "loss_grad": dy}
    return made, feeds


SHAPES = [
    (1, 1),
    (3, 5),
    (17, 10),
    (2, 1000),
    (4, 3, 7),
    (2, 21, 5, 9),
    (5, 33),
    (1, 4, 3000),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
def test_cross_entropy_like_the_function(
    shape: tuple[int, ...], reduction: str, weighted: bool
) -> None:
    weight = np.linspace(0.5, 2, shape[1], dtype=np.float32) if weighted else None
    model, feeds = with_gradient(cross_entropy(shape, weight, reduction=reduction), feeds_of(shape))
    assert kinds_of(model) == LOSS
    assert_near(*run_both(model, feeds), ulps=16)


@pytest.mark.parametrize("shape", [(17, 10), (2, 21, 5, 9)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [-100, 3])
def test_ignored_labels(shape: tuple[int, ...], reduction: str, ignored: int) -> None:
    weight = np.linspace(0.5, 2, shape[1], dtype=np.float32)
    feeds = feeds_of(shape, ignored=ignored)
    model = cross_entropy(shape, weight, reduction=reduction, ignore_index=ignored)
    model, feeds = with_gradient(model, feeds)
    assert kinds_of(model) == LOSS
    assert_near(*run_both(model, feeds), ulps=16)


@pytest.mark.parametrize("shape", [(64, 10), (8, 5000), (2, 5, 6, 7)], ids=str)
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_cross_entropy_like_torch(shape: tuple[int, ...], scale: float) -> None:
    feeds = feeds_of(shape, scale)
    model, feeds = with_gradient(cross_entropy(shape), feeds)
    loss, dx = run(model, feeds, native=True)
    x = torch.tensor(feeds["x"], dtype=torch.float64, requires_grad=True)
    expected = torch.nn.functional.cross_entropy(x, torch.tensor(feeds["labels"]))
    expected.backward()
    assert x.grad is not None
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-6)
    count = feeds["labels"].size
    np.testing.assert_allclose(dx, x.grad.numpy(), rtol=3e-6, atol=2e-7 / count)


@pytest.mark.parametrize("shape", [(0, 4), (2, 4, 0)], ids=str)
def test_no_samples(shape: tuple[int, ...]) -> None:
    """The operators of onnxruntime refuse them."""
    model, feeds = with_gradient(cross_entropy(shape, reduction="sum"), feeds_of(shape))
    loss, dx = run(model, feeds, native=True)
    assert loss == 0.0
    assert dx.shape == shape


def test_all_ignored() -> None:
    feeds = {**feeds_of((4, 5)), "labels": np.full(4, -100)}
    model, feeds = with_gradient(cross_entropy((4, 5), ignore_index=-100), feeds)
    loss, dx = run(model, feeds, native=True)
    assert np.isnan(loss)
    np.testing.assert_array_equal(dx, np.zeros((4, 5), np.float32))


def test_an_ignored_label_is_no_place_in_a_row() -> None:
    """Not even where the gradient of its term is not zero, but NaN."""
    model = cross_entropy((3, 4), reduction="none", ignore_index=-1)
    feeds = {**feeds_of((3, 4)), "labels": np.array([0, -1, 2])}
    model, feeds = with_gradient(model, feeds)
    for gradient in (np.nan, np.inf):
        feeds["loss_grad"] = np.array([1, gradient, 2], np.float32)
        plain, native = run_both(model, feeds)
        assert_near([plain[0], plain[1][[0, 2]]], [native[0], native[1][[0, 2]]])
        assert np.isnan(native[1][1]).all()


def test_infinite_scores() -> None:
    feeds = feeds_of((3, 4))
    feeds["x"][0, 1] = -np.inf
    feeds["labels"][0] = 0
    model, feeds = with_gradient(cross_entropy((3, 4)), feeds)
    assert_near(*run_both(model, feeds))
    feeds["x"][1, 2] = np.nan
    assert np.isnan(run(model, feeds, native=True)[0])


@pytest.mark.parametrize("label", [-1, 4])
def test_a_wrong_label_is_an_error(label: int) -> None:
    feeds = {**feeds_of((3, 4)), "labels": np.array([0, label, 1])}
    model, feeds = with_gradient(cross_entropy((3, 4)), feeds)
    with pytest.raises(Exception, match="a label is not the number of a class"):
        run(model, feeds, native=True)


@pytest.mark.parametrize("shape", [(3, 5), (17, 1000), (2, 21, 5, 9)], ids=str)
@pytest.mark.parametrize("ignored", [None, 2])
def test_smoothed_labels(shape: tuple[int, ...], ignored: int | None) -> None:
    """As the loss of a training graph writes them."""
    attributes = {} if ignored is None else {"ignore_index": ignored}
    nodes = [
        helper.make_node(
            "SoftmaxCrossEntropyLoss",
            ["x", "labels"],
            ["a", "log_prob"],
            reduction="none",
            **attributes,
        ),
        helper.make_node("Constant", [], ["axes"], value_ints=[1]),
        helper.make_node("ReduceSum", ["log_prob", "axes"], ["b"], keepdims=0),
        helper.make_node("Constant", [], ["share"], value_float=-0.1 / shape[1]),
        helper.make_node("Mul", ["b", "share"], ["c"]),
        helper.make_node("Add", ["a", "c"], ["loss"]),
    ]
    labels = (shape[0], *shape[2:])
    made = model_of(nodes, {"x": shape, "labels": labels}, ("loss", labels))
    model, feeds = with_gradient(made, feeds_of(shape, ignored=ignored))
    assert kinds_of(model) == LOSS
    assert_near(*run_both(model, feeds))


def test_log_probabilities_that_are_read_elsewhere_stay_plain() -> None:
    nodes = [
        helper.make_node("SoftmaxCrossEntropyLoss", ["x", "labels"], ["a", "log_prob"]),
        helper.make_node("ReduceMean", ["log_prob"], ["b"], keepdims=0),
        helper.make_node("Sub", ["a", "b"], ["loss"]),
    ]
    shapes = {"x": (3, 4), "labels": (3,)}
    model, feeds = with_gradient(model_of(nodes, shapes, ("loss", ())), feeds_of((3, 4)))
    assert kinds_of(model) == set()
    assert_near(*run_both(model, feeds))


def test_same_numbers_whatever_the_threads() -> None:
    model, feeds = with_gradient(cross_entropy((50, 3001)), feeds_of((50, 3001)))
    first = run(model, feeds, native=True)
    for expected, found in zip(first, run(model, feeds, native=True, threads=2), strict=True):
        np.testing.assert_array_equal(expected, found)


@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("shape", [(1,), (4, 1), (3, 5), (2, 3, 17), (0, 4), (7, 2050)], ids=str)
def test_softmax_gradients(op_type: str, shape: tuple[int, ...]) -> None:
    made = model_of([helper.make_node(op_type, ["x"], ["loss"])], {"x": shape}, ("loss", shape))
    random = np.random.default_rng(3)
    x, dy = (random.normal(size=shape).astype(np.float32) for _ in range(2))
    model, feeds = gradient_with_functions(made, ["x"]), {"x": x * 3, "loss_grad": dy}
    assert kinds_of(model) == {f"{op_type}Grad"}
    assert_near(*run_both(model, feeds))
    z = torch.tensor(x * 3, dtype=torch.float64, requires_grad=True)
    function = torch.softmax if op_type == "Softmax" else torch.log_softmax
    function(z, -1).backward(torch.tensor(dy, dtype=torch.float64))
    assert z.grad is not None
    found = run(model, feeds, native=True)[1]
    np.testing.assert_allclose(found, z.grad.numpy(), rtol=2e-6, atol=3e-6)


def test_softmax_along_another_axis_stays_plain() -> None:
    node = helper.make_node("Softmax", ["x"], ["loss"], axis=1)
    made = model_of([node], {"x": (2, 3, 4)}, ("loss", (2, 3, 4)))
    assert kinds_of(gradient_with_functions(made, ["x"])) == set()
