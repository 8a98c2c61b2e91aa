"""What is told of a model before anything ships, by `inspect` and by `generate_artifacts`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import onnxtrain
from exporting import export
from graphs import linear, model, value
from onnxtrain.artifacts import LossType, OptimType, generate_artifacts
from onnxtrain.errors import ModelError, UnknownNameError
from zoo import Bert, MobileNetV2, ResNet18


def rounded() -> onnx.ModelProto:
    """A table that only a rounding leads to, an int table, and a weight."""
    return model(
        [
            helper.make_node("Round", ["table"], ["whole"], "round"),
            helper.make_node("Gather", ["whole", "places"], ["picked"], "gather"),
            helper.make_node("Mul", ["x", "w"], ["scaled"], "mul"),
            helper.make_node("Add", ["scaled", "picked"], ["y"], "add"),
        ],
        [value("x", ["n", 3])],
        [value("y", ["n", 3])],
        {
            "table": np.ones((4, 3), np.float32),
            "places": np.array([1]),
            "w": np.ones(3, np.float32),
        },
    )


def test_roles_of_initializers() -> None:
    report = onnxtrain.inspect(rounded())
    assert (report.weights, report.constants) == ({"w": 3}, {"table": 12, "places": 1})
    assert report.unreached == ("table",) and report.can_train
    assert "not reached   table" in str(report)


def test_settings_of_operators_are_no_weights() -> None:
    given = model(
        [
            helper.make_node("Mul", ["x", "w"], ["scaled"], "mul"),
            helper.make_node("Resize", ["scaled", "", "scales"], ["y"], "up", mode="nearest"),
        ],
        [value("x", ["n", 2, 4, 4])],
        [value("y", ["n", 2, 8, 8])],
        {"w": np.ones(4, np.float32), "scales": np.array([1, 1, 2, 2], np.float32)},
    )
    report = onnxtrain.inspect(given)
    assert list(report.weights) == ["w"] and report.unreached == ()


@pytest.mark.parametrize("bn", [None, "batch", "frozen"])
def test_running_statistics_are_told_in_every_mode(bn: str | None) -> None:
    torch.manual_seed(0)
    net = ResNet18().train()
    report = onnxtrain.inspect(export(net, torch.randn(2, 3, 16, 16), "torchscript"), bn=bn)
    assert len(report.statistics) == 40 and "bn1.running_mean" in report.statistics
    assert report.parameter_count == sum(p.numel() for p in net.parameters())
    assert report.parameter_bytes == 4 * report.parameter_count


def test_an_operator_without_gradient() -> None:
    given = model(
        [
            helper.make_node("Mul", ["x", "w"], ["scaled"], "mul"),
            helper.make_node("NotKnown", ["scaled"], ["y"], "own", domain="my.own"),
        ],
        [value("x", ["n", 3])],
        [value("y", ["n", 3])],
        {"w": np.ones(3, np.float32)},
    )
    given.opset_import.add(domain="my.own", version=1)
    report = onnxtrain.inspect(given)
    assert not report.can_train and report.activations is None
    (reason,) = report.without_gradient
    assert "my.own.NotKnown (node 'own')" in reason
    assert "there is no gradient" in str(report)


def test_artifacts_tell_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = MobileNetV2().eval()
    written = generate_artifacts(
        export(net, torch.randn(2, 3, 64, 64), "torchscript"),
        requires_grad=["classifier.*"],
        loss=LossType.CrossEntropyLoss,
        optimizer=OptimType.AdamW,
        artifact_directory=tmp_path,
    )
    assert written.parameter_count == sum(p.numel() for p in net.classifier.parameters())
    # The weights that are in neither list are frozen: they are stored once, in the checkpoint.
    assert sum(written.frozen.values()) >= sum(p.numel() for p in net.features.parameters())
    assert written.files == {f.name: f.stat().st_size for f in tmp_path.iterdir()}
    assert written.unreached == () and written.without_gradient == ()
    told = str(written)
    for words in ("trains        2 tensors", "per sample", "step_model.onnx", written.loss):
        assert words in told


def test_what_would_stand_in_the_way_of_training_more(tmp_path: Path) -> None:
    given = model(
        [
            helper.make_node("Mul", ["x", "w"], ["scaled"], "mul"),
            helper.make_node("NotKnown", ["scaled"], ["hidden"], "own", domain="my.own"),
            helper.make_node("Mul", ["hidden", "v"], ["product"], "head"),
            helper.make_node("ReduceMean", ["product"], ["loss"], "mean", keepdims=0),
        ],
        [value("x", ["n", 3])],
        [value("loss", [])],
        {"w": np.ones(3, np.float32), "v": np.ones(3, np.float32)},
    )
    given.opset_import.add(domain="my.own", version=1)
    given.graph.value_info.append(value("hidden", ["n", 3]))
    written = generate_artifacts(given, ["v"], artifact_directory=tmp_path)
    assert list(written.trainable) == ["v"]
    assert "my.own.NotKnown" in written.without_gradient[0]
    assert "no gradient   my.own.NotKnown" in str(written)


# ---- before anything is written ------------------------------------------------------------------


def classifier(batch: int | str, last: str, opset: int = 13) -> onnx.ModelProto:
    """Conv with bias, pool, Gemm, and what comes last."""
    return model(
        [
            helper.make_node("Conv", ["x", "k1", "b1"], ["c1"], "conv1"),
            helper.make_node("Conv", ["c1", "k2", "b2"], ["c2"], "conv2"),
            helper.make_node("GlobalAveragePool", ["c2"], ["pooled"], "pool"),
            helper.make_node("Flatten", ["pooled"], ["flat"], "flat"),
            helper.make_node("Gemm", ["flat", "w", "b"], ["scores"], "head"),
            helper.make_node(last, ["scores"], ["y"], "last"),
        ],
        [value("x", [batch, 3, 8, 8])],
        [value("y", [batch, 5]) if last != "ArgMax" else value("y", [1, 5], TensorProto.INT64)],
        {
            "k1": np.ones((4, 3, 3, 3), np.float32), "b1": np.ones(4, np.float32),
            "k2": np.ones((6, 4, 3, 3), np.float32), "b2": np.ones(6, np.float32),
            "w": np.ones((6, 5), np.float32), "b": np.ones(5, np.float32),
        },
        opset=opset,
        producer_name="exporter", producer_version="1.2",
    )  # fmt: skip


def test_what_a_user_has_to_know() -> None:
    report = onnxtrain.inspect(classifier("n", "Relu"))
    assert report.inputs == {"x": "float32[n, 3, 8, 8]"}
    assert report.output_types == {"y": "float32[n, 5]"}
    assert (report.file_opset, report.opset, report.ir_version) == (13, 18, 8)
    assert report.producer == "exporter 1.2"
    assert report.features == {"pooled": "float32[n, 6, 1, 1]"}
    shown = str(report)
    for words in (
        "x float32[n, 3, 8, 8]", "opset 13, upgraded to 18, IR version 8, from exporter 1.2",
        "2 weights of Conv ('k1', 'k2')", "after=        pooled",
        "verdict       trains wholly: all 6 weights",
    ):  # fmt: skip
        assert words in shown


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (classifier("n", "Relu"), "No BatchNormalization left: folded into Conv?"),
        (classifier("n", "Softmax"), "'y' comes out of Softmax.*of='scores'.*does so by itself"),
        (classifier("n", "LogSoftmax"), "'y' comes out of LogSoftmax"),
        (classifier("n", "Sigmoid"), "'y' comes out of Sigmoid, which bce contains"),
        (classifier(1, "Relu"), "batch is fixed at 1: .*batch_size=1, accumulate=32"),
        (classifier(4, "Relu"), "batch is fixed at 4"),
    ],
)
def test_notes(given: onnx.ModelProto, words: str) -> None:
    notes = onnxtrain.inspect(given).notes
    assert any(re.search(words, note) for note in notes), notes


def test_few_notes_where_all_is_well() -> None:
    given = classifier("n", "Relu")
    del given.graph.node[0].input[2], given.graph.initializer[1]
    assert onnxtrain.inspect(given).notes == ()


def test_names_of_tensorflow_tell_that_batch_normalization_was_folded() -> None:
    given = classifier("n", "Relu")
    del given.graph.node[0].input[2], given.graph.initializer[1]
    given.graph.node[1].name = "block/bn/batchnorm/add_1"
    assert "No BatchNormalization left" in onnxtrain.inspect(given).notes[0]


@pytest.mark.parametrize("training", [False, True])
def test_the_mode_of_batch_normalization(training: bool) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)).train(training)
    notes = onnxtrain.inspect(export(net, torch.randn(2, 3, 8, 8), "torchscript")).notes
    words = "1 of 1 BatchNormalization use the statistics of the batch" if training else "stored"
    assert len(notes) == 1 and words in notes[0]


def test_an_output_without_gradient() -> None:
    report = onnxtrain.inspect(classifier(1, "ArgMax"))
    assert not report.can_train and report.weights == {}
    assert report.verdict.startswith("does not train: no gradient comes to 'k1'")
    assert report.features and "after=" in report.verdict


def test_a_classifier_that_cannot_be_replaced_names_what_after_can_be() -> None:
    with pytest.raises(ModelError, match=r"ArgMax.*after='\.\.\.'\. It can read 'pooled'"):
        onnxtrain.replace_classifier(classifier(1, "ArgMax"), 3)
    replaced = onnxtrain.replace_classifier(classifier("n", "ArgMax"), 3, after="pooled")
    assert onnxtrain.inspect(replaced.model).can_train


# ---- memory --------------------------------------------------------------------------------------


def chain(*dims: int | str) -> onnx.ModelProto:
    """Three activations in a row, of 4 bytes for each element of the input."""
    names = ["x", "a", "b", "y"]
    nodes = [
        helper.make_node("Sigmoid", [source], [target], target)
        for source, target in zip(["m", "a", "b"], names[1:], strict=True)
    ]
    return model(
        [helper.make_node("Mul", ["x", "w"], ["m"], "mul"), *nodes],
        [value("x", list(dims))],
        [value("y", list(dims))],
        {"w": np.ones(dims[-1:], np.float32)},
    )


def test_what_the_backward_pass_keeps() -> None:
    """Three activations of 400 bytes are kept; the gradient needs a few more, none in place."""
    found = onnxtrain.inspect(chain("n", 100)).activations
    assert found is not None and (found.batch, found.assumed) == ("n", {})
    assert 4 * 400 <= found.bytes_per_sample <= 8 * 400
    assert found.fixed_bytes < 400  # the gradient of w is given out


def test_sizes_are_given_or_assumed() -> None:
    text = onnxtrain.inspect(chain("n", "length", 10)).activations
    image = onnxtrain.inspect(chain("n", 3, "height", 10)).activations
    assert image is not None and image.assumed == {"height": 224}
    assert (
        text is not None
        and text.assumed == {"length": 128}
        and "assuming length = 128" in str(text)
    )
    shorter = onnxtrain.inspect(chain("n", "length", 10), sizes={"length": 64}).activations
    assert shorter is not None and shorter.assumed == {}
    assert 2 * shorter.bytes_per_sample == text.bytes_per_sample
    fixed = onnxtrain.inspect(chain("n", "length", 10), sizes={"length": 64, "n": 3}).activations
    assert fixed is not None and (fixed.batch, fixed.bytes_per_sample) == ("", 0)
    assert fixed.fixed_bytes >= 3 * shorter.bytes_per_sample
    static = onnxtrain.inspect(chain(3, 64, 10)).activations
    assert static is not None and (static.batch, static.assumed) == ("", {})
    assert static.fixed_bytes == pytest.approx(fixed.fixed_bytes, rel=0.01)
    with pytest.raises(UnknownNameError, match=r"'width'.*'n', 'length'"):
        onnxtrain.inspect(chain("n", "length", 10), sizes={"width": 3})


def test_artifacts_estimate_for_given_sizes(tmp_path: Path) -> None:
    written = generate_artifacts(linear(), artifact_directory=tmp_path)
    assert written.activation_bytes_per_sample == written.activations.bytes_per_sample > 0
    many = written.estimate_memory({"batch": 1000}).fixed_bytes
    assert many >= 1000 * written.activation_bytes_per_sample


def test_sizes_of_labels_follow(tmp_path: Path) -> None:
    """An exporter may have other names for the sizes of outputs, which are those of the labels."""
    given = chain("n", "length", 10)
    for dim, name in zip(given.graph.output[0].type.tensor_type.shape.dim, "abc", strict=True):
        dim.dim_param = name
    written = generate_artifacts(given, loss=LossType.MSELoss, artifact_directory=tmp_path)
    assert written.activations.assumed == {"length": 128}
    twice = written.estimate_memory({"length": 256})
    assert twice.bytes_per_sample == 2 * written.activation_bytes_per_sample


NETWORKS = {
    "ResNet18": (lambda: ResNet18(32).train(), lambda n: torch.randn(n, 3, 32, 32)),
    "Bert": (lambda: Bert(4, 128, 4, 1000), lambda n: torch.randint(0, 1000, (n, 64))),
}


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="peak memory is not told here"
)
@pytest.mark.parametrize("name", NETWORKS)
def test_the_estimate_is_near_what_onnxruntime_takes(name: str, tmp_path: Path) -> None:
    """Within a factor of 1.6; both were 1.2 to 1.3 above the estimate when this was written."""
    torch.manual_seed(0)
    make, data = NETWORKS[name]
    written = generate_artifacts(
        export(make(), data(2), "torchscript"),
        loss=LossType.CrossEntropyLoss,
        artifact_directory=tmp_path,
    )
    few, many = (measured(tmp_path / "training_model.onnx", n) for n in (16, 32))
    per_sample = (many - few) / 16
    assert per_sample / 1.6 < written.activation_bytes_per_sample < per_sample * 1.6


def measured(graph: Path, batch: int) -> int:
    program = Path(__file__).with_name("measure_memory.py")
    result = subprocess.run(
        [sys.executable, str(program), str(graph), str(batch)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return int(result.stdout)
