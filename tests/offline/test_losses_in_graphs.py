"""Losses that are written into graphs, without names: `Loss.write`."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from loss_models import build, evaluate
from onnxtrain.errors import BlockError
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.losses import BY_NAME, Loss
from onnxtrain.onnxblock import loss

rng = np.random.default_rng(5)


def typed(name: str, kind: ir.DataType, *dims: Any) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape(dims))


def written(
    block: Loss, *inputs: ir.Value, opset: int = 18, **options: Any
) -> tuple[ir.Value, onnx.ModelProto]:
    """Return the loss of the first input, and the model that it was written into."""
    graph = ir.Graph(inputs, [], nodes=[], name="graph", opset_imports={"": opset})
    op = Ops(graph, opset)
    scores = op.Identity(inputs[0])
    made = block.write(op, scores, **options)
    graph.outputs.append(made)
    proto = ir.to_proto(ir.Model(graph, ir_version=8))
    onnx.checker.check_model(proto, full_check=True)
    return made, proto


@pytest.mark.parametrize("name", BY_NAME)
def test_a_loss_in_a_graph_is_that_of_the_block(name: str) -> None:
    block = BY_NAME[name]()
    rows = ["length"] if name == "next_token" else []
    made, proto = written(block, typed("x", ir.DataType.FLOAT, "batch", *rows, 3))
    assert (made.name, made.dtype, made.shape) == ("loss", ir.DataType.FLOAT, ir.Shape([]))
    label = proto.graph.input[1]
    by_name = build(block, ["batch", *rows, 3])
    assert label == by_name.graph.input[1]
    x, target = rng.random((2, 4, 3), dtype=np.float32)
    aim = target if label.name == "target" else np.array([0, 1, 2, 0])
    if rows:
        x, aim = x[None], aim[None]
    feeds = {"x": x, label.name: aim}
    for found, expected in zip(evaluate(proto, feeds), evaluate(by_name, feeds), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_labels_of_a_loss_in_a_graph() -> None:
    for way in ("by value", "by name"):
        x, scores = (typed(n, ir.DataType.FLOAT16, "batch", 3) for n in ("x", "scores"))
        classes = typed("classes", ir.DataType.INT32, "batch")
        options = {"labels": classes} if way == "by value" else {"labels_name": "classes"}
        made, proto = written(loss.CrossEntropyLoss(), x, classes, **options)
        assert [i.name for i in proto.graph.input] == ["x", "classes"]
        assert made.dtype == ir.DataType.FLOAT16
    _, proto = written(loss.MSELoss(), scores, labels_name="wanted")
    assert [i.name for i in proto.graph.input] == ["scores", "wanted"]
    assert proto.graph.input[1].type == proto.graph.input[0].type


def test_a_loss_keeps_to_the_names_of_a_graph() -> None:
    first = typed("loss", ir.DataType.FLOAT, 4, 3)
    made, _ = written(loss.MSELoss(), first)
    assert made.name == "loss_1"


@pytest.mark.parametrize(
    ("block", "kind", "opset", "words"),
    [
        (loss.MSELoss(), ir.DataType.INT64, 18, "MSELoss takes floats, but .* INT64"),
        (loss.NLLLoss(), ir.DataType.FLOAT, 11, "NLLLoss needs opset 12"),
        (loss.NLLLoss(class_axis=3), ir.DataType.FLOAT, 18, "no axis 3"),
        (loss.NLLLoss([1.0, 2.0]), ir.DataType.FLOAT, 18, "weight has 2 .* 3 classes"),
        (loss.NextTokenLoss(), ir.DataType.FLOAT, 18, "takes scores of .batch, tokens, vocabulary"),
    ],
)
def test_a_graph_that_a_loss_does_not_fit(
    block: Loss, kind: ir.DataType, opset: int, words: str
) -> None:
    with pytest.raises(BlockError, match=words):
        written(block, typed("x", kind, "batch", 3), opset=opset)


def test_short_names_are_the_same_losses() -> None:
    for short in (
        "CrossEntropy",
        "NLL",
        "NextToken",
        "MSE",
        "L1",
        "Huber",
        "SmoothL1",
        "BCEWithLogits",
        "KLDiv",
    ):
        assert getattr(loss, short) is getattr(loss, f"{short}Loss")
        assert getattr(loss, short) in BY_NAME.values()
