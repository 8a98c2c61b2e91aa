"""Losses that users bring to `generate_artifacts`, held against torch."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import onnxtrain
from artifact_device import Device, close
from graphs import model, value
from onnxtrain import onnxblock
from onnxtrain.artifacts import LossType, generate_artifacts
from onnxtrain.errors import ArgumentTypeError, BlockError, OnnxTrainError, TrainingWarning
from onnxtrain.onnxblock import blocks

WEIGHT = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
X = np.random.default_rng(1).standard_normal((5, 3)).astype(np.float32)
TARGET = np.random.default_rng(2).random((5, 4)).astype(np.float32)


def two_outputs() -> onnx.ModelProto:
    """Scores x w, and twice the scores."""
    return model(
        [
            helper.make_node("MatMul", ["x", "w"], ["scores"], "scores"),
            helper.make_node("Add", ["scores", "scores"], ["other"], "other"),
        ],
        [value("x", ["n", 3])],
        [value("scores", ["n", 4]), value("other", ["n", 4])],
        {"w": WEIGHT},
    )


def squared_distance() -> onnx.ModelProto:
    """An ONNX model of a loss, with names of its own."""
    return model(
        [
            helper.make_node("Sub", ["prediction", "truth"], ["difference"]),
            helper.make_node("Mul", ["difference", "difference"], ["square"]),
            helper.make_node("ReduceMean", ["square"], ["distance"], keepdims=0),
        ],
        [value("prediction", ["n", 4]), value("truth", ["n", 4])],
        [value("distance", [])],
        {},
    )


def compare(folder: Path, expected, **feeds: np.ndarray) -> None:
    """Loss and gradient are those of a function of torch, of x w and the feeds."""
    w = torch.tensor(WEIGHT, requires_grad=True)
    loss = expected(torch.tensor(X) @ w, *(torch.tensor(feed) for feed in feeds.values()))
    loss.backward()
    results = Device(folder).train(x=X, **feeds)
    assert next(iter(results.values())).item() == pytest.approx(loss.item(), rel=1e-5)
    close(results["w_grad.accumulation.out"], w.grad.numpy(), "w")


F = torch.nn.functional


@pytest.mark.parametrize("names", [["other", "wanted"], ["other"]])
def test_an_onnx_model_called_with_names(names: list[str], tmp_path: Path) -> None:
    generate_artifacts(
        two_outputs(), loss=squared_distance(), loss_input_names=names, artifact_directory=tmp_path
    )
    label = [*names, "truth"][1]
    compare(tmp_path, lambda y, t: F.mse_loss(2 * y, t), **{label: TARGET})


def test_an_onnx_model_by_path_compares_two_outputs(tmp_path: Path) -> None:
    onnx.save(squared_distance(), tmp_path / "loss.onnx")
    generate_artifacts(
        two_outputs(), loss=tmp_path / "loss.onnx", loss_input_names=["other", "scores"],
        artifact_directory=tmp_path / "out",
    )  # fmt: skip
    compare(tmp_path / "out", lambda y: (y * y).mean())


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (None, "say which is which"),
        (["scores", "a", "b"], "has 2 input"),
        (["yes", "no"], "none of the values 'yes', 'no'"),
    ],
)
def test_an_onnx_model_that_does_not_fit(names, words: str, tmp_path: Path) -> None:
    with pytest.raises(OnnxTrainError, match=words):
        generate_artifacts(
            two_outputs(), loss=squared_distance(), loss_input_names=names,
            artifact_directory=tmp_path / "out",
        )  # fmt: skip
    assert not (tmp_path / "out").exists()


def test_a_function_with_two_labels(tmp_path: Path) -> None:
    def loss(scores, other, mask, *, truth):
        difference = blocks.Sub()(blocks.Mul()(scores, mask), truth)
        return blocks.ReduceSum(keepdims=False)(blocks.Abs()(difference)), other

    written = generate_artifacts(two_outputs(), loss=loss, artifact_directory=tmp_path)
    assert written.outputs == ("other",)
    mask = (TARGET > 0.5).astype(np.float32)
    compare(tmp_path, lambda y, m, t: (y * m - t).abs().sum(), mask=mask, truth=TARGET)


class WithConstants(onnxblock.Block):
    """Written as upstream's users do: no super().__init__(), nodes added by hand."""

    def __init__(self, weight: float) -> None:
        self.weight = blocks.Constant(weight)
        self.mul, self.loss = blocks.Mul(), onnxblock.loss.CrossEntropyLoss()

    def build(self, scores, *others):
        scaled = self.mul(self.weight(), scores)
        self.base.graph.node.append(helper.make_node("Tanh", [scaled], ["squashed"], "squash"))
        shape = onnx.TypeProto()
        shape.CopyFrom(self.base.graph.output[0].type)
        self.base.graph.value_info.append(onnx.ValueInfoProto(name="squashed", type=shape))
        return self.loss("squashed", "classes")


def test_nodes_that_a_block_adds_by_hand(tmp_path: Path) -> None:
    generate_artifacts(two_outputs(), loss=WithConstants(0.5), artifact_directory=tmp_path)
    classes = np.array([0, 3, 1, 1, 2])
    expected = lambda y, c: F.cross_entropy(torch.tanh(0.5 * y), c)  # noqa: E731
    compare(tmp_path, expected, classes=classes)


