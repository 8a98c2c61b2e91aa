"""Losses as users write them, and the training models that come of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from graphs import model, value
from onnxtrain import onnxblock
from onnxtrain.errors import OnnxTrainError, UnknownNameError
from onnxtrain.onnxblock import blocks
from onnxtrain.onnxblock import loss as losses
from two_heads import (
    B,
    Forward,
    Training,
    W,
    X,
    Y,
    Z,
    input_names,
    output_names,
    rng,
    run,
    run_training,
    two_heads,
)

# ---- losses of users -----------------------------------------------------------------------------


class ThreeTerms(onnxblock.Block):
    """A weighted sum of three losses, with constants and labels of its own."""

    def __init__(self, w1: float, w2: float) -> None:  # does not call Block's
        self.mse, self.l1 = losses.MSELoss(), losses.L1Loss()
        self.ce = losses.CrossEntropyLoss()
        self.w1 = helper.make_tensor("w1", TensorProto.FLOAT, [1], [w1])
        self.w2 = helper.make_tensor("w2", TensorProto.FLOAT, [1], [w2])
        self.add, self.mul = blocks.Add(), blocks.Mul()

    def build(self, y: str, z: str) -> tuple[str, str]:
        self.base.graph.initializer.extend([self.w1, self.w2])
        first = self.mul("w1", self.mse(y, "y_target"))
        second = self.mul("w2", self.l1(z, target_name="z_target"))
        loss = self.add(self.add(first, second), self.ce(y, "labels"))
        return loss, z


def test_three_terms_and_three_labels() -> None:
    block = Training(ThreeTerms(0.4, 0.6))
    block.requires_grad("w")
    block.requires_grad("b")
    with onnxblock.base(two_heads()) as accessor:
        loss, _ = block("y", "z")
        training, evaluation = block.to_model_proto()
        assert accessor.model is training
    labels = ["y_target", "z_target", "labels"]
    buffers = [f"{p}_grad.accumulation.buffer" for p in "wb"]
    assert input_names(training) == ["x", *labels, "w", "b", *buffers, "lazy_reset_grad"]
    totals = [f"{p}_grad.accumulation.out" for p in "wb"]
    assert output_names(training) == [loss, "z", *totals, "updated_flag", "finite_check"]
    assert input_names(evaluation) == ["x", *labels, "w", "b"]
    assert output_names(evaluation) == [loss, "z"]
    assert [[t.name for t in some] for some in block.parameters()] == [["w", "b"], []]

    y_target, z_target = rng.random((2, 4, 2), dtype=np.float32)
    feeds = {"x": X, "y_target": y_target, "z_target": z_target, "labels": np.array([0, 1, 1, 0])}
    found = run_training(training, feeds)
    w, b = (torch.tensor(a, requires_grad=True) for a in (W, B))
    y = torch.tensor(X) @ w + b
    expected = (
        0.4 * (y - torch.tensor(y_target)).square().mean()
        + 0.6 * (y.tanh() - torch.tensor(z_target)).abs().mean()
        + torch.nn.functional.cross_entropy(y, torch.tensor(feeds["labels"]))
    )
    expected.backward()
    np.testing.assert_allclose(found[loss].item(), expected.item(), rtol=1e-5)
    np.testing.assert_allclose(found["w_grad.accumulation.out"], w.grad, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["b_grad.accumulation.out"], b.grad, rtol=1e-4, atol=1e-6)
    evaluated = run(evaluation, feeds | {"w": W, "b": B})
    np.testing.assert_allclose(evaluated[loss], found[loss], rtol=1e-6)


def test_frozen_parameters() -> None:
    block = Training(losses.MSELoss())
    block.requires_grad("w", False)
    block.requires_grad("b", False)
    block.requires_grad("b")  # the last word counts
    block.requires_grad("a name that the model does not have", False)
    with onnxblock.base(two_heads()):
        block("y")
    training, evaluation = block.to_model_proto()
    trainable, frozen = block.parameters()
    assert [t.name for t in trainable] == ["b"]
    assert [t.name for t in frozen] == ["w"]
    np.testing.assert_array_equal(numpy_helper.to_array(frozen[0]), W)
    assert "w" not in input_names(training)
    assert input_names(evaluation) == ["x", "target", "b"]


def test_training_block_without_init() -> None:
    class Bare(onnxblock.TrainingBlock):
        def __init__(self) -> None:
            self.loss = losses.MSELoss()

        def build(self, name: str) -> str:
            return self.loss(name)

    block = Bare()
    with pytest.raises(
        RuntimeError,
        match=r"Please build the training model first before trying to retrieve the parameters\.",
    ):
        block.parameters()
    with pytest.raises(RuntimeError, match="build the training model first"):
        block.to_model_proto()
    block.requires_grad("w")
    with onnxblock.base(two_heads()):
        block("y")
    assert "w" in input_names(block.to_model_proto()[0])
    assert block.parameters()[0][0].name == "w"


@pytest.mark.parametrize(
    ("name", "message"), [("v", "'v'"), ("unused", "unused"), ("number", "number")]
)
def test_what_cannot_train(name: str, message: str) -> None:
    base = two_heads()
    base.graph.initializer.append(numpy_helper.from_array(W, "unused"))
    base.graph.initializer.append(numpy_helper.from_array(np.array([1]), "number"))
    block = Training(losses.MSELoss())
    block.requires_grad(name)
    with onnxblock.base(base), pytest.raises(RuntimeError, match=message):
        block("y")


def test_a_loss_that_is_not_a_number() -> None:
    block = Training(losses.MSELoss("none"))
    block.requires_grad("w")
    with onnxblock.base(two_heads()), pytest.raises(RuntimeError, match="single number"):
        block("y")


# ---- targets and labels --------------------------------------------------------------------------


def test_a_target_that_the_model_has() -> None:
    forward = Forward(losses.MSELoss())
    with onnxblock.base(two_heads()):
        name = forward("y", "z")
    built = forward.to_model_proto()
    assert input_names(built) == ["x"]
    np.testing.assert_allclose(run(built, {"x": X})[name], ((Y - Z) ** 2).mean(), rtol=1e-5)


def test_an_unused_input_is_taken_as_labels() -> None:
    base = two_heads()
    base.graph.input.append(value("labels", ["batch"], TensorProto.INT32))
    forward = Forward(losses.CrossEntropyLoss())
    with onnxblock.base(base):
        name = forward("y")
    feeds = {"x": X, "labels": np.array([0, 1, 1, 0], np.int32)}
    expected = torch.nn.functional.cross_entropy(torch.tensor(Y), torch.tensor([0, 1, 1, 0]))
    np.testing.assert_allclose(run(forward.to_model_proto(), feeds)[name], expected, rtol=1e-5)


def test_declared_labels() -> None:
    with onnxblock.base(two_heads()) as accessor:
        losses.CrossEntropyLoss()("y")
        losses.BCEWithLogitsLoss()("y", "of_bce")
        assert list(accessor.model.graph.input[1:]) == [
            value("labels", ["batch"], TensorProto.INT64),
            value("of_bce", ["batch", 2]),
        ]


def test_a_loss_of_something_in_between() -> None:
    base = two_heads()
    del base.graph.output[0]
    forward = Forward(losses.L1Loss())
    with onnxblock.base(base):
        forward("y")
    assert forward.to_model_proto().graph.input[1] == value("target", ["batch", 2])


@pytest.mark.parametrize("loss", [losses.MSELoss, losses.CrossEntropyLoss, losses.L1Loss])
def test_a_loss_of_nothing(loss: type[onnxblock.Block]) -> None:
    with onnxblock.base(two_heads()), pytest.raises(LookupError, match="no value 'logits'"):
        loss()("logits")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: losses.MSELoss("average"), "reduction"),
        (lambda: losses.KLDivLoss("average"), "batchmean"),
        (lambda: losses.CrossEntropyLoss(np.ones((2, 2))), "weight"),
        (lambda: losses.CrossEntropyLoss(label_smoothing=2), "label_smoothing"),
        (lambda: losses.HuberLoss(delta=0), "delta"),
        (lambda: losses.SmoothL1Loss(beta=-1), "beta"),
        (lambda: losses.CrossEntropyLoss([1, 2, 3])("y"), "2 classes"),
        (lambda: losses.CrossEntropyLoss(class_axis=2)("y"), "axis 2"),
        (lambda: losses.CrossEntropyLoss()("y", "z"), "INT64"),
        (lambda: losses.CrossEntropyLoss()("b"), "axes"),
        (lambda: losses.MSELoss()(blocks.Cast(TensorProto.INT64)("y")), "takes floats"),
        (lambda: losses.ModelLoss("no/such/file.onnx"), "cannot be read"),
        (lambda: losses.ModelLoss(onnx.ModelProto()), "no outputs"),
        (lambda: losses.FunctionLoss("mse"), "function"),
    ],
)
def test_wrong_losses(make: Any, message: str) -> None:
    with onnxblock.base(two_heads()), pytest.raises(OnnxTrainError, match=message):
        make()


def test_cross_entropy_upgrades_a_model_of_opset_11() -> None:
    with onnxblock.base(two_heads(11)) as accessor:
        losses.CrossEntropyLoss()("y")
    assert accessor.model.opset_import[0].version >= 12
    onnx.checker.check_model(accessor.model)


# ---- losses as functions and as models -----------------------------------------------------------


def absolute(prediction: str, target: str) -> str:
    return blocks.ReduceMean(keepdims=False)(blocks.Abs()(blocks.Sub()(prediction, target)))


def test_function_loss() -> None:
    block = Training(losses.FunctionLoss(absolute))
    block.requires_grad("w")
    with onnxblock.base(two_heads()):
        loss = block("y")
    target = rng.random((4, 2), dtype=np.float32)
    found = run_training(block.to_model_proto()[0], {"x": X, "target": target})
    np.testing.assert_allclose(found[loss], abs(Y - target).mean(), rtol=1e-5)


def test_function_loss_takes_outputs_first() -> None:
    forward = Forward(losses.FunctionLoss(absolute))
    with onnxblock.base(two_heads()):
        forward("y", "z")
    assert input_names(forward.to_model_proto()) == ["x"]


def test_labels_of_a_function_may_be_classes() -> None:
    def mixed(y: str, *, labels: str, extra: str, weight: float = 0.5) -> tuple[str, str]:
        ce = losses.CrossEntropyLoss()(y, labels)
        scaled = blocks.Mul()(losses.MSELoss()(y, extra), blocks.Constant(weight)())
        return blocks.Add()(ce, scaled), y

    forward = Forward(losses.FunctionLoss(mixed))
    with onnxblock.base(two_heads()):
        forward("y")
    assert forward.to_model_proto().graph.input[1].type.tensor_type.elem_type == TensorProto.INT64
    assert input_names(forward.to_model_proto()) == ["x", "labels", "extra"]


@pytest.mark.parametrize(
    ("function", "names", "message"),
    [
        (lambda y: y, ["y", "z"], "takes 1 name"),
        (lambda y: None, ["y"], "name"),
        (lambda y: y, [], "outputs of the model"),
        (lambda y, t, /: y, ["y"], "by keyword"),
    ],
)
def test_wrong_functions(function: Any, names: list[str], message: str) -> None:
    with onnxblock.base(two_heads()), pytest.raises(RuntimeError, match=message):
        losses.FunctionLoss(function)(*names)


def squared_loss_model(scores: str = "y", opset: int = 18) -> onnx.ModelProto:
    """scale · mean((scores - truth)²), and the difference; some names are those of two_heads."""
    nodes = [
        helper.make_node("Sub", [scores, "truth"], ["z"], "act"),
        helper.make_node("Mul", ["z", "z"], ["squared"], "squares"),
        helper.make_node("ReduceMean", ["squared"], ["mean"], keepdims=0),
        helper.make_node("Mul", ["mean", "w"], ["loss"]),
    ]
    return model(
        nodes,
        [value(scores, ["n", 2]), value("truth", ["n", 2])],
        [value("loss", []), value("z", ["n", 2])],
        {"w": np.float32(3.0)},
        opset=opset,
    )


@pytest.mark.parametrize("opset", [13, 18, 20])
@pytest.mark.parametrize("form", ["by name", "by position", "by mapping", "by path"])
def test_model_loss(form: str, opset: int, tmp_path: Path) -> None:
    scores = "y" if form in ("by name", "by path") else "scores"
    given: Any = squared_loss_model(scores, opset)
    if form == "by path":
        onnx.save(given, tmp_path / "loss.onnx")
        given = tmp_path / "loss.onnx"
    block = Training(losses.ModelLoss(given, {"scores": "y"} if form == "by mapping" else None))
    block.requires_grad("w")
    with onnxblock.base(two_heads()):
        names = block("y") if form == "by position" else block("y", "z")
    assert names[0] == "loss"
    assert names[1] != "z"
    training, _ = block.to_model_proto()
    assert input_names(training)[:2] == ["x", "truth"]
    truth = rng.random((4, 2), dtype=np.float32)
    found = run_training(training, {"x": X, "truth": truth})
    np.testing.assert_allclose(found["loss"], 3 * ((Y - truth) ** 2).mean(), rtol=1e-5)
    np.testing.assert_allclose(found[names[1]], Y - truth, rtol=1e-5, atol=1e-6)
    expected = 3 * 2 / 8 * X.T @ (Y - truth)
    np.testing.assert_allclose(found["w_grad.accumulation.out"], expected, rtol=1e-4, atol=1e-5)


def test_model_loss_that_matches_nothing() -> None:
    with onnxblock.base(two_heads()):
        with pytest.raises(RuntimeError, match="say which is which"):
            losses.ModelLoss(squared_loss_model("scores"))("y", "z")
        with pytest.raises(RuntimeError, match="no input 'score'"):
            losses.ModelLoss(squared_loss_model("scores"), {"score": "y"})("y")
        with pytest.raises(UnknownNameError, match="'nothing'"):
            losses.ModelLoss(squared_loss_model("scores"), {"scores": "nothing"})("y")


def test_model_loss_with_a_branch() -> None:
    def branch(factor: float, name: str) -> onnx.GraphProto:
        constant = helper.make_tensor("factor", TensorProto.FLOAT, [], [factor])
        node = helper.make_node("Mul", ["y", "factor"], ["z"])
        return helper.make_graph([node], name, [], [value("z", None)], [constant])

    nodes = [
        helper.make_node(
            "If", ["flag"], ["chosen"],
            then_branch=branch(2.0, "yes"), else_branch=branch(-1.0, "no"),
        ),
        helper.make_node("ReduceSum", ["chosen"], ["loss"], keepdims=0),
    ]  # fmt: skip
    inputs = [value("y", ["n", 2]), value("flag", [], TensorProto.BOOL)]
    forward = Forward(losses.ModelLoss(model(nodes, inputs, [value("loss", [])])))
    with onnxblock.base(two_heads()):
        forward("y", "z")
    for flag, factor in ((True, 2.0), (False, -1.0)):
        found = run(forward.to_model_proto(), {"x": X, "flag": np.array(flag)})
        np.testing.assert_allclose(found["loss"], factor * Y.sum(), rtol=1e-5)
