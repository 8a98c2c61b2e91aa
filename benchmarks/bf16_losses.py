"""Losses with products in bfloat16 beside those in float32: equal weights, equal batches.

`python benchmarks/bf16_losses.py [--tasks digits,words] [--seeds 8]` prints a table in Markdown. A
seed draws the weights, the order of the samples and their noise. Each way to train takes 200 steps
in a process of its own; the mean of the last 50 losses counts. A chaotic thing like training also
reaches another loss if float32 is merely rounded elsewhere (AVX2 instead of AVX-512, onnxruntime's
own kernels, torch): these ratios tell how much a ratio means. torch's autocast is the yardstick.
"""

from __future__ import annotations

import argparse
import json
import os
import pydoc_data.topics
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "training"), str(HERE.parent / "src")]

from plan import BETAS, EPSILON, WEIGHT_DECAY, Workload, resnet  # noqa: E402

STEPS, LAST, BATCH, SHORT, LONG = 200, 50, 16, 32, 128


class Way(NamedTuple):
    """A way to train, and the one that its losses are divided by."""

    name: str
    beside: str = "onnxtrain, float32"
    precision: str = "float32"
    environment: Mapping[str, str] = {}


WAYS = (
    Way("onnxtrain, float32"),
    Way("onnxtrain, bfloat16", precision="bf16"),
    Way("torch, float32"),
    Way("torch, bfloat16 autocast", "torch, float32", "bf16"),
    Way("onnxtrain, float32, AVX2", environment={"ONNXTRAIN_ISA": "avx2"}),
    Way("onnxtrain, float32, library off", environment={"ONNXTRAIN_NATIVE": "0"}),
)


# ---- tasks ---------------------------------------------------------------------------------------

Samples = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Task:
    """A network and where its samples come from."""

    title: str
    workload: Workload
    samples: Callable[[np.random.Generator], Samples]  # enough for all steps
    rate: float
    noise: float = 0.0  # part of the labels that are drawn anew
    seeds: int = 8

    def batches(self, seed: int) -> Samples:
        """Return the samples of all steps, [step, batch, …], and their labels."""
        rng = np.random.default_rng(seed)
        x, labels = self.samples(rng)
        drawn = rng.integers(0, self.workload.classes, len(labels))
        labels = np.where(rng.random(len(labels)) < self.noise, drawn, labels)
        return x.reshape(STEPS, BATCH, *x.shape[1:]), labels.reshape(STEPS, BATCH)


def digits(rng: np.random.Generator, scale: int = 1) -> Samples:
    """Scans of handwritten digits, 8 × 8 or larger, in three equal channels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    epochs = -(-STEPS * BATCH // len(images))
    order = np.concatenate([rng.permutation(len(images)) for _ in range(epochs)])[: STEPS * BATCH]
    scans = images[order].reshape(-1, 1, 8, 8) / 8.0 - 1.0
    scans = scans.repeat(scale, axis=2).repeat(scale, axis=3)
    return scans.repeat(3, axis=1).astype(np.float32), labels[order]


def majority(rng: np.random.Generator, length: int = SHORT) -> Samples:
    """Texts of words of two kinds: which kind has more?"""
    labels = rng.integers(0, 2, STEPS * BATCH)
    share = np.where(labels, 0.7, 0.3)[:, None]
    kinds = rng.random((len(labels), length)) < share
    return 2 * rng.integers(0, _WORDS // 2, kinds.shape) + kinds, labels


def next_character(rng: np.random.Generator) -> Samples:
    """Pieces of Python's manual, the last character first, and the character behind them."""
    text = "".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    codes = np.minimum(np.frombuffer(text.encode("ascii", "replace"), np.uint8), _CHARACTERS - 1)
    starts = rng.integers(0, len(codes) - SHORT, STEPS * BATCH)
    windows = codes[starts[:, None] + np.arange(SHORT, -1, -1)].astype(np.int64)
    return windows[:, 1:], windows[:, 0]


_WORDS, _CHARACTERS = 1000, 128


def _bert(words: int, classes: int, length: int = SHORT, layers: int = 2) -> Workload:
    options = {"words": words, "length": length, "classes": classes, "layers": layers}
    return Workload("bert", "", "Bert", options, (length,), BATCH, classes, words=words)


_RESNET = replace(resnet(BATCH), shape=(3, 8, 8))
_TWO, _MANY = _bert(_WORDS, 2), _bert(_CHARACTERS, _CHARACTERS)
_LARGE = _bert(_WORDS, 2, LONG, layers=4)
TASKS = {
    "digits": Task("ResNet-18, digits", _RESNET, digits, 1e-4, seeds=4),
    "noisy-digits": Task("ResNet-18, digits, 20 % noise", _RESNET, digits, 1e-4, 0.2, seeds=4),
    "words": Task("BERT-like, words", _TWO, majority, 1e-3),
    "noisy-words": Task("BERT-like, words, 20 % noise", _TWO, majority, 1e-3, 0.2, seeds=4),
    "characters": Task("BERT-like, characters", _MANY, next_character, 1e-3, seeds=4),
    # The sizes of the benchmark of step times.
    "large-digits": Task(
        "ResNet-18 32×32, digits, 20 % noise", resnet(BATCH), partial(digits, scale=4), 1e-4, 0.2
    ),
    "long-words": Task(
        "BERT-like, 4 layers, T 128, words", _LARGE, partial(majority, length=LONG), 3e-4
    ),
    "noisy-long-words": Task(
        "BERT-like, 4 layers, T 128, words, 20 % noise",
        _LARGE,
        partial(majority, length=LONG),
        3e-4,
        0.2,
    ),
}


