"""The least that a device has to do with an artifact folder, and what torch says to it."""

from collections.abc import Collection
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch

from onnxtrain.format.checkpoint.file import read_checkpoint

GRAPHS = ("training_model", "eval_model", "optimizer_model", "step_model")
TYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(uint32)": np.uint32}


class Device:
    """The least that a device has to do, with a stock onnxruntime and numpy."""

    def __init__(self, folder: Path, only: Collection[str] = GRAPHS) -> None:
        # Frozen parameters come out of the checkpoint file beside the graphs.
        self.sessions = {
            f.stem: ort.InferenceSession(f) for f in folder.glob("*.onnx") if f.stem in only
        }
        content = read_checkpoint(folder / "checkpoint")
        self.values = {**content.trainable, **content.frozen}
        self.trainable = list(content.trainable)

    def run(self, graph: str, **feeds: np.ndarray) -> dict[str, np.ndarray]:
        session = self.sessions[graph]
        wanted = {i.name: i for i in session.get_inputs()}
        given = {**self.values, **feeds}
        for name in set(wanted) - set(given):
            given[name] = np.zeros(wanted[name].shape, TYPES[wanted[name].type])
        # What was updated piece by piece comes back in pieces, the same elements in a row.
        given.update(
            (n, np.reshape(given[n], i.shape))
            for n, i in wanted.items()
            if all(isinstance(size, int) for size in i.shape)
        )
        results = session.run(None, {n: given[n] for n in wanted})
        return dict(zip([o.name for o in session.get_outputs()], results, strict=True))

    def train(self, **feeds: np.ndarray) -> dict[str, np.ndarray]:
        return self.run("training_model", lazy_reset_grad=np.array([True]), **feeds)

    def step(self, number: int, rate: float, **feeds: np.ndarray) -> float:
        """One step by the three graphs of old."""
        trained = self.train(**feeds)
        gradients = {f"{p}_grad": trained[f"{p}_grad.accumulation.out"] for p in self.trainable}
        self.adopt(trained)
        clock = {"learning_rate": np.array([rate], np.float32), "step": np.array([number])}
        self.adopt(self.run("optimizer_model", **clock, **gradients))
        return next(iter(trained.values()))

    def fused_step(self, number: int, rate: float, **feeds: np.ndarray) -> float:
        clock = {"learning_rate": np.array([rate], np.float32), "step": np.array([number])}
        results = self.run("step_model", **clock, **feeds)
        self.adopt(results)
        return next(iter(results.values()))

    def adopt(self, results: dict[str, np.ndarray]) -> None:
        for name, array in results.items():
            if name.endswith(".updated"):
                old = name.removesuffix(".updated")
                shape = self.values[old].shape if old in self.values else array.shape
                self.values[old] = np.reshape(array, shape)


def torch_gradients(net, x, labels) -> tuple[float, dict[str, np.ndarray]]:
    net.zero_grad()
    loss = torch.nn.functional.cross_entropy(net(x), labels)
    loss.backward()
    return loss.item(), {n: p.grad.numpy().copy() for n, p in net.named_parameters()}


def close(actual: np.ndarray, expected: np.ndarray, name: str, scale: float = 0.0) -> None:
    error = np.linalg.norm(actual - expected)
    assert error <= 1e-4 * max(np.linalg.norm(expected), scale), f"{name}: {error:.2e}"
