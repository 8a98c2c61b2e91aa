"""A step on a GPU, and on many cores, beside torch's: the same networks, batches and AdamW.

    make bench-cuda      needs an NVIDIA GPU, onnxruntime-gpu and a torch with CUDA
    make bench-threads   needs more than two cores

`prepare` writes the folders, where onnx is installed; `cuda` and `threads` measure, and need no
more than a device has; `picture` draws what the page says. On the GPU, a step clips the norm of the
gradient and follows a schedule. Its losses are compared with those of the same folder on the CPU,
and onnxruntime's profile tells which nodes ran where.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "training"), str(HERE.parent / "src")]

from data import endless  # noqa: E402
from plan import BETAS, EPSILON, WEIGHT_DECAY, WORKLOADS, Workload, folder_of  # noqa: E402

ROOT = HERE.parent / "build" / "bench"
NAMES = ("mlp-1-64", "lenet-64", "mobilenet", "bert-4-128-16")
RATE, NORM, STEPS, COMPARED = 1e-4, 1.0, 60, 50
WAYS = ("recorded", "launched", "torch")
Step = Callable[[Any, Any], float]


def workloads() -> list[Workload]:
    return [w for w in WORKLOADS if w.name in NAMES]


def prepare() -> None:
    """Write a folder for CUDA and one for the CPU for each network."""
    import onnxtrain
    import prepare as training

    for workload in workloads():
        folder = folder_of(ROOT, workload)
        training.prepare(ROOT, workload)
        optimizer = onnxtrain.optim.AdamW(
            betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY,
            clip_grad=onnxtrain.optim.ClipGradNorm(NORM),
        )  # fmt: skip
        onnxtrain.prepare(
            folder / "forward.onnx", folder / "cuda", target="cuda", optimizer=optimizer,
            bn=workload.statistics if workload.has_batch_norm else "auto", outputs=[],
        )  # fmt: skip
        print(workload.name, flush=True)


def rate_of(step: int) -> float:
    """Warm up, then fall."""
    return RATE * min((step + 1) / 10, (2 * STEPS - step) / (2 * STEPS))


def ours(workload: Workload, device: Any, options: Any = None) -> tuple[Step, Any]:
    import onnxtrain

    session = onnxtrain.TrainingSession.from_folder(
        folder_of(ROOT, workload) / "cuda", device=device, session_options=options,
    )  # fmt: skip

    numbers = itertools.count()

    def step(x: Any, labels: Any) -> float:
        session.set_learning_rate(rate_of(next(numbers)))
        return float(session.step(x, labels))

    return step, session


def torchs(workload: Workload) -> Step:
    import torch
    from torch.nn import functional as F

    from peers.torch_peer import _network

    net = _network(workload, str(folder_of(ROOT, workload))).cuda()
    for module in net.modules():
        if hasattr(module, "index"):
            module.index = module.index.cuda()
    optimizer = torch.optim.AdamW(net.parameters(), RATE, BETAS, EPSILON, WEIGHT_DECAY, fused=True)

    def step(x: Any, labels: Any) -> float:
        loss = F.cross_entropy(net(torch.from_numpy(x).cuda()), torch.from_numpy(labels).cuda())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def timed(step: Step, workload: Workload) -> tuple[list[float], float]:
    """Return the losses, and the median of a step in milliseconds."""
    losses, seconds = [], []
    for _, (x, labels) in zip(range(STEPS), endless(workload), strict=False):
        before = time.perf_counter()
        losses.append(step(x, labels))
        seconds.append(time.perf_counter() - before)
    return losses, 1e3 * statistics.median(seconds[10:])


def measure(workload: Workload, way: str) -> dict[str, Any]:
    import torch  # noqa: F401  onnxruntime finds the libraries of CUDA that torch has loaded

    if way == "torch":
        losses, ms = timed(torchs(workload), workload)
        return {"losses": losses, "ms": ms}
    if way == "cpu":
        step, _ = ours(workload, "cpu")
        return {"losses": timed(step, workload)[0], "ms": 0.0}
    settings = {"device_id": 0, "use_tf32": 0, "enable_cuda_graph": int(way == "recorded")}
    device = [("CUDAExecutionProvider", settings), "CPUExecutionProvider"]
    step, session = ours(workload, device)
    losses, ms = timed(step, workload)
    found = {"losses": losses, "ms": ms}
    if way == "launched":
        session.close()
        found |= placed(workload, device)
    return found


def placed(workload: Workload, device: Any) -> dict[str, Any]:
    """Count what onnxruntime's profile of a few steps says about where nodes ran."""
    import onnxruntime as ort

    made = []

    def options() -> Any:
        made.append(ort.SessionOptions())
        made[-1].enable_profiling = True
        made[-1].log_severity_level = 3
        return made[-1]

    step, session = ours(workload, device, options)
    for _, (x, labels) in zip(range(3), endless(workload), strict=False):
        step(x, labels)
    graph = session._fused.graph
    events = json.loads(Path(graph.session.end_profiling()).read_text())
    kernels = [e for e in events if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")]
    last = kernels[2 * len(kernels) // 3 :]
    cpu = [e for e in last if e["args"].get("provider") == "CPUExecutionProvider"]
    times: collections.Counter[str] = collections.Counter()
    for e in last:
        times[e["args"]["op_name"]] += e["dur"]
    return {
        "nodes": len(last),
        "on the CPU": dict(collections.Counter(e["args"]["op_name"] for e in cpu)),
        "copies": sum(e["args"]["op_name"].startswith("Memcpy") for e in last),
        "slowest, us": dict(times.most_common(12)),
    }


def in_process(*arguments: str, **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, check=False,
        env=os.environ | environment, text=True,
    )  # fmt: skip
    if done.returncode:
        return {"losses": [], "ms": float("nan")}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def cuda() -> None:
    """Print a row for each network."""
    try:
        import onnxruntime as ort
        import torch

        there = torch.cuda.is_available() and "CUDAExecutionProvider" in (
            ort.get_available_providers()
        )
    except ImportError:
        there = False
    if not there:
        print("skipped: needs a GPU, onnxruntime-gpu and a torch with CUDA")
        return
    print("| | recorded, ms | launched, ms | torch, ms | recorded / torch | largest difference |")
    print("|---|---:|---:|---:|---:|---:|")
    for workload in workloads():
        found = {way: in_process("one", workload.name, way) for way in (*WAYS, "cpu")}
        a, b, c = (found[way]["ms"] for way in WAYS)
        pairs = zip(found["recorded"]["losses"], found["cpu"]["losses"], strict=False)
        apart = max((abs(x - y) for x, y in list(pairs)[:COMPARED]), default=float("nan"))
        print(f"| {workload.title} | {a:.2f} | {b:.2f} | {c:.2f} | {a / c:.2f} | {apart:.1e} |")
        print({k: v for k, v in found["launched"].items() if k != "losses"}, flush=True)


def threads(counts: list[int]) -> None:
    """Print a row for each network and peer."""
    if (os.cpu_count() or 1) <= 2:
        print("skipped: needs more than two cores")
        return
    counts = [n for n in counts if n <= (os.cpu_count() or 1)]
    print("| threads |", " | ".join(map(str, counts)), "|")
    print("|---" * (1 + len(counts)) + "|")
    for workload in workloads()[1:]:
        for peer in ("ours", "torch"):
            ms = [in_process("one", workload.name, f"{peer}-{n}")["ms"] for n in counts]
            row = " | ".join(f"{m:.1f}" for m in ms)
            print(f"| {workload.title}, {peer} | {row} |", flush=True)


def picture(page: Path, target: Path) -> None:
    """Draw the table of threads on a page."""
    from matplotlib import pyplot as plt

    lines = page.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("| threads |"))
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines[first : first + 8]]
    counts, rows = [int(c) for c in cells[0][1:]], cells[2:]
    figure, panels = plt.subplots(1, len(rows) // 2, figsize=(11, 3), layout="constrained")
    for axes, own, torch in zip(panels, rows[::2], rows[1::2], strict=True):
        for row, name in ((own, "onnxtrain"), (torch, "torch eager")):
            axes.plot(counts, [float(c) for c in row[1:]], marker="o", label=name)
        axes.set(title=own[0], xscale="log", yscale="log", xlabel="threads", xticks=counts)
        axes.set_xticks(counts, labels=[str(n) for n in counts])
        axes.minorticks_off()
    panels[0].set_ylabel("ms")
    panels[0].legend(frameon=False)
    figure.savefig(target, metadata={"Date": None})


def with_threads(workload: Workload, peer: str, count: int) -> dict[str, Any]:
    if peer == "torch":
        from peers import torch_peer as module

        options: dict[str, Any] = {"optimizer": "fused"}
    else:
        from peers import ours as module

        options = {}
    step = module.open_step(workload, str(folder_of(ROOT, workload)), options, count)
    return {"ms": timed(step, workload)[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["prepare", "cuda", "threads", "picture", "one"])
    parser.add_argument("what", nargs="*")
    given = parser.parse_args()
    if given.part == "one":
        workload = next(w for w in workloads() if w.name == given.what[0])
        peer, _, count = given.what[1].partition("-")
        found = with_threads(workload, peer, int(count)) if count else measure(workload, peer)
        print(json.dumps(found))
    elif given.part == "threads":
        threads([int(n) for n in given.what] or [1, 2, 4, 8, 16])
    elif given.part == "picture":
        picture(HERE.parent / "docs/performance.md", HERE.parent / "docs/images/threads.svg")
    else:
        {"prepare": prepare, "cuda": cuda}[given.part]()


if __name__ == "__main__":
    main()
