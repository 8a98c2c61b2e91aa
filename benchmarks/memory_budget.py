"""Memory and time of a step with and without a memory budget, each in a process of its own.

`python benchmarks/memory_budget.py [--budget 0.5] [--batch 64]` prints a table in Markdown: the
estimate, what was measured (the peak of a fresh process above what it takes when its parameters and
moments are loaded), and how much longer a step takes. Processes with and without a budget take
turns, and the fastest of their steps count.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROUNDS, STEPS = 3, 4


def main() -> None:
    """Measure both networks and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", type=float, default=0.5)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--child", nargs=3)
    options = parser.parse_args()
    if options.child:
        take_steps(*options.child, options.batch)
        return
    print(
        "| network | budget | estimate, MB | measured, MB | of without | step, ms | more | "
        "CPU time, ms | more |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name in ("ResNet18", "Bert"):
        with tempfile.TemporaryDirectory() as folder:
            for line in compare(name, Path(folder), options.budget, options.batch):
                print(line, flush=True)


def compare(name: str, folder: Path, budget: float, batch: int) -> list[str]:
    """Return the lines of a network."""
    estimates = prepare(name, folder, budget, batch)
    found: dict[str, list[dict[str, float]]] = {"plain": [], "lean": []}
    for _ in range(ROUNDS):
        for kind in found:
            command = [sys.executable, __file__, "--batch", str(batch), "--child", name]
            result = subprocess.run(
                [*command, str(folder / kind), kind], capture_output=True, text=True, check=True
            )
            found[kind].append(json.loads(result.stdout))
    memory = {kind: max(run["bytes"] for run in runs) for kind, runs in found.items()}
    step = {kind: min(run["seconds"] for run in runs) for kind, runs in found.items()}
    work = {kind: min(run["work"] for run in runs) for kind, runs in found.items()}
    return [
        f"| {name}, batch {batch} | {'none' if kind == 'plain' else f'{budget:.0%}'} "
        f"| {estimates[kind] / 2**20:.0f} | {memory[kind] / 2**20:.0f} "
        f"| {memory[kind] / memory['plain']:.2f} | {step[kind] * 1e3:.0f} "
        f"| {step[kind] / step['plain'] - 1:+.0%} | {work[kind] * 1e3:.0f} "
        f"| {work[kind] / work['plain'] - 1:+.0%} |"
        for kind in found
    ]


def prepare(name: str, folder: Path, budget: float, batch: int) -> dict[str, int]:
    """Write the artifacts with and without the budget; return the estimates."""
    import torch

    sys.path.insert(0, str(HERE / "training"))
    import nets
    from onnxtrain.artifacts import LossType, OptimType, generate_artifacts

    torch.manual_seed(1)
    options = {"classes": 10} if name == "ResNet18" else WORDS
    net = nets.build(name, dict(options)).train()
    x = torch.zeros(batch, 3, 32, 32)
    if name == "Bert":
        x = torch.zeros(batch, WORDS["length"], dtype=torch.int64)
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net, (x,), folder / "model.onnx", dynamo=False, opset_version=17,
            training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False,
            input_names=["x"], output_names=["y"], dynamic_axes={"x": {0: "batch"}},
        )  # fmt: skip
    for kind, part in (("plain", None), ("lean", budget)):
        made = generate_artifacts(
            folder / "model.onnx", loss=LossType.CrossEntropyLoss, optimizer=OptimType.AdamW,
            artifact_directory=folder / kind, memory_budget=part,
            sizes=None if part is None else {"batch": batch},
        )  # fmt: skip
    assert made.memory is not None
    return {"plain": made.memory.without, "lean": made.memory.peak}


WORDS = {"words": 30522, "length": 128, "classes": 2, "layers": 4}


def take_steps(name: str, folder: str, _: str, batch: int) -> None:
    """Take steps in this process; print its peak and the time of the fastest one."""
    import time

    import numpy as np

    from onnxtrain.api import TrainingSession

    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, 3, 32, 32)).astype(np.float32)
    if name == "Bert":
        x = rng.integers(0, WORDS["words"], (batch, WORDS["length"]))
    y = rng.integers(0, 2, batch)
    session = TrainingSession.from_folder(folder)
    session.set_learning_rate(1e-5)
    session.step(x[:1], y[:1])  # parameters and moments have their memory from here on
    before, times, work = status("VmRSS"), [], []
    for _step in range(STEPS):
        start, worked = time.perf_counter(), time.process_time()
        session.step(x, y)
        times.append(time.perf_counter() - start)
        work.append(time.process_time() - worked)
    peak = status("VmHWM") - before
    print(json.dumps({"bytes": peak, "seconds": min(times), "work": min(work)}))


def status(field: str) -> int:
    """Return what the system tells of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


if __name__ == "__main__":
    main()