# ---- the losses of one seed ----------------------------------------------------------------------


def losses_of(task: Task, seed: int, folder: Path) -> dict[str, list[float]]:
    """Train in every way; return the losses of all steps by the names of the ways."""
    write_files(task, seed, folder)
    found = {}
    for number, way in enumerate(WAYS):
        command = [sys.executable, __file__, "--child", str(number), str(task.rate), str(folder)]
        environment = {**os.environ, **way.environment}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise SystemExit(f"{way.name}: {done.stderr}")
        found[way.name] = json.loads(done.stdout)
    return found


def write_files(task: Task, seed: int, folder: Path) -> None:
    """Write the network, our artifacts of it, and the batches."""
    import torch
    from onnxtrain.optim import AdamW

    from onnxtrain import prepare as prepare_artifacts
    from prepare import network, to_onnx

    net = network(task.workload, seed).train()
    torch.save(net, folder / "net.pt")
    x, labels = task.batches(seed)
    np.savez(folder / "batches.npz", x=x, labels=labels)
    to_onnx(net, (torch.from_numpy(x[0]),), folder / "forward.onnx", 17)
    for precision in ("float32", "bf16"):
        prepare_artifacts(
            folder / "forward.onnx", folder / precision, precision=precision, outputs=[],
            optimizer=AdamW(betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY),
            bn="batch" if task.workload.has_batch_norm else "auto",
        )  # fmt: skip


def train(way: Way, rate: float, folder: Path) -> list[float]:
    """Take all steps; return their losses."""
    open_step = open_torch if way.name.startswith("torch") else open_ours
    step = open_step(way, rate, folder)
    batches = np.load(folder / "batches.npz")
    return [step(x, labels) for x, labels in zip(batches["x"], batches["labels"], strict=True)]


Step = Callable[[np.ndarray, np.ndarray], float]


def open_ours(way: Way, rate: float, folder: Path) -> Step:
    from onnxtrain import TrainingSession

    session = TrainingSession(folder / way.precision)
    if not session.native and way.environment.get("ONNXTRAIN_NATIVE") != "0":
        raise SystemExit("the native library is missing: make native, or set ONNXTRAIN_NATIVE")
    session.set_learning_rate(rate)
    return lambda x, labels: float(session.step(x, labels))


def open_torch(way: Way, rate: float, folder: Path) -> Step:
    import torch

    torch.set_num_threads(1)  # its threads spin, and there is little to share
    net = torch.load(folder / "net.pt", weights_only=False)
    optimizer = torch.optim.AdamW(net.parameters(), rate, BETAS, EPSILON, WEIGHT_DECAY, fused=True)

    def step(x: np.ndarray, labels: np.ndarray) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=way.precision == "bf16"):
            scores = net(torch.from_numpy(x))
            loss = torch.nn.functional.cross_entropy(scores, torch.from_numpy(labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


# ---- the table -----------------------------------------------------------------------------------


def compare(task: Task, seeds: Sequence[int]) -> None:
    """Print the lines of a task: the loss in each way, and its ratio to that in float32."""
    found: dict[str, list[float]] = {way.name: [] for way in WAYS}
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            for name, losses in losses_of(task, seed, Path(folder)).items():
                found[name].append(statistics.fmean(losses[-LAST:]))
    for way in WAYS:
        mine, other = np.array(found[way.name]), np.array(found[way.beside])
        line = f"| {task.title} | {way.name} | {mine.mean():.4f} |"
        if way.name != way.beside:
            ratios = np.log(mine / other)
            error = ratios.std(ddof=1) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
            each = " ".join(f"{ratio:.3f}" for ratio in np.exp(ratios))
            line += f" {np.exp(ratios.mean()):.3f} ± {error:.3f} | {each} |"
        else:
            line += "  |  |"
        print(line, flush=True)


def main() -> None:
    """Print the table, or, as a child, the losses of one way."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--seeds", type=int, help="as each task says by default")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--child", nargs=3)
    options = parser.parse_args()
    if options.child:
        number, rate, folder = options.child
        print(json.dumps(train(WAYS[int(number)], float(rate), Path(folder))))
        return
    print("| task | | loss | ratio ± standard error | of each seed |")
    print("|---|---|---|---|---|")
    for name in options.tasks.split(","):
        first, count = options.first_seed, options.seeds or TASKS[name].seeds
        compare(TASKS[name], range(first, first + count))


if __name__ == "__main__":
    main()
