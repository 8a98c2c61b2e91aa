"""The training loop with models of several kinds, made on the spot."""

from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import helper

from exporting import export
from graphs import linear, model, value
from onnxtrain import artifacts, onnxblock
from onnxtrain.device.loop import evaluate, fit
from onnxtrain.device.loop.metrics import Accuracy, MeanAbsoluteError
from onnxtrain.device.loop.nan_guard import CheckFinite, NanGuard
from onnxtrain.device.session import TrainingSession
from onnxtrain.errors import ArgumentError, InputError
from two_heads import two_heads
from zoo import MLP

CROSS_ENTROPY = artifacts.LossType.CrossEntropyLoss
QUIET = {"progress": False}


def session_of(made, folder, optimizer=None, **settings) -> TrainingSession:
    optimizer = optimizer or onnxblock.optim.SGD()
    artifacts.generate_artifacts(made, optimizer=optimizer, artifact_directory=folder, **settings)
    return TrainingSession.from_folder(folder)


def dense(rows: int | str = "batch", inputs: int = 4, outputs: int = 2):
    """y = x w + b."""
    rng = np.random.default_rng(0)
    return model(
        [helper.make_node("Gemm", ["x", "w", "b"], ["y"])],
        [value("x", [rows, inputs])],
        [value("y", [rows, outputs])],
        {
            "w": (0.1 * rng.standard_normal((inputs, outputs))).astype(np.float32),
            "b": np.zeros(outputs, np.float32),
        },
    )


