"""Graphs for CUDA: the numbers of the other ones, in a form that runs on the GPU as a whole.

That they do run there is tested in `tests/device/test_cuda.py`, where there is one.
"""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

import onnxtrain
from exporting import export
from onnxtrain.api import CheckpointState

SAMPLES = np.random.default_rng(0).standard_normal((3, 6, 3, 15, 15)).astype(np.float32)
LABELS = np.random.default_rng(1).integers(0, 5, (3, 6))


class Net(nn.Module):
    """Depthwise and strided convolutions, whose gradients pad the ends of an axis differently."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU6(),
            nn.Conv2d(8, 8, 4, 2, 1, groups=8), nn.BatchNorm2d(8), nn.ReLU6(),
            nn.Conv2d(8, 12, 1), nn.ReLU(), nn.Conv2d(12, 12, 3, 2, 1, groups=3), nn.ReLU(),
            nn.ConvTranspose2d(12, 6, 3, 2, 1, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(6, 5),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.fixture(scope="module", params=["torchscript", "dynamo"])
def folders(request, tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("cuda")
    model = export(Net().train(), torch.from_numpy(SAMPLES[0]), request.param)
    for target in ("cpu", "cuda"):
        onnxtrain.prepare(
            model, folder / target, loss="cross_entropy", bn="batch",
            optimizer="adamw:clip_norm=0.5", target=target, outputs=[],
        )  # fmt: skip
    return folder


def steps(session, count=3):
    return [float(session.step(x, y)) for x, y in zip(SAMPLES[:count], LABELS[:count], strict=True)]


def weights(session):
    value = session.to_buffer(trainable_only=False)
    return np.array(value.numpy())


def test_losses_are_those_of_the_other_graphs(folders):
    with (
        onnxtrain.TrainingSession(folders / "cuda") as cuda,
        onnxtrain.TrainingSession(folders / "cpu", native=False) as cpu,
    ):
        np.testing.assert_allclose(steps(cuda), steps(cpu), rtol=1e-4)


def test_no_node_has_to_run_on_the_cpu(folders):
    for file in ("step_model", "training_model", "optimizer_model"):
        graph = onnx.load(folders / "cuda" / f"{file}.onnx").graph
        assert not {n.op_type for n in graph.node} & {"If", "Loop", "Scan"}, file
        for node in graph.node:
            attributes = {a.name: list(a.ints) for a in node.attribute if a.ints}
            if node.op_type in ("Conv", "ConvTranspose"):
                pads = attributes.get("pads", [])
                assert pads[: len(pads) // 2] == pads[len(pads) // 2 :], node
                assert not any(attributes.get("output_padding", [])), node
            if node.op_type == "Concat":
                assert len(node.input) <= 32, node
            if node.op_type == "Split":
                assert len(node.output) <= 32, node


def test_a_batch_that_is_not_finite_changes_nothing(folders):
    with onnxtrain.TrainingSession(folders / "cuda") as session:
        steps(session)
        before = weights(session)
        spoilt = SAMPLES[0].copy()
        spoilt[0, 0, 0, 0] = np.nan
        session.step(spoilt, LABELS[0])
        np.testing.assert_array_equal(weights(session), before)
        assert session.skipped_batches == 1
        session.train_step(spoilt, LABELS[0])
        session.optimizer_step()
        np.testing.assert_array_equal(weights(session), before)


def test_module_and_optimizer_take_the_same_steps(folders):
    with (
        onnxtrain.TrainingSession(folders / "cuda") as fused,
        onnxtrain.TrainingSession(folders / "cuda") as apart,
    ):
        for x, y in zip(SAMPLES, LABELS, strict=True):
            fused.step(x, y)
            apart.train_step(x, y)
            apart.optimizer_step()
            apart.lazy_reset_grad()
        np.testing.assert_allclose(weights(apart), weights(fused), rtol=1e-5, atol=1e-6)


def test_accumulated_gradients_are_sums(folders):
    with onnxtrain.TrainingSession(folders / "cuda") as session:
        session.train_step(SAMPLES[0], LABELS[0])
        once = {n: p.grad.copy() for n, p in session.state.parameters if p.requires_grad}
        session.lazy_reset_grad()
        for _ in range(2):
            session.train_step(SAMPLES[0], LABELS[0])
        for name, grad in once.items():
            twice = session.state.parameters[name].grad
            np.testing.assert_allclose(twice, 2 * grad, rtol=1e-3, atol=1e-5)


def test_checkpoints_go_on_elsewhere(folders, tmp_path):
    with onnxtrain.TrainingSession(folders / "cuda") as session:
        steps(session, 2)
        session.save_checkpoint(tmp_path / "state", include_optimizer_state=True)
        expected = float(session.step(SAMPLES[2], LABELS[2]))
    graphs = [folders / "cpu" / f"{n}_model.onnx" for n in ("training", "eval", "optimizer")]
    state = CheckpointState.load_checkpoint(tmp_path / "state")
    state.generation = None  # of the other folder
    with onnxtrain.TrainingSession(state, *graphs) as session:
        assert float(session.step(SAMPLES[2], LABELS[2])) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "lion", "adagrad", "rmsprop"])
def test_every_optimizer_has_the_same_numbers(optimizer, tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(*(layer for _ in range(40) for layer in (nn.Linear(4, 4), nn.Tanh())))
    samples = np.random.default_rng(2).standard_normal((8, 4)).astype(np.float32)
    model = export(net, torch.from_numpy(samples), "dynamo")
    made = {}
    for target in ("cpu", "cuda"):
        onnxtrain.prepare(model, tmp_path / target, loss="mse", optimizer=optimizer, target=target)
        with onnxtrain.TrainingSession(tmp_path / target, native=False) as session:
            for _ in range(3):
                session.step(samples, samples)
            made[target] = weights(session)
    np.testing.assert_allclose(made["cuda"], made["cpu"], rtol=1e-5, atol=1e-6)


def test_dropout_draws_without_bitwise_operators_where_sizes_are_fixed(tmp_path):
    net = nn.Sequential(nn.Linear(40, 40), nn.Dropout(0.25))
    with torch.no_grad():
        net[0].weight.copy_(torch.eye(40))
        net[0].bias.zero_()
    model = export(net.train(), torch.ones(64, 40), "torchscript")
    onnxtrain.prepare(model, tmp_path, loss="mse", optimizer="sgd", target="cuda")
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.add_free_dimension_override_by_name("batch", 64)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    ort.InferenceSession(tmp_path / "step_model.onnx", options, providers=["CPUExecutionProvider"])
    left = {n.op_type for n in onnx.load(tmp_path / "optimized.onnx").graph.node}
    assert not left & {"BitwiseXor", "BitShift", "Dropout", "Range"}
    ones, targets = np.ones((64, 40), np.float32), np.zeros((64, 40), np.float32)
    with onnxtrain.TrainingSession(tmp_path) as session:
        session.set_learning_rate(0.0)
        kept = np.stack([session.step(ones, targets)[1] != 0 for _ in range(60)]).astype(float)
    assert abs(kept.mean() - 0.75) < 4 * np.sqrt(0.25 * 0.75 / kept.size)
    # Neither rows nor columns, nor runs, depend on each other.
    for axis in (0, 1, 2):
        flat = np.moveaxis(kept, axis, 0).reshape(kept.shape[axis], -1) - 0.75
        related = np.corrcoef(flat)[np.triu_indices(len(flat), 1)]
        assert np.abs(related).max() < 6 / np.sqrt(flat.shape[1])
