"""Trains, saves, resumes, exports, prepares and federates for hours, while things go wrong.

    python tests/crash/soak.py --minutes 15

Two processes do this in folders of their own. System calls fail, the disk is full, the clock jumps;
the first is stopped and continued, the second killed and started again. Each state that is found
must be the old or the new one, each error one of ours; and memory, threads and descriptors of the
first must not grow. Ends with a table, and with 1 if something was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from faults import Faults
from operations import GOLDEN, OPERATIONS, Operation

MEGABYTES = 2**20
NUMBERS = 8
# The disk of a process holds a few times of what it writes.
DISK = "24m"


# ---- a process that works ------------------------------------------------------------------------


def work(folder: Path, seed: int) -> None:
    """Do one thing after the other, for ever; a line of JSON for each round goes to `report`."""
    rng = random.Random(seed)
    faults = Faults(folder, rng)
    names = [name for name in OPERATIONS if name != "artifacts"]
    counts: Counter[str] = Counter()
    for number in _without_end():
        for name in rng.sample(names, 4) + ["artifacts"] * (rng.random() < 0.3):
            place = folder / name
            place.mkdir(exist_ok=True)
            attempt(OPERATIONS[name], place, number, faults, counts)
        if rng.random() < 0.2:
            federate(folder / "federation", faults, counts)
        gc.collect()
        print(json.dumps(counts), file=sys.stdout, flush=True)


def _without_end() -> Iterator[int]:
    while True:
        yield from range(1, NUMBERS + 1)


def attempt(
    operation: Operation, place: Path, number: int, faults: Faults, counts: Counter[str]
) -> None:
    """Write a number while something fails; afterwards, the old or the new one must be there."""
    from onnxtrain.errors import OnnxTrainError

    old, kind = operation.read(place), faults.some()
    allowed = {old, number} | (set(range(NUMBERS + 1)) if operation.gradual else set())
    try:
        with faults.during(kind):
            operation.write(place, number)
        allowed = {number} | (allowed if operation.gradual else set())
        counts["done"] += 1
    except OnnxTrainError:
        counts[f"refused: {kind}"] += 1
    except Exception:
        _note_foreign(f"{operation.name}, {kind}", counts)
    found = operation.read(place)
    if found not in allowed and not (operation.gradual and found is None):
        raise AssertionError(f"{operation.name}, {kind}: {found} was found, not {allowed}")
    with faults.during("read"):
        try:
            if operation.read(place) not in {found}:
                raise AssertionError(f"{operation.name}: another state was read")
        except OnnxTrainError:
            counts["refused: read"] += 1
        except Exception:
            _note_foreign(f"reading of {operation.name}", counts)


def _note_foreign(what: str, counts: Counter[str]) -> None:
    """Note an exception that is not ours."""
    counts[f"foreign: {what}: {sys.exc_info()[1]!r:.100}"] += 1
    traceback.print_exc()


def federate(folder: Path, faults: Faults, counts: Counter[str]) -> None:
    """Three clients and a server in this process, for one more round than before."""
    if find_spec("flwr") is None:
        return
    import logging

    import numpy as np

    from onnxtrain.errors import OnnxTrainError
    from onnxtrain.federated import client_app, run_locally, server_app

    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    folder.mkdir(exist_ok=True)
    x = np.random.default_rng(0).normal(size=(24, 8)).astype(np.float32)
    labels = x[:, :3].argmax(axis=1)
    client = client_app(GOLDEN / "mlp", (x, labels), state=folder, keep_optimizer=True)
    if faults._rng.random() < 0.1:
        shutil.rmtree(folder)
        folder.mkdir()
    server = server_app(
        GOLDEN / "mlp", num_rounds=2, config={"local-epochs": 1, "batch-size": 8, "seed": 3},
        state=folder, finish=lambda result, session: session.eval_step(x[:8], labels[:8]),
    )  # fmt: skip
    kind = faults.some()
    try:
        with faults.during(kind):
            run_locally(server, client, 3)
        counts["federated"] += 1
    except OnnxTrainError:
        counts[f"refused federation: {kind}"] += 1
    except Exception:
        _note_foreign(f"federation, {kind}", counts)


# ---- the one that makes trouble ------------------------------------------------------------------


class Worker:
    """A process that works in a folder."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.log = folder.with_name(f"{folder.name}.log")
        self.start()

    def start(self) -> None:
        """Start it, where the last one ended."""
        self.seed += 1
        with open(self.log, "ab") as log, open(self.log.with_suffix(".err"), "ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--work", str(self.folder), "--seed", str(self.seed)],
                stdout=log, stderr=errors,
            )  # fmt: skip

    def measure(self) -> dict[str, int]:
        """Return memory, threads and descriptors."""
        of = Path("/proc", str(self.process.pid))
        status = dict(
            line.split(":", 1) for line in (of / "status").read_text().splitlines() if ":" in line
        )
        return {
            "memory (MB)": int(status["VmRSS"].split()[0]) * 1024 // MEGABYTES,
            "threads": int(status["Threads"]),
            "descriptors": len(os.listdir(of / "fd")),
        }

    def counts(self) -> Counter[str]:
        """Return what the last line of its log says."""
        lines = [line for line in self.log.read_text().splitlines() if line.endswith("}")]
        return Counter(json.loads(lines[-1])) if lines else Counter()


