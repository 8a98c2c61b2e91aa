# ruff: noqa: D102, E402, I001
"""Write the artifact folders that Node and the browser are compared with Python on.

Each folder has `expected.json`: the inputs as a formula, the losses of twenty steps in Python, and
the loss of evaluation after them; and `at10`, the checkpoint after ten of the steps. Run this after
a deliberate change of the graphs: `python js/test/golden/make.py`. `webgpu/` has graphs of some of
the same networks for another target; what is expected of them is the same.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2] / "tests" / "models"))

from exporting import export
from zoo import Bert, Recurrent

import onnxtrain
from onnxtrain import artifacts
from onnxtrain.api import TrainingSession
from onnxtrain.device.loop.batches import shuffled
from onnxtrain.device.random_state import RandomState
from onnxtrain.device.schedulers import SCHEDULERS

STEPS, SAVED_AT, BATCH = 20, 10, 6


class ConvNet(nn.Module):
    """Convolutions with BatchNorm, and Dropout that is switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        )  # fmt: skip
        self.dropout, self.head = nn.Dropout(0.0), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(self.features(x).mean((2, 3))))


def mlp() -> nn.Module:
    """Two layers."""
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))


def convolution() -> nn.Module:
    """A convolution and a linear layer, which train for integers."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
        nn.Linear(64, 4),
    )  # fmt: skip


# Name → the network, the shape of one sample, and the number of words if they are words.
NETWORKS = {
    "mlp": (mlp, (12,), 0),
    "cnn": (ConvNet, (1, 8, 8), 0),
    "bert": (lambda: Bert(layers=1, width=16, heads=2, words=20), (7,), 20),
    "lstm": (lambda: Recurrent(nn.LSTM, False), (5, 6), 0),
    "int8": (convolution, (1, 4, 4), 0),
}


def batch(step: int, shape: tuple[int, ...], words: int, classes: int) -> list[np.ndarray]:
    """Return numbers that any language computes alike."""
    count = BATCH * int(np.prod(shape))
    drawn = (np.arange(count) * 7919 + step * 104729) % 1009
    x = drawn % words if words else (drawn / 1009 * 2 - 1).astype(np.float32)
    labels = (np.arange(BATCH) * 5 + step * 3) % classes
    return [x.reshape(BATCH, *shape), labels]


def generate(name: str, folder: Path, target: str) -> int:
    """Write the artifacts of a network; return how many classes it has."""
    make, shape, words = NETWORKS[name]
    torch.manual_seed(0)
    net = make().train()
    x = torch.zeros(BATCH, *shape, dtype=torch.int64 if words else torch.float32)
    classes = int(net(x).shape[-1])
    if name == "int8":
        few = [batch(step, shape, words, classes)[0] for step in range(4)]
        model = export(net.eval(), x, "torchscript")
        onnxtrain.prepare(model, folder, quantize="int8:momentum=0.1", calibration=few)
        return classes
    artifacts.generate_artifacts(
        export(net, x, "torchscript"),
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder,
        additional_output_names=["y"],
        target=target,
    )
    return classes


def write(name: str, folder: Path) -> None:
    """Write one folder."""
    _, shape, words = NETWORKS[name]
    classes = generate(name, folder, "cpu")
    onnxtrain.set_seed(7)
    session = TrainingSession.from_folder(folder)
    session.set_learning_rate(0.01)
    losses = []
    for step in range(STEPS):
        if step == SAVED_AT:
            session.save_checkpoint(folder / "at10")
        loss, _ = session.step(*batch(step, shape, words, classes))
        losses.append(float(loss))
    evaluation, _ = session.eval_step(*batch(STEPS, shape, words, classes))
    expected = {
        "shape": [BATCH, *shape], "words": words, "classes": classes, "learning_rate": 0.01,
        "inputs": session.input_names(), "losses": losses, "evaluation": float(evaluation),
    }  # fmt: skip
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


# What `fit_head` is asked for, and how many batches of samples it gets.
HEADS = {
    "ridge": (10, {}),
    "fewer samples than features": (2, {}),
    "regularized": (10, {"regularization": 0.5}),
    "cosine": (10, {"method": "class-means"}),
    "euclidean": (1, {"method": "class-means", "metric": "euclidean"}),
    "added": (3, {"method": "class-means", "metric": "euclidean", "add": True}),
}


def write_heads(folder: Path) -> None:
    """Write what `fit_head` computes for the last layer of the network in a folder."""
    session = onnxtrain.TrainingSession(folder / "mlp")
    found = {}
    for name, (count, options) in HEADS.items():
        batches = [batch(step, (12,), 0, 4) for step in range(count)]
        data = tuple(np.concatenate(arrays) for arrays in zip(*batches, strict=True))
        result = onnxtrain.fit_head(session, data, **options)
        found[name] = {
            "batches": count, "options": options, "accuracy": result.accuracy,
            "regularization": result.regularization,
            "weight": session.state.parameters["2.weight"].data.ravel().tolist(),
            "bias": session.state.parameters["2.bias"].data.tolist(),
        }  # fmt: skip
    (folder / "heads.json").write_text(json.dumps(found, indent=1) + "\n")


# The runs one after the other: what is kept, and the classes that the run teaches.
REPLAYS = {
    "samples": ({"size": 20}, [(0, 1), (2, 3), (1, 3)]),
    "bytes": ({"size": "1KB", "share": 0.25, "keep": "reservoir"}, [(0, 3), (1, 2)]),
}


def write_replay(folder: Path) -> None:
    """Write the losses of runs with old samples in them, and what the memory keeps."""
    found = {}
    for name, (options, runs) in REPLAYS.items():
        session = onnxtrain.TrainingSession(folder / "mlp")
        session.set_learning_rate(0.01)
        losses = []
        for number, classes in enumerate(runs):
            steps = range(10 * number, 10 * number + 10)
            x = np.concatenate([batch(step, (12,), 0, 4)[0] for step in steps])
            labels = np.resize(classes, len(x))
            history = onnxtrain.fit(
                session, (x, labels), epochs=2, batch_size=7, seed=5 + number, progress=False,
                replay=onnxtrain.Replay(**options),
            )  # fmt: skip
            losses.append(history.losses)
        memory = session.module.training_state.private["replay"]
        kept = {key: memory[key] for key in ("run", "runs", "classes", "seen", "full")}
        found[name] = {"options": options, "runs": runs, "losses": losses, "kept": kept}
    (folder / "replay.json").write_text(json.dumps(found, indent=1) + "\n")


def write_lora(folder: Path) -> None:
    """Write a folder in which low-rank factors train, and the adapter after ten steps."""
    torch.manual_seed(0)
    x = torch.zeros(BATCH, 12)
    lora = onnxtrain.Lora(rank=2, alpha=6, layers="*")
    onnxtrain.prepare(export(mlp(), x, "torchscript"), folder, train=[lora, "2.bias"])
    session = TrainingSession.from_folder(folder)
    session.set_learning_rate(0.05)
    losses = []
    for step in range(SAVED_AT):
        loss, *_ = session.step(*batch(step, (12,), 0, 4))
        losses.append(float(loss))
    session.export_adapter(folder / "after10.onnx_adapter")
    given = batch(STEPS, (12,), 0, 4)[0]
    expected = {
        "shape": [BATCH, 12], "words": 0, "classes": 4, "learning_rate": 0.05,
        "inputs": session.input_names(), "losses": losses,
        "scores": session.predict(given).reshape(-1).tolist(),
    }  # fmt: skip
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def vectors() -> dict[str, object]:
    """Return numbers that do not come from a graph: seeds, orders, rates, texts of floats."""
    state = RandomState({"seed": 2**63 + 12345, "draws": 7})
    seeds = []
    for _ in range(4):
        words = np.zeros(2, np.uint32)
        state.next(words)
        seeds.append(words.tolist())
    orders = [
        {
            "samples": n,
            "seed": str(seed),
            "epoch": epoch,
            "order": shuffled(n, seed, epoch).tolist(),
        }
        for n, seed, epoch in ((10, 0, 0), (17, 12345, 3), (5, 2**63 - 1, 1), (8, 2**40 + 1, 100))
    ]
    floats = [0.1, 1.0, -0.0, 1e-5, 1.5e-7, 1e16, 123456789012345680.0, 1e22, 0.0001, 5e-324,
              float(np.float32(0.001)), 1e15, 2**53 + 2.0, 1.7976931348623157e308]  # fmt: skip
    return {
        "random": seeds,
        "shuffled": orders,
        "floats": [[value, json.dumps(value)] for value in floats],
        "schedulers": [rates(*item) for item in SCHEDULES],
    }


SCHEDULES: list[tuple[str, dict[str, object]]] = [
    ("linear", {"warmup_step_count": 3, "total_step_count": 10, "initial_lr": 0.1}),
    ("constant", {"warmup_step_count": 4, "initial_lr": 0.1}),
    ("cosine", {"warmup_step_count": 2, "total_step_count": 9, "initial_lr": 0.1, "min_lr": 0.01}),
    ("cosine", {"warmup_step_count": 0, "total_step_count": 8, "initial_lr": 0.1, "cycles": 1.5,
                "first_step": 2}),
    ("step", {"step_size": 2, "gamma": 0.5, "initial_lr": 0.1, "every": 2}),
    ("multistep", {"milestones": [1, 4, 4], "gamma": 0.3, "initial_lr": 0.1}),
    ("exponential", {"gamma": 0.9, "initial_lr": 0.1}),
    ("onecycle", {"max_lr": 0.1, "total_step_count": 11}),
    ("onecycle", {"max_lr": 0.1, "total_step_count": 11, "three_phase": True,
                  "anneal_strategy": "linear"}),
]  # fmt: skip


class Counter:
    """As much of an optimizer as a scheduler needs."""

    initial_lr, step_count, rate = 0.0, 0, 0.001

    def get_learning_rate(self) -> float:
        """Return the rate."""
        return self.rate

    def set_learning_rate(self, rate: float) -> None:
        """Set the rate."""
        self.rate = rate

    def saved_scheduler(self, kind: str) -> None:
        """There is nothing saved."""

    def attach(self, scheduler: object) -> None:
        """There is nothing to save."""


def rates(name: str, settings: dict[str, object]) -> dict[str, object]:
    """Return the rates of a scheduler at its first steps, and its state."""
    scheduler = SCHEDULERS[name](Counter(), **settings)
    found = [scheduler.learning_rate(step) for step in range(14)]
    state = json.dumps(scheduler.state())
    return {"name": name, "settings": settings, "rates": found, "state": state}


if __name__ == "__main__":
    logging.getLogger("onnxtrain").setLevel(logging.ERROR)
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for each in NETWORKS:
        write(each, target / each)
    for each in ("mlp", "cnn"):
        generate(each, target / "webgpu" / each, "webgpu")
    write_heads(target)
    write_replay(target)
    write_lora(target / "lora")
    (target / "vectors.json").write_text(json.dumps(vectors(), indent=1) + "\n")