TERMS = {
    "weights": (
        lambda: onnxblock.loss.CrossEntropyLoss(weight=[1.0, 2.0, 3.0, 0.5]),
        lambda y, c: F.cross_entropy(y, c, torch.tensor([1.0, 2.0, 3.0, 0.5])),
    ),
    "smoothing": (
        lambda: onnxblock.loss.CrossEntropyLoss(label_smoothing=0.2),
        lambda y, c: F.cross_entropy(y, c, label_smoothing=0.2),
    ),
    "ignored": (
        lambda: onnxblock.loss.CrossEntropyLoss(ignore_index=1),
        lambda y, c: F.cross_entropy(y, c, ignore_index=1),
    ),
    "sum": (
        lambda: onnxblock.loss.CrossEntropyLoss(reduction="sum"),
        lambda y, c: F.cross_entropy(y, c, reduction="sum"),
    ),
}


@pytest.mark.parametrize("case", TERMS)
def test_cross_entropy_with_options(case: str, tmp_path: Path) -> None:
    made, expected = TERMS[case]
    generate_artifacts(
        two_outputs(), loss=made(), loss_input_names=["scores"], artifact_directory=tmp_path
    )
    compare(tmp_path, expected, labels=np.array([0, 3, 1, 1, 2]))


def test_scores_of_a_sequence(tmp_path: Path) -> None:
    """Scores (batch, sequence, classes), as language models have them."""
    given = model(
        [helper.make_node("MatMul", ["x", "w"], ["scores"], "scores")],
        [value("x", ["n", "length", 3])],
        [value("scores", ["n", "length", 4])],
        {"w": WEIGHT},
    )
    loss = onnxblock.loss.CrossEntropyLoss(class_axis=-1, ignore_index=-100)
    generate_artifacts(given, loss=loss, artifact_directory=tmp_path)
    rng = np.random.default_rng(3)
    x, labels = rng.standard_normal((2, 6, 3)).astype(np.float32), rng.integers(0, 4, (2, 6))
    labels[0, :3] = -100
    w = torch.tensor(WEIGHT, requires_grad=True)
    expected = F.cross_entropy((torch.tensor(x) @ w).flatten(0, 1), torch.tensor(labels).flatten())
    expected.backward()
    results = Device(tmp_path).train(x=x, labels=labels)
    assert next(iter(results.values())) == pytest.approx(expected.item(), rel=1e-5)
    close(results["w_grad.accumulation.out"], w.grad.numpy(), "w")


@pytest.mark.parametrize("kind", [LossType.MSELoss, LossType.CrossEntropyLoss])
def test_sizes_of_the_traced_example_are_no_sizes_of_labels(kind: LossType, tmp_path: Path) -> None:
    """Exporters that trace may declare the batch of the example for the output."""
    given = two_outputs()
    del given.graph.output[1], given.graph.node[1]
    given.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 1
    generate_artifacts(given, loss=kind, artifact_directory=tmp_path)
    if kind is LossType.MSELoss:
        compare(tmp_path, F.mse_loss, target=TARGET)
    else:
        compare(tmp_path, F.cross_entropy, labels=np.array([0, 3, 1, 1, 2]))


def test_a_target_of_another_type_that_the_model_has(tmp_path: Path) -> None:
    """The second name of loss_input_names may be a value that is there already."""
    given = two_outputs()
    given.graph.input.append(value("labels", ["n"], TensorProto.INT32))
    generate_artifacts(
        given, loss=LossType.CrossEntropyLoss, loss_input_names=["scores", "labels"],
        artifact_directory=tmp_path,
    )  # fmt: skip
    labels = np.array([0, 3, 1, 1, 2])
    w = torch.tensor(WEIGHT, requires_grad=True)
    F.cross_entropy(torch.tensor(X) @ w, torch.tensor(labels)).backward()
    results = Device(tmp_path).train(x=X, labels=labels.astype(np.int32))
    close(results["w_grad.accumulation.out"], w.grad.numpy(), "w")


@pytest.mark.parametrize("loss", [torch.nn.CrossEntropyLoss(), lambda y, target: (y - target) ** 2])
def test_functions_of_tensors_are_refused(loss: Any, tmp_path: Path) -> None:
    given = two_outputs()
    with pytest.raises(BlockError, match="functions of arrays or tensors cannot become a graph"):
        onnxtrain.prepare(given, tmp_path, loss=loss, of="scores")


def test_arguments_that_a_function_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(
        ArgumentTypeError, match="no argument 'optimiser': did you mean 'optimizer'"
    ):
        onnxtrain.prepare(two_outputs(), tmp_path, optimiser="adamw")  # type: ignore[call-arg]
    with pytest.raises(ArgumentTypeError, match=r"prepare\(\): missing a required argument"):
        onnxtrain.prepare()  # type: ignore[call-arg]


def test_scores_of_one_class_are_warned_of(tmp_path: Path) -> None:
    given = model(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [value("x", ["n", 3])],
        [value("y", ["n", 1])],
        {"w": WEIGHT[:, :1]},
    )
    with pytest.warns(TrainingWarning, match="'y' are of one class.* 'bce'"):
        onnxtrain.prepare(given, tmp_path, loss="cross_entropy")


def test_names_of_losses_as_others_write_them(tmp_path: Path) -> None:
    for name in ("crossentropy", "CrossEntropy", "cross-entropy"):
        made = onnxtrain.prepare(two_outputs(), tmp_path, loss=name, of="scores")
        assert made.loss
    with pytest.raises(OnnxTrainError) as caught:
        onnxtrain.prepare(two_outputs(), tmp_path, loss="ce", of="scores")
    assert "did you mean" not in str(caught.value)
