"""What a federated round costs in Flower's simulation: beside local training, beside torch.

Three things are measured:

- a round over 10 clients against the sum of their local training;
- the same round with clients of torch, in the same app;
- the memory of all processes with 100 clients.

    python benchmarks/federated            # needs flwr[simulation] and torch
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "examples" / "federated")]

import mnist  # noqa: E402
import numpy as np  # noqa: E402
import page  # noqa: E402
from runtime import Flower, as_options, flower  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "federated")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--page", action="store_true", help="write docs/federated.md")
    given = parser.parse_args()
    folder = prepare(given.folder.absolute())
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as home, flower(Path(home)) as here:
        here.superlink("--simulation")
        # One client at a time: what is not training is conversion and messages.
        alone = cost(here, folder, given.rounds, cpus=os.cpu_count() or 1)
        both: dict[str, list[dict[str, float]]] = {"onnxtrain": [], "torch": []}
        for _ in range(given.repeats):
            for client, found in both.items():
                found.append(cost(here, folder, given.rounds, client=client))
        many = cost(here, folder, 2, clients=100, memory=True)
    ratio = alone["round"] / alone["training"]
    ours, torch = (statistics.median(c["round"] for c in both[k]) for k in ("onnxtrain", "torch"))
    local = {k: statistics.median(c["training"] for c in both[k]) for k in both}
    lines = [
        page.machine(load),
        "",
        "| | |",
        "|---|---|",
        f"| round of 10 clients, one after the other | {alone['round']:.2f} s |",
        f"| sum of their local training | {alone['training']:.2f} s |",
        f"| ratio | {ratio:.3f} |",
        f"| round of 10 clients, two at a time: onnxtrain | {ours:.2f} s "
        f"(training {local['onnxtrain']:.2f} s in total) |",
        f"| the same with torch clients | {torch:.2f} s "
        f"(training {local['torch']:.2f} s in total) |",
        f"| onnxtrain / torch | {ours / torch:.2f} |",
        f"| 100 clients: peak memory of all processes | {many['memory'] / 1e9:.2f} GB |",
        f"| 100 clients: a round | {many['round']:.1f} s |",
    ]
    print("\n".join(lines))
    if given.page:
        page.write("cost", "\n".join(lines))


def prepare(folder: Path) -> Path:
    """Write data and artifacts, once."""
    if not (folder / "y.npy").exists():
        x, y, _, _ = mnist.load(folder)
        np.save(folder / "x.npy", x)
        np.save(folder / "y.npy", y)
    if not (folder / "artifacts" / "step_model.onnx").exists():
        from network import write_artifacts

        write_artifacts(folder / "artifacts")
    return folder


def cost(
    here: Flower,
    folder: Path,
    rounds: int,
    *,
    client: str = "onnxtrain",
    clients: int = 10,
    cpus: int = 1,
    memory: bool = False,
) -> dict[str, float]:
    """Run a federation; return seconds of a round and of its training, and memory in bytes.

    The first round is left out: processes start in it, and sessions are made.
    """
    output = folder / "cost.json"
    output.unlink(missing_ok=True)
    settings: list[tuple[str, Any]] = [
        ("num-server-rounds", rounds), ("client", client), ("folder", str(folder)),
        ("output", str(output)),
    ]  # fmt: skip
    with watched(memory) as peak:
        here.run(
            HERE / "app",
            "--federation-config", f"num-supernodes={clients} client-resources-num-cpus={cpus}",
            "--run-config", as_options(settings),
        )  # fmt: skip
    found = [m for n, m in json.loads(output.read_text()).items() if int(n) > 1]
    assert all(m["clients"] == clients for m in found), found
    made = {
        "round": statistics.median(m["round_seconds"] for m in found),
        "training": statistics.median(m["train_seconds"] * m["clients"] for m in found),
        "memory": float(peak[0]),
    }
    print(f"{client}, {clients} clients, {cpus} cores each: {made}", flush=True)
    return made


@contextlib.contextmanager
def watched(wanted: bool) -> Any:
    """Look at the memory of all processes that were started since; what they share counts once."""
    peak, stop = [0], threading.Event()
    before = {os.getpid()}

    def watch() -> None:
        while not stop.wait(0.5):
            peak[0] = max(peak[0], sum(own_memory(p) for p in processes() if p not in before))

    thread = threading.Thread(target=watch)
    if wanted:
        thread.start()
    try:
        yield peak
    finally:
        stop.set()
        if wanted:
            thread.join()


def processes() -> list[int]:
    """Return the processes that come from this one, or were started in its sessions."""
    own = os.environ.get("FLWR_BENCH_MARK") or str(os.getpid())
    os.environ["FLWR_BENCH_MARK"] = own
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                if f"FLWR_BENCH_MARK={own}".encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
    return found


def own_memory(process: int) -> int:
    """Return the proportional share of memory of a process, in bytes."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    return 0


if __name__ == "__main__":
    os.environ["FLWR_BENCH_MARK"] = str(os.getpid())
    main()