def test_training_as_in_torch(tmp_path: Path) -> None:
    torch.manual_seed(1)
    net = MLP()
    session = session_of(
        export(net, torch.randn(3, 20), "torchscript"), tmp_path, onnxblock.optim.SGD(momentum=0.9),
        loss=CROSS_ENTROPY, additional_output_names=["y"],
    )  # fmt: skip
    x, labels = torch.randn(50, 20), torch.randint(0, 5, (50,))
    session.set_learning_rate(0.2)
    history = fit(
        session, (x.numpy(), labels.numpy()), 4, batch_size=16, shuffle=False, schedule="cosine",
        validation=(x.numpy(), labels.numpy()), metrics=["accuracy", "top2"], **QUIET,
    )  # fmt: skip
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16)
    losses = []
    for _ in range(4):
        for start in range(0, 50, 16):
            part = slice(start, start + 16)
            loss = torch.nn.functional.cross_entropy(net(x[part]), labels[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
    np.testing.assert_allclose(history.losses, losses, rtol=1e-4)
    for name, parameter in net.named_parameters():
        np.testing.assert_allclose(
            session.get_parameter(name), parameter.detach().numpy(), rtol=1e-3, atol=1e-5
        )
    scores = net(x)
    assert history["accuracy"][-1] == (scores.argmax(1) == labels).double().mean().item()
    found = (scores.topk(2).indices == labels[:, None]).any(1)
    assert history["top2"][-1] == found.double().mean().item()


def test_batches_of_a_torch_loader(tmp_path: Path) -> None:
    session = session_of(dense(), tmp_path, loss=CROSS_ENTROPY, additional_output_names=["y"])
    data = torch.utils.data.TensorDataset(torch.randn(30, 4), torch.randint(0, 2, (30,)))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    history = fit(
        session, loader, 2, schedule="linear", validation=loader, metrics=["accuracy"], **QUIET
    )
    assert len(history.losses) == 8
    assert history["samples"] == [30, 30]
    assert session.get_learning_rate() == pytest.approx(1e-3)  # a schedule ends with its run


def test_regression(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((64, 4)).astype(np.float32)
    target = x[:, :2] * 2
    session = session_of(
        dense(), tmp_path, loss=artifacts.LossType.MSELoss, additional_output_names=["y"]
    )
    session.set_learning_rate(0.3)
    history = fit(
        session, (x, target), 30, validation=(x, target), metrics=["mae", "mse", "rmse"], seed=0,
        **QUIET,
    )  # fmt: skip
    last = history.epochs[-1]
    assert last["mse"] == pytest.approx(last["eval_loss"], rel=1e-5)
    assert last["rmse"] == pytest.approx(last["mse"] ** 0.5)
    assert last["mae"] < 0.05 < history.epochs[0]["mae"]


def test_yes_or_no(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((64, 4)).astype(np.float32)
    yes = (x[:, :1] > 0).astype(np.float32)
    session = session_of(
        dense(outputs=1), tmp_path, loss=artifacts.LossType.BCEWithLogitsLoss,
        additional_output_names=["y"],
    )  # fmt: skip
    session.set_learning_rate(1.0)
    history = fit(
        session, (x, yes), 20, validation=(x, yes), metrics=["accuracy", "f1", "confusion"], seed=0,
        **QUIET,
    )  # fmt: skip
    last = history.epochs[-1]
    (_, false), (missed, true) = last["confusion"]
    assert last["f1"] == pytest.approx(2 * true / (2 * true + false + missed))
    assert last["accuracy"] > 0.95


def test_metrics_need_an_output(tmp_path: Path) -> None:
    session = session_of(dense(), tmp_path, loss=CROSS_ENTROPY)
    data = np.zeros((8, 4), np.float32), np.zeros(8, np.int64)
    with pytest.raises(ArgumentError, match="additional_output_names"):
        fit(session, data, validation=data, metrics=["accuracy"], **QUIET)
    assert list(evaluate(session, data)) == ["eval_loss"]


def test_several_outputs_and_labels(tmp_path: Path) -> None:
    class Both(onnxblock.Block):
        def build(self, y, z):
            classes = onnxblock.loss.CrossEntropyLoss()(y, "class")
            heights = onnxblock.loss.MSELoss()(z, "height")
            return onnxblock.blocks.Add()(classes, heights)

    session = session_of(two_heads(), tmp_path, loss=Both(), additional_output_names=["y", "z"])
    rng = np.random.default_rng(1)
    data = {
        "height": rng.standard_normal((20, 2)).astype(np.float32),
        "class": rng.integers(0, 2, 20),
        "x": rng.standard_normal((20, 3)).astype(np.float32),
    }
    metrics = {
        "right": Accuracy(output="y", labels="class"),
        "off": MeanAbsoluteError(output="z", labels="height"),
    }
    values = evaluate(session, data, metrics, batch_size=6)
    _, y, z = session.eval_step(**data)
    assert values["right"] == (y.argmax(axis=1) == data["class"]).mean()
    assert values["off"] == pytest.approx(np.abs(z - data["height"]).mean(), rel=1e-6)
    with pytest.raises(ArgumentError, match="must say which output it reads"):
        evaluate(session, data, ["accuracy"])
    assert len(fit(session, data, 2, batch_size=6, **QUIET).losses) == 8


def test_one_input(tmp_path: Path) -> None:
    x = np.random.default_rng(1).standard_normal((10, 3)).astype(np.float32)
    kinds = (x, (x,), {"x": x}, [x[:4], x[4:8], x[8:]], [(x[:4],), (x[4:8],), (x[8:],)])
    losses = [
        fit(
            session_of(linear(), tmp_path / str(number)), data, 2, batch_size=4, shuffle=False,
            **QUIET,
        ).losses
        for number, data in enumerate(kinds)
    ]  # fmt: skip
    assert all(each == losses[0] for each in losses)
    assert len(losses[0]) == 6


def test_a_model_of_a_fixed_batch(tmp_path: Path) -> None:
    session = session_of(dense(rows=4), tmp_path, loss=CROSS_ENTROPY)
    data = np.zeros((10, 4), np.float32), np.zeros(10, np.int64)
    with pytest.raises(InputError) as caught:
        fit(session, data, batch_size=4, **QUIET)
    assert "drop_last=True leaves out a last batch" in caught.value.__notes__[0]
    assert len(fit(session, data, 2, batch_size=4, drop_last=True, **QUIET).losses) == 4


def test_large_models_are_looked_at_less_often(tmp_path: Path) -> None:
    small = session_of(dense(), tmp_path / "small", loss=CROSS_ENTROPY)
    large = session_of(dense(inputs=1000, outputs=1001), tmp_path / "large", loss=CROSS_ENTROPY)
    assert NanGuard(small).every == 1
    assert NanGuard(large).every == 5
    assert NanGuard(large, CheckFinite()).every == 1
