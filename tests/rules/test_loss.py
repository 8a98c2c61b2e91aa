"""Specs of rules/loss.py, and comparisons with torch."""

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import helper

import onnxtrain
from gradcheck import Spec, check_emitted, check_spec, ids, special_values, vjp

LABELS = np.array([2, 0, 3, 2], np.int64)
IMAGE = np.arange(12).reshape(2, 2, 3) * 7 % 5  # labels of 5 classes
VOLUME = np.arange(16).reshape(2, 2, 2, 2) * 5 % 3
WEIGHTS = np.array([0.5, 2.0, 1.0, 0.25, 1.5], np.float32)


def some_ignored(labels: np.ndarray, index: int = -100) -> np.ndarray:
    return np.where(np.arange(labels.size).reshape(labels.shape) % 3 == 1, index, labels)


def losses(op: str) -> list[Spec]:
    return [
        Spec(op, [(4, 5), LABELS]),
        Spec(op, [(4, 5), LABELS.astype(np.int32)], id="int32"),
        Spec(op, [(4, 5), LABELS], {"reduction": "sum"}, id="sum"),
        Spec(op, [(4, 5), LABELS], {"reduction": "none"}, id="none"),
        Spec(op, [(4, 5), LABELS, WEIGHTS], id="weights"),
        Spec(op, [(4, 5), LABELS, WEIGHTS], {"reduction": "sum"}, id="weights-sum"),
        Spec(op, [(4, 5), LABELS, WEIGHTS], {"reduction": "none"}, id="weights-none"),
        Spec(op, [(4, 5), some_ignored(LABELS)], {"ignore_index": -100}, id="ignore"),
        Spec(op, [(4, 5), some_ignored(LABELS).astype(np.int32)], {"ignore_index": -100},
             id="ignore-int32"),
        Spec(op, [(4, 5), LABELS], {"ignore_index": 2}, id="ignore-a-class"),
        Spec(op, [(4, 5), some_ignored(LABELS, 255), WEIGHTS], {"ignore_index": 255},
             id="ignore-weights"),
        Spec(op, [(4, 5), some_ignored(LABELS), WEIGHTS],
             {"ignore_index": -100, "reduction": "none"}, id="ignore-weights-none"),
        Spec(op, [(2, 5, 2, 3), IMAGE], id="4d"),
        Spec(op, [(2, 5, 2, 3), some_ignored(IMAGE), WEIGHTS], {"ignore_index": -100},
             id="4d-ignore-weights"),
        Spec(op, [(2, 3, 2, 2, 2), VOLUME], {"reduction": "none"}, id="5d-none"),
    ]  # fmt: skip


SPECS = [
    Spec("Softmax", [(3, 4)]),
    Spec("Softmax", [(2, 3, 4)], {"axis": 1}, id="axis"),
    Spec("Softmax", [(2, 3)], {"axis": -2}, id="negative-axis"),
    Spec("LogSoftmax", [(3, 4)]),
    Spec("LogSoftmax", [(2, 3, 4)], {"axis": 1}, id="axis"),
    *losses("SoftmaxCrossEntropyLoss"),
    Spec("SoftmaxCrossEntropyLoss", [(4, 5), LABELS], outputs=2, id="two-outputs"),
    Spec("SoftmaxCrossEntropyLoss", [(4, 5), LABELS], outputs=2, of=1, id="log-prob"),
    Spec("SoftmaxCrossEntropyLoss", [(2, 5, 2, 3), IMAGE], outputs=2, of=1, id="log-prob-4d"),
    *losses("NegativeLogLikelihoodLoss"),
]


@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_gradient(spec: Spec) -> None:
    check_spec(spec)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [s for s in SPECS if s.symbolic], ids=ids)
def test_gradient_with_symbolic_dimensions(spec: Spec) -> None:
    check_spec(spec, symbolic=True)


# ---- against torch -----------------------------------------------------------------------------


def loss_model(
    op: str, scores: np.ndarray, labels: np.ndarray, weights: np.ndarray | None, **attrs: Any
) -> onnx.ModelProto:
    names = ["x", "labels"] if weights is None else ["x", "labels", "weights"]
    arrays = [scores, labels] if weights is None else [scores, labels, weights]
    inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in zip(names, arrays, strict=True)
    ]
    output = helper.make_tensor_value_info("loss", inputs[0].type.tensor_type.elem_type, None)
    node = helper.make_node(op, names, ["loss"], **attrs)
    graph = helper.make_graph([node], "g", inputs, [output])
    opset = [helper.make_opsetid("", 22)]
    return helper.make_model(graph, opset_imports=opset, ir_version=10)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("ignore", [None, -100, 2], ids=["all", "ignore", "ignore-class"])