@contextlib.contextmanager
def disk(folder: Path) -> Iterator[Path]:
    """A small disk of its own, where we may mount one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", str(folder)]
    mounted = False
    with contextlib.suppress(OSError):
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield folder
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def soak(seconds: float, root: Path, seed: int) -> int:
    """Let two processes work, and make trouble."""
    rng = random.Random(seed)
    samples: list[dict[str, int]] = []
    done: Counter[str] = Counter()
    with disk(root / "survivor") as first, disk(root / "victim") as second:
        survivor, victim = Worker(first, seed), Worker(second, seed + 1000)
        try:
            end, next_kill = time.monotonic() + seconds, time.monotonic() + 15
            while time.monotonic() < end:
                time.sleep(1)
                for worker in (survivor, victim):
                    if worker.process.poll() is not None:
                        errors = worker.log.with_suffix(".err").read_text()
                        print(f"{worker.folder.name} ended:\n{errors[-3000:]}")
                        return 1
                with contextlib.suppress(OSError, KeyError):  # it has just ended
                    samples.append(survivor.measure())
                if rng.random() < 0.1:
                    survivor.process.send_signal(signal.SIGSTOP)
                    time.sleep(rng.uniform(0, 1))
                    survivor.process.send_signal(signal.SIGCONT)
                    done["stopped and continued"] += 1
                if time.monotonic() > next_kill:
                    victim.process.kill()
                    victim.process.wait()
                    done["killed and started again"] += 1
                    victim.start()  # it reads what is there before it writes
                    next_kill = time.monotonic() + rng.uniform(4, 20)
        finally:
            for worker in (survivor, victim):
                worker.process.kill()
                worker.process.wait()
        foreign = [line for line in victim.log.read_text().splitlines() if "foreign" in line]
        return show(samples, done + survivor.counts(), foreign)


def show(samples: list[dict[str, int]], done: Counter[str], wrong: list[str]) -> int:
    """Print the tables; return whether something grew or was wrong."""
    for what, count in sorted(done.items()):
        print(f"{count:8,}  {what}")
    wrong = wrong + [what for what in done if what.startswith("foreign")]
    third = len(samples) // 3
    print(f"\n{'':14}{'middle third':>14}{'last third':>14}{'most':>8}")
    for what in samples[0]:
        middle, last = (
            statistics.median(s[what] for s in part)
            for part in (samples[third : 2 * third], samples[2 * third :])
        )
        print(f"{what:14}{middle:14.0f}{last:14.0f}{max(s[what] for s in samples):8}")
        if last > middle * 1.05 + (8 if "memory" in what else 1):
            wrong.append(f"{what} grew from {middle} to {last}")
    for what in wrong:
        print("wrong:", what)
    return int(bool(wrong))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options: Any = parser.parse_args()
    if options.work:
        work(options.work, options.seed)
    if find_spec("flwr") is None:
        print("flwr is not installed: nothing is federated")
    root = Path(tempfile.mkdtemp(prefix="soak-"))
    code = soak(options.minutes * 60, root, options.seed)
    if code == 0:
        shutil.rmtree(root)
    else:
        print(f"what is left is in {root}")
    return code


if __name__ == "__main__":
    sys.exit(main())
