"""`prepare`: names or objects, the same artifacts as `generate_artifacts`, and clear errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from onnxtrain import artifacts
from onnxtrain.errors import ArgumentError, ArgumentTypeError, OnnxTrainError
from onnxtrain.offline import losses, optimizers
from onnxtrain.offline.lora import Lora
from onnxtrain.offline.named import make_named
from onnxtrain.offline.passes.remat.budget import parse_budget
from onnxtrain.offline.prepare import prepare


def classifier(activation: str = "", *, outputs: int = 1) -> onnx.ModelProto:
    """Two linear layers, 4 → 8 → 3, with named parameters."""
    random = np.random.default_rng(0)
    shapes = {"body.weight": (8, 4), "body.bias": (8,), "head.weight": (3, 8), "head.bias": (3,)}
    weights = [
        numpy_helper.from_array(random.normal(size=s).astype(np.float32), n)
        for n, s in shapes.items()
    ]
    scores = "scores" if activation else "output"
    nodes = [
        helper.make_node("Gemm", ["x", "body.weight", "body.bias"], ["hidden"], transB=1),
        helper.make_node("Relu", ["hidden"], ["features"]),
        helper.make_node("Gemm", ["features", "head.weight", "head.bias"], [scores], transB=1),
    ]
    if activation:
        nodes.append(helper.make_node(activation, [scores], ["output"]))
    names = ["output", "features"][:outputs]
    sizes = {"output": 3, "features": 8}
    graph = helper.make_graph(
        nodes,
        "classifier",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", sizes[n]]) for n in names],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def test_names_and_objects_write_the_same(tmp_path) -> None:
    by_name = prepare(
        classifier(), tmp_path / "a", loss="huber:delta=0.5", optimizer="sgd:momentum=0.9"
    )
    by_object = prepare(
        classifier(), tmp_path / "b",
        loss=losses.Huber(delta=0.5), optimizer=optimizers.SGD(momentum=0.9),
    )  # fmt: skip
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert by_name.trainable == by_object.trainable
    prepare(classifier(), tmp_path / "c", loss="huber", optimizer="sgd:momentum=0.9")
    assert content(tmp_path / "c")["step_model.onnx"] != content(tmp_path / "a")["step_model.onnx"]


def test_generate_artifacts_is_prepare_with_upstreams_arguments(tmp_path) -> None:
    prepare(
        classifier(), tmp_path / "a",
        train="head.*", loss="cross_entropy", optimizer="adamw", outputs=["output"],
    )  # fmt: skip
    artifacts.generate_artifacts(
        classifier(), requires_grad=["head.weight", "head.bias"],
        loss=artifacts.LossType.CrossEntropyLoss, optimizer=artifacts.OptimType.AdamW,
        artifact_directory=tmp_path / "b", additional_output_names=["output"],
    )  # fmt: skip
    assert content(tmp_path / "a") == content(tmp_path / "b")


def test_the_defaults(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = onnxtrain.prepare(classifier())
    assert made.directory == Path("artifacts")
    assert set(made.files) >= {"training_model.onnx", "eval_model.onnx", "step_model.onnx"}
    assert made.outputs == ("output",)
    assert set(made.trainable) == {"body.weight", "body.bias", "head.weight", "head.bias"}


def test_one_pattern_or_several(tmp_path) -> None:
    one = prepare(classifier(), tmp_path / "a", train="head.*")
    assert set(one.trainable) == {"head.weight", "head.bias"}
    several = prepare(classifier(), tmp_path / "b", train=["head.*", "*.bias"])
    assert set(several.trainable) == {"head.weight", "head.bias", "body.bias"}
    frozen = prepare(classifier(), tmp_path / "c", freeze="body.*")
    assert frozen.trainable == one.trainable


def test_new_classes(tmp_path) -> None:
    made = prepare(classifier("Softmax"), tmp_path, classes=5)
    assert sorted(made.trainable.values()) == [5, 40]
    with pytest.raises(ArgumentError, match="give classes too"):
        prepare(classifier(), tmp_path, after="features")
    with pytest.raises(ArgumentError, match="give one name"):
        prepare(classifier(outputs=2), tmp_path, classes=5, of=["output", "features"])


def test_a_softmax_that_the_loss_contains_is_skipped(tmp_path) -> None:
    made = prepare(classifier("Softmax"), tmp_path / "a")
    assert "computed from 'scores'" in made.notes[0]
    assert made.outputs == ("output",)
    plain = prepare(classifier(), tmp_path / "b")
    assert plain.notes == ()
    graph = onnx.load(tmp_path / "a" / "eval_model.onnx", load_external_data=False).graph
    loss = next(node for node in graph.node if node.op_type == "SoftmaxCrossEntropyLoss")
    assert loss.input[0] == "scores"


def test_logits_are_returned_beside_a_sigmoid(tmp_path) -> None:
    made = prepare(classifier("Sigmoid"), tmp_path, loss="bce")
    assert made.outputs == ("output", "scores")


def test_which_of_several_outputs(tmp_path) -> None:
    with pytest.raises(OnnxTrainError, match=r"2 outputs .*say which with of="):
        prepare(classifier(outputs=2), tmp_path)
    made = prepare(classifier(outputs=2), tmp_path, of="output")
    assert made.outputs == ("output", "features")


@pytest.mark.parametrize(
    ("text", "kind", "settings"),
    [
        ("mse", losses.MSE, {}),
        ("smooth-l1:beta=0.25", losses.SmoothL1, {"beta": 0.25}),
        ("CROSS_ENTROPY:label_smoothing=0.1,ignore_index=-1", losses.CrossEntropy,
         {"smoothing": 0.1, "ignore_index": -1}),
        ("l1:reduction=sum", losses.L1, {"reduction": "sum"}),
    ],
)  # fmt: skip
def test_losses_by_name(text, kind, settings) -> None:
    made = make_named(text, losses.BY_NAME, "loss")
    assert type(made) is kind
    assert {name: getattr(made, name) for name in settings} == settings


def test_none_may_be_a_word_of_its_own() -> None:
    assert make_named("mse:reduction=none", losses.BY_NAME, "loss").reduction == "none"
    made = make_named("cross_entropy:ignore_index=none", losses.BY_NAME, "loss")
    assert made.ignore_index is None
    for wrong in ("pad", "1.5", "[1]", "true"):
        with pytest.raises(ArgumentError, match="ignore_index takes a value such as None, not"):
            make_named(f"cross_entropy:ignore_index={wrong}", losses.BY_NAME, "loss")


def test_names_that_are_numbers() -> None:
    assert make_named("lora:layers=0", {"lora": Lora}, "train").layers == "0"


def test_an_optimizer_with_clipping_by_name() -> None:
    made = make_named("adamw:weight_decay=0.01,clip_norm=1.0", optimizers.BY_NAME, "optimizer")
    assert made.weight_decay == 0.01
    assert isinstance(made.clip_grad, optimizers.ClipGradNorm)


@pytest.mark.parametrize("word", ["true", "True"])
def test_flags_by_name(word: str) -> None:
    made = make_named(f"sgd:momentum=0.9,nesterov={word}", optimizers.BY_NAME, "optimizer")
    assert made.nesterov is True


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("adagrd", "none of adamw, .*did you mean 'adagrad'"),
        ("adamw:decay=1", "adamw has no decay: it has .*weight_decay"),
        ("adamw:0.1", "written name=value, not '0.1'"),
        ("sgd:nesterov=maybe", "nesterov takes a value such as False, not 'maybe'"),
        ("sgd:momentum=much", "momentum takes a value such as 0.0, not 'much'"),
        ("sgd:momentum=none", "momentum takes a value such as 0.0, not 'none'"),
        ("adamw:clip_norm=abc", "clip_norm takes a value such as 1.0, not 'abc'"),
        ("adamw:betas=3", r"betas takes a value such as \(0.9, 0.999\), not '3'"),
        ("mezo:clip_norm=1", "mezo has no clip_norm: it has epsilon"),
    ],
)
def test_names_that_mean_nothing(text, message) -> None:
    with pytest.raises(ArgumentError, match=message):
        make_named(text, optimizers.BY_NAME, "optimizer")


def test_what_is_neither_a_name_nor_an_object(tmp_path) -> None:
    with pytest.raises(ArgumentTypeError, match="optimizer is a name"):
        prepare(classifier(), tmp_path, optimizer=3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="loss is a name"):
        prepare(classifier(), tmp_path, loss=3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="needs an optimizer"):
        prepare(classifier(), tmp_path, optimizer=None, proximal=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("budget", "number"),
    [(0.5, 0.5), ("50%", 0.5), ("0.5", 0.5), (1000, 1000), ("1 KB", 1024), ("1.5mb", 3 << 19)],
)
def test_budgets(budget, number) -> None:
    assert parse_budget(budget) == number
    assert type(parse_budget(budget)) is type(number)


@pytest.mark.parametrize("budget", ["half", "50 apples", "-1MB", 0, -2.0, True, None])
def test_what_is_no_budget(budget) -> None:
    with pytest.raises(OnnxTrainError, match="memory_budget is"):
        parse_budget(budget)


@pytest.mark.parametrize(
    "loss",
    [
        losses.CrossEntropy(weight=[1.0, 2.0, 3.0], label_smoothing=0.1),
        losses.BCEWithLogits(weight=[[0.5, 1.0, 2.0]], pos_weight=[2.0, 2.0, 2.0]),
        losses.Huber(delta=0.5),
        lambda output: onnxtrain.onnxblock.blocks.Add()(
            losses.MSE()(output),
            onnxtrain.onnxblock.blocks.Mul()(
                onnxtrain.onnxblock.blocks.ReduceSum(keepdims=False)("head.weight"),
                onnxtrain.onnxblock.blocks.Constant([0.01])(),
            ),
        ),
    ],
    ids=["cross_entropy", "bce", "huber", "regularised"],
)
def test_what_a_loss_brings_does_not_train(tmp_path, loss) -> None:
    made = prepare(classifier(), tmp_path, loss=loss)
    assert set(made.trainable) == {"body.weight", "body.bias", "head.weight", "head.bias"}