@pytest.mark.parametrize("shape", [(8, 5), (3, 5, 4), (2, 5, 3, 4), (2, 5, 2, 3, 2)], ids=str)
@pytest.mark.parametrize("op", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
def test_loss_is_that_of_torch(
    op: str, shape: tuple[int, ...], ignore: int | None, weighted: bool, reduction: str
) -> None:
    rng = np.random.default_rng(3)
    scores = rng.standard_normal(shape).astype(np.float32) * 3
    labels = rng.integers(0, shape[1], (shape[0], *shape[2:]))
    if ignore == -100:
        labels = some_ignored(labels)
    weights = WEIGHTS if weighted else None
    cotangent = rng.standard_normal(labels.shape if reduction == "none" else ())
    cotangent = np.asarray(cotangent, np.float32)
    attrs = {"reduction": reduction, **({} if ignore is None else {"ignore_index": ignore})}
    feeds = {"x": scores, "labels": labels, "weights": WEIGHTS}
    (found,) = vjp(loss_model(op, scores, labels, weights, **attrs), feeds, ["x"], cotangent)
    tensor = torch.tensor(scores.astype(np.float64), requires_grad=True)
    function = F.cross_entropy if op.startswith("Softmax") else F.nll_loss
    loss = function(
        tensor,
        torch.tensor(labels),
        weight=torch.tensor(WEIGHTS.astype(np.float64)) if weighted else None,
        ignore_index=-100 if ignore is None else ignore,
        reduction=reduction,
    )
    seed = torch.tensor(cotangent.astype(np.float64)) if reduction == "none" else None
    (expected,) = torch.autograd.grad(loss, tensor, seed)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("op", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_nothing_but_ignored_labels(op: str, weighted: bool, reduction: str) -> None:
    """The mean over nothing is nan; its gradient is zero all the same."""
    scores = np.ones((3, 5), np.float32)
    labels = np.full(3, -100, np.int64)
    model = loss_model(
        op, scores, labels, WEIGHTS if weighted else None, ignore_index=-100, reduction=reduction
    )
    feeds = {"x": scores, "labels": labels, "weights": WEIGHTS}
    (found,) = vjp(model, feeds, ["x"], np.array(1, np.float32))
    np.testing.assert_array_equal(found, np.zeros_like(scores))


def test_labels_without_weight() -> None:
    """The weights of all labels are zero: a gradient of zero as well."""
    scores, labels = np.ones((2, 5), np.float32), np.array([1, 1])
    weights = np.array([1, 0, 1, 1, 1], np.float32)
    model = loss_model("SoftmaxCrossEntropyLoss", scores, labels, weights)
    feeds = {"x": scores, "labels": labels, "weights": weights}
    np.testing.assert_array_equal(vjp(model, feeds, ["x"], np.array(1, np.float32))[0], 0)


def test_large_scores() -> None:
    scores = np.array([[1e4, -1e4, 0], [-3e38, 3e38, 0], [1e30, 1e30, -1e30]], np.float32)
    labels = np.array([1, 1, 0])
    model = loss_model("SoftmaxCrossEntropyLoss", scores, labels, None, reduction="sum")
    (found,) = vjp(model, {"x": scores, "labels": labels}, ["x"], np.array(1, np.float32))
    np.testing.assert_allclose(found, [[1, -1, 0], [0, 0, 0], [-0.5, 0.5, 0]], atol=1e-6)
    special_values("Softmax", [[[1000.0, 0.0, 1000.0]]], [[[0, 0, 0]]])
    special_values("LogSoftmax", [[[1000.0, 0.0, 0.0]]], [[[-2, 1, 1]]])


@pytest.mark.parametrize("op", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
def test_loss_in_float16(op: str) -> None:
    scores = np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32)
    labels = some_ignored(LABELS)
    half, single = (
        vjp(
            loss_model(op, scores.astype(kind), labels, WEIGHTS.astype(kind), ignore_index=-100),
            {"x": scores.astype(kind), "labels": labels, "weights": WEIGHTS.astype(kind)},
            ["x"],
            np.array(1, kind),
        )[0]
        for kind in (np.float16, np.float32)
    )
    assert half.dtype == np.float16
    np.testing.assert_allclose(half.astype(np.float32), single, atol=1e-3)


@pytest.mark.parametrize("op", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
def test_loss_in_bfloat16(op: str) -> None:
    """onnxruntime's CPU does not run it; the types must be right all the same."""
    scores, weights = np.ones((4, 5), ml_dtypes.bfloat16), WEIGHTS.astype(ml_dtypes.bfloat16)
    model = loss_model(op, scores, LABELS, weights, ignore_index=-100)
    check_emitted(onnxtrain.gradient(model, "x"))


def test_log_prob_beside_the_loss() -> None:
    """Both outputs matter at once."""
    text = """
        <ir_version: 10, opset_import: ["" : 18]>
        agraph (float[4, 5] x, int64[4] labels) => (float total) {
            loss, log_prob = SoftmaxCrossEntropyLoss(x, labels)
            squares = ReduceSumSquare<keepdims=0>(log_prob)
            total = Add(loss, squares)
        }
    """
    scores = np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32)
    feeds = {"x": scores, "labels": LABELS}
    (found,) = vjp(onnx.parser.parse_model(text), feeds, ["x"], np.array(1, np.float32))
    tensor = torch.tensor(scores, requires_grad=True)
    total = F.cross_entropy(tensor, torch.tensor(LABELS)) + F.log_softmax(tensor, 1).square().sum()
    np.testing.assert_allclose(found, torch.autograd.grad(total, tensor)[0], rtol=1e-4, atol=1e-5)
