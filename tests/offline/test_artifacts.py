"""`generate_artifacts`: what it writes, and that stock onnxruntime trains with it."""

import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import helper

from artifact_device import Device, close, torch_gradients
from exporting import export
from graphs import linear, model, value
from onnxtrain import onnxblock
from onnxtrain.artifacts import LossType, OptimType, generate_artifacts
from onnxtrain.errors import OnnxTrainError
from onnxtrain.format.checkpoint.file import read_checkpoint
from zoo import MLP, Bert, MobileNetV2, ResNet18

FILES = {"training_model.onnx", "eval_model.onnx", "checkpoint"}
WITH_OPTIMIZER = FILES | {"optimizer_model.onnx", "step_model.onnx"}


def test_the_mnist_flow(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = MLP()
    forward = export(net, torch.randn(3, 20), "torchscript")
    written = generate_artifacts(
        forward,
        requires_grad=[n for n, _ in net.named_parameters()],
        loss=LossType.CrossEntropyLoss,
        optimizer=OptimType.AdamW,
        artifact_directory=tmp_path / "made" / "here",
        additional_output_names=["y"],
    )
    assert set(written.files) == WITH_OPTIMIZER
    assert set(os.listdir(tmp_path / "made" / "here")) == WITH_OPTIMIZER
    assert written.outputs == ("y",) and len(written.trainable) == 4
    device = Device(written.directory)
    x, labels = torch.randn(8, 20), torch.randint(0, 5, (8,))
    loss, expected = torch_gradients(net, x, labels)
    feeds = {"x": x.numpy(), "labels": labels.numpy()}
    results = device.train(**feeds)
    assert results[written.loss] == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(results["y"], net(x).detach().numpy(), rtol=1e-4, atol=1e-5)
    for name, gradient in expected.items():
        close(results[f"{name}_grad.accumulation.out"], gradient, name)


def test_the_interface_that_upstream_had(tmp_path: Path) -> None:
    generate_artifacts(linear(), ["w", "b"], artifact_directory=tmp_path, optimizer=OptimType.SGD)
    training = onnx.load(tmp_path / "training_model.onnx")
    assert [i.name for i in training.graph.input] == [
        "x", "w", "b", "w_grad.accumulation.buffer", "b_grad.accumulation.buffer",
        "lazy_reset_grad",
    ]  # fmt: skip
    outputs = ["loss", "y", "w_grad.accumulation.out", "b_grad.accumulation.out"]
    # What upstream lacked comes last.
    assert [o.name for o in training.graph.output] == [*outputs, "updated_flag", "finite_check"]
    evaluation = onnx.load(tmp_path / "eval_model.onnx")
    assert [i.name for i in evaluation.graph.input] == ["x", "w", "b"]
    assert {n.domain for n in evaluation.graph.node} == {""}
    assert {n.domain for n in training.graph.node} <= {"", "ai.onnxtrain"}  # and their functions


def test_gradients_accumulate_until_they_are_reset(tmp_path: Path) -> None:
    generate_artifacts(linear(), artifact_directory=tmp_path)
    device = Device(tmp_path)
    x = np.ones((2, 3), np.float32)
    first = device.train(x=x)
    buffers = {
        f"{p}_grad.accumulation.buffer": first[f"{p}_grad.accumulation.out"]
        for p in device.trainable
    }
    both = device.run("training_model", x=x, lazy_reset_grad=np.array([False]), **buffers)
    for p in device.trainable:
        name = f"{p}_grad.accumulation.out"
        np.testing.assert_allclose(both[name], 2 * first[name], rtol=1e-6)


@pytest.mark.parametrize("kind", [OptimType.AdamW, OptimType.SGD])
def test_the_fused_step_is_the_three_graphs_in_one(tmp_path: Path, kind: OptimType) -> None:
    torch.manual_seed(0)
    forward = export(MLP(), torch.randn(3, 20), "torchscript")
    generate_artifacts(
        forward, loss=LossType.CrossEntropyLoss, optimizer=kind, artifact_directory=tmp_path
    )
    apart, fused = Device(tmp_path), Device(tmp_path)
    rng = np.random.default_rng(0)
    losses = []
    for number in range(1, 11):
        feeds = {"x": rng.standard_normal((8, 20)).astype(np.float32), "labels": np.arange(8) % 5}
        losses.append((apart.step(number, 0.05, **feeds), fused.fused_step(number, 0.05, **feeds)))
    for one, other in losses:
        assert one == pytest.approx(other, rel=1e-4)
    for name in apart.trainable:
        np.testing.assert_allclose(apart.values[name], fused.values[name], rtol=1e-3, atol=1e-5)


def test_training_fits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    forward = export(MLP(), torch.randn(3, 20), "torchscript")
    generate_artifacts(
        forward,
        loss=LossType.CrossEntropyLoss,
        optimizer=OptimType.AdamW,
        artifact_directory=tmp_path,
    )
    device = Device(tmp_path)
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((32, 20)).astype(np.float32), rng.integers(0, 5, 32)
    losses = [device.fused_step(n, 0.02, x=x, labels=labels) for n in range(1, 60)]
    assert losses[-1] < 0.1 * losses[0]
    evaluated = device.run("eval_model", x=x, labels=labels)
    assert next(iter(evaluated.values())) < losses[-1] * 1.1


def test_a_head_alone_trains_and_the_rest_is_stored_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = MobileNetV2().eval()
    forward = export(net, torch.randn(2, 3, 64, 64), "torchscript")
    written = generate_artifacts(
        forward,
        requires_grad=["classifier.*"],
        frozen_params=["features.*"],
        loss=LossType.CrossEntropyLoss,
        optimizer=OptimType.AdamW,
        artifact_directory=tmp_path,
    )
    assert set(written.trainable) == {"classifier.1.weight", "classifier.1.bias"}
    weights = sum(p.numel() for p in net.parameters()) * 4
    assert weights < written.files["checkpoint"] < 1.5 * weights
    for file in tmp_path.glob("*.onnx"):
        graph = onnx.load(file, load_external_data=False).graph
        assert all(len(t.raw_data) < 1024 for t in graph.initializer), "graphs hold no weights"
    x, labels = torch.randn(3, 3, 64, 64), torch.tensor([1, 2, 3])
    loss, expected = torch_gradients(net, x, labels)
    results = Device(tmp_path).train(x=x.numpy(), labels=labels.numpy())
    assert results[written.loss] == pytest.approx(loss, rel=1e-4)
    for name in written.trainable:
        close(results[f"{name}_grad.accumulation.out"], expected[name], name)


def test_batch_norm_keeps_running_statistics(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = ResNet18().train()
    forward = export(net, torch.randn(3, 3, 16, 16), "torchscript")
    written = generate_artifacts(
        forward,
        loss=LossType.CrossEntropyLoss,
        optimizer=OptimType.SGD,
        artifact_directory=tmp_path,
    )
    assert len(written.trainable) == len(list(net.parameters()))
    assert len(written.statistics) == 40 and not written.frozen
    device = Device(tmp_path)
    x, labels = torch.randn(6, 3, 16, 16), torch.arange(6)
    before = device.values["bn1.running_mean"].copy()
    device.fused_step(1, 0.0, x=x.numpy(), labels=labels.numpy())
    torch_gradients(net, x, labels)
    assert not np.array_equal(device.values["bn1.running_mean"], before)
    close(device.values["bn1.running_mean"], net.bn1.running_mean.numpy(), "bn1.running_mean")
    evaluated = device.run("eval_model", x=x.numpy(), labels=labels.numpy())
    with torch.no_grad():
        net.eval()
        expected = torch.nn.functional.cross_entropy(net(x), labels).item()
    # torch keeps the unbiased variance, ONNX the other
    assert next(iter(evaluated.values())) == pytest.approx(expected, rel=0.1)


def test_frozen_batch_norm(tmp_path: Path) -> None:
    torch.manual_seed(0)
    forward = export(ResNet18().train(), torch.randn(3, 3, 16, 16), "torchscript")
    written = generate_artifacts(
        forward, loss=LossType.CrossEntropyLoss, artifact_directory=tmp_path, bn="frozen"
    )
    assert not written.statistics and len(written.frozen) == 40
    assert {"bn1.running_mean", "bn1.running_var"} <= set(written.frozen)


@pytest.mark.filterwarnings("ignore")  # of the exporter
def test_a_model_that_computes_its_own_loss(tmp_path: Path) -> None:
    class WithLoss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = Bert(layers=1)

        def forward(self, tokens):
            logits = self.bert(tokens)
            return torch.nn.functional.cross_entropy(logits, tokens[:, 0] % 3), logits

    import io

    torch.manual_seed(0)
    net, tokens = WithLoss().eval(), torch.randint(0, 100, (4, 12))
    file = io.BytesIO()
    torch.onnx.export(net, (tokens,), file, dynamo=False, input_names=["tokens"],
                      output_names=["loss", "logits"], do_constant_folding=False,
                      dynamic_axes={"tokens": {0: "batch"}})  # fmt: skip
    forward = onnx.load_from_string(file.getvalue())
    written = generate_artifacts(forward, loss=None, artifact_directory=tmp_path)
    assert (written.loss, written.outputs) == ("loss", ("logits",))
    loss, _ = net(tokens)
    loss.backward()
    results = Device(tmp_path).train(tokens=tokens.numpy())
    assert results["loss"] == pytest.approx(loss.item(), rel=1e-5)
    largest = max(float(p.grad.norm()) for p in net.parameters())
    for name, parameter in net.named_parameters():
        actual = results[f"{name}_grad.accumulation.out"]
        close(actual, parameter.grad.numpy(), name, 1e-3 * largest)


def two_outputs() -> onnx.ModelProto:
    return model(
        [
            helper.make_node("MatMul", ["x", "w"], ["scores"], "scores"),
            helper.make_node("Mul", ["scores", "s"], ["other"], "other"),
        ],
        [value("x", ["n", 3])],
        [value("scores", ["n", 4]), value("other", ["n", 4])],
        {"w": np.ones((3, 4), np.float32), "s": np.array([2, 2, 2, 2], np.float32)},
    )


def test_two_outputs_and_loss_input_names(tmp_path: Path) -> None:
    with pytest.raises(OnnxTrainError, match="loss_input_names"):
        generate_artifacts(two_outputs(), loss=LossType.MSELoss, artifact_directory=tmp_path)
    assert not os.listdir(tmp_path)
    written = generate_artifacts(
        two_outputs(),
        loss=LossType.MSELoss,
        loss_input_names=["other", "wanted"],
        artifact_directory=tmp_path,
    )
    x, wanted = np.ones((2, 3), np.float32), np.zeros((2, 4), np.float32)
    results = Device(tmp_path).train(x=x, wanted=wanted)
    assert results[written.loss] == pytest.approx(36.0)


def test_a_loss_of_three_terms(tmp_path: Path) -> None:
    class ThreeTerms(onnxblock.Block):
        def __init__(self):  # as in upstream's documentation, without super().__init__()
            self.square = onnxblock.loss.MSELoss()
            self.absolute = onnxblock.loss.L1Loss()
            self.scores = onnxblock.loss.CrossEntropyLoss()
            self.add = onnxblock.blocks.Add()

        def build(self, scores, other):
            total = self.add(self.square(scores, "a"), self.absolute(other, "b"))
            return self.add(total, self.scores(scores, "labels"))

    written = generate_artifacts(two_outputs(), loss=ThreeTerms(), artifact_directory=tmp_path)
    rng = np.random.default_rng(0)
    x, a, b = (rng.standard_normal(s).astype(np.float32) for s in ((2, 3), (2, 4), (2, 4)))
    labels = np.array([1, 3])
    results = Device(tmp_path).train(x=x, a=a, b=b, labels=labels)
    w = torch.ones(3, 4, requires_grad=True)
    scores = torch.tensor(x) @ w
    loss = (
        torch.nn.functional.mse_loss(scores, torch.tensor(a))
        + torch.nn.functional.l1_loss(scores * 2, torch.tensor(b))
        + torch.nn.functional.cross_entropy(scores, torch.tensor(labels))
    )
    loss.backward()
    assert results[written.loss] == pytest.approx(loss.item(), rel=1e-5)
    close(results["w_grad.accumulation.out"], w.grad.numpy(), "w")


def test_a_function_as_loss(tmp_path: Path) -> None:
    def distance(y, target):
        return onnxblock.blocks.ReduceMean(keepdims=False)(
            onnxblock.blocks.Abs()(onnxblock.blocks.Sub()(y, target))
        )

    forward = linear()
    del forward.graph.output[0]
    written = generate_artifacts(forward, loss=distance, artifact_directory=tmp_path)
    feeds = {"x": np.ones((2, 3), np.float32), "target": np.zeros((2, 2), np.float32)}
    assert np.isfinite(Device(tmp_path).train(**feeds)[written.loss])


def test_everything_else_frozen(tmp_path: Path) -> None:
    """As upstream's examples do it: shapes and scales are frozen too, and stay in the graph."""
    given = model(
        [
            helper.make_node("Reshape", ["x", "shape"], ["r"]),
            helper.make_node("Resize", ["r", "", "scales"], ["z"], mode="nearest"),
            helper.make_node("Mul", ["z", "table"], ["m"]),
            helper.make_node("Mul", ["m", "w"], ["y"]),
        ],
        [value("x", ["n", 16])],
        [value("y", ["n", 1, 8, 8])],
        {
            "shape": np.array([-1, 1, 4, 4]), "scales": np.array([1, 1, 2, 2], np.float32),
            "table": np.ones((8, 8), np.float32), "w": np.ones(8, np.float32),
        },
    )  # fmt: skip
    others = [t.name for t in given.graph.initializer if t.name != "w"]
    generate_artifacts(given, ["w"], others, LossType.MSELoss, artifact_directory=tmp_path)
    graph = onnx.load(tmp_path / "training_model.onnx", load_external_data=False).graph
    external = {t.name for t in graph.initializer if t.external_data}
    assert external == {"table"}
    assert set(read_checkpoint(tmp_path / "checkpoint").frozen) == set(others)
    feeds = {"x": np.ones((2, 16), np.float32), "target": np.zeros((2, 1, 8, 8), np.float32)}
    results = Device(tmp_path).train(**feeds)
    assert next(iter(results.values())) == pytest.approx(1.0)


@pytest.mark.filterwarnings("ignore")  # the tool of onnxruntime leaves files open
def test_the_ort_format(tmp_path: Path) -> None:
    written = generate_artifacts(
        linear(), ["w"], ["b"], optimizer=OptimType.AdamW, ort_format=True,
        artifact_directory=tmp_path,
    )  # fmt: skip
    for name in ("training_model", "eval_model", "optimizer_model", "step_model"):
        assert f"{name}.required_operators.config" in written.files
        ort.InferenceSession(tmp_path / f"{name}.ort")
