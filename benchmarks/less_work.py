"""What less work in `fit` brings: features of a frozen body kept, batches in smaller passes.

Run as `python benchmarks/less_work.py` (or `make bench-less-work`). Head-only MobileNetV2 of
224 × 224 pixels, 64 samples: an epoch that runs the body, and later epochs with features kept in
memory or in files. And a step of the BERT-like network with 64 sequences, as one pass and as k
smaller ones: time, peak memory, and how far the losses of six steps are apart. All in turns, each
in a process of its own, with onnxruntime's own settings; Markdown tables are printed.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS / "models"), str(TESTS / "offline")]
ROUNDS = 3


def prepare(folder: Path) -> None:
    import torch

    import zoo
    from exporting import export
    from onnxtrain.artifacts import LossType, OptimType, generate_artifacts

    torch.manual_seed(0)
    nets: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "head": (
            zoo.MobileNetV2(slim=1, classes=10).eval(),
            torch.randn(2, 3, 224, 224),
            {"requires_grad": ["classifier.*"]},
        ),
        "bert": (zoo.Bert(4, 128, 4, 30522), torch.randint(0, 30522, (2, 64)), {}),
    }
    for name, (net, x, options) in nets.items():
        generate_artifacts(
            export(net, x, "torchscript"), loss=LossType.CrossEntropyLoss,
            optimizer=OptimType.AdamW, artifact_directory=folder / name, **options,
        )  # fmt: skip


def peak() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1000


def run(folder: Path, net: str, way: str) -> dict[str, Any]:
    """One process: train, and tell what it took."""
    import numpy as np

    import onnxtrain
    from onnxtrain.api import TrainingSession

    session = TrainingSession.from_folder(folder / net)
    session.set_learning_rate(1e-3)
    rng = np.random.default_rng(0)
    if net == "head":
        data = rng.normal(size=(64, 3, 224, 224)).astype(np.float32), rng.integers(0, 10, 64)
        kept: Any = {"none": False, "memory": True, "files": folder / "features"}[way]
        options: dict[str, Any] = {"batch_size": 4, "cache_features": kept}
    else:
        data = rng.integers(0, 30522, (64, 64)), rng.integers(0, 3, 64)
        options = {"batch_size": 64, "micro_batch_size": 64 // int(way)}
    ends: list[float] = []

    class Clock:
        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    begin = time.perf_counter()
    history = onnxtrain.fit(
        session, data, epochs=6, seed=1, progress=False, callbacks=[Clock()], **options
    )
    times = np.diff([begin, *ends])
    return {
        "first": float(times[0]),
        "later": statistics.median(times[1:].tolist()),
        "peak": peak(),
        "losses": list(history.losses),
    }


def measure(folder: Path, net: str, ways: list[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way in ways:
            done = subprocess.run(
                [sys.executable, __file__, str(folder), net, way],
                check=True, capture_output=True, text=True,
            )  # fmt: skip
            found[way].append(json.loads(done.stdout))
    middle = statistics.median
    return {
        way: {
            **runs[0],
            **{key: middle(run[key] for run in runs) for key in ("first", "later", "peak")},
        }
        for way, runs in found.items()
    }


def apart(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(x) for x, y in zip(a, b, strict=True))


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        head = measure(folder, "head", ["none", "memory", "files"])
        bert = measure(folder, "bert", ["1", "2", "4", "8"])
    print("| features kept | first epoch, s | later epochs, s | times faster | losses apart |")
    print("| --- | --- | --- | --- | --- |")
    base = head["none"]
    for way, got in head.items():
        faster, losses = base["later"] / got["later"], apart(base["losses"], got["losses"])
        print(f"| {way} | {got['first']:.3f} | {got['later']:.3f} | {faster:.1f} | {losses:.1e} |")
    print("\n| micro_batch | step of 64 sequences, s | peak, MB | losses apart |")
    print("| --- | --- | --- | --- |")
    whole = bert["1"]
    for way, got in bert.items():
        losses = apart(whole["losses"], got["losses"])
        print(f"| {way} | {got['later']:.3f} | {got['peak']:.0f} | {losses:.1e} |")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(run(Path(sys.argv[1]), sys.argv[2], sys.argv[3])))
    else:
        main()
