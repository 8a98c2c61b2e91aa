"""Kills processes while they write, and looks at what they leave.

    python tests/crash/kills.py [operation ...] [--kills 1000] [--writers 1]

Each operation is first killed before every call that changes its folder, in turn. Then processes
write without end and are killed at random moments, one or several at once. What is found must be
the last state that a process reported as written, or the one after it; the next write must leave
the files of a write without a kill.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import shutil
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from disk import dying
from operations import OPERATIONS, Operation
from power_loss import NEW, OLD, Report, Write, files_in, report_on, scratch

STATES = 8  # how many numbers there are; after the last comes the first
# Children of a process that has all modules but no thread of onnxruntime. It has no other path.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
)
_CHILDREN = multiprocessing.get_context("forkserver")
_CHILDREN.set_forkserver_preload(["operations", "onnxtrain.offline.prepare", "flwr.serverapp"])


def following(number: int) -> int:
    """Return the number after this one."""
    return number % STATES + 1


def _write_and_die(name: str, folder: Path, call: int) -> None:
    with dying(folder, call):
        OPERATIONS[name].write(folder, NEW)


def _write_without_end(name: str, folder: Path, number: int, written: Any) -> None:
    while True:
        OPERATIONS[name].write(folder, number)
        written.value = number
        number = following(number)


def start(target: Any, *arguments: Any) -> BaseProcess:
    """Start a child with this file's modules."""
    process = _CHILDREN.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def kill_at_every_call(operation: Operation, before: Write | None, report: Report) -> int:
    """Kill a write before each of its calls; return how many there are."""
    left: list[set[str]] = []  # after the write that follows each kill
    for call in itertools.count():
        with scratch() as name:
            folder = Path(name)
            if before is not None:
                before(folder, OLD)
            process = start(_write_and_die, operation.name, folder, call)
            process.join()
            old = None if before is None else OLD
            between = {OLD} if operation.gradual else set()
            look(operation, folder, {old, NEW, *between} if process.exitcode else {NEW}, report)
            operation.write(folder, NEW + 1)
            left.append(files_in(folder))
            if process.exitcode == 0:
                litter = [sorted(files ^ left[-1]) for files in left if files != left[-1]]
                report.litter += [f"{operation.name}: {files}" for files in litter]
                return call


def look(
    operation: Operation, folder: Path, allowed: set[int | None], report: Report
) -> int | None:
    """Read what is there, and note whether it may be."""
    try:
        found = operation.read(folder)
        if found not in allowed:
            raise AssertionError(f"{found} was found, not {allowed}")
    except Exception as error:
        report.found["wrong"] += 1
        held = sorted(files_in(folder))
        report.wrong.append(f"{operation.name}: {type(error).__name__}: {error} {held}")
        shutil.rmtree(folder)
        folder.mkdir()
        return None
    report.found["old" if found == min(allowed, key=lambda n: n or 0) else "new"] += 1
    return found


def kill_at_random(
    operation: Operation, kills: int, writers: int, report: Report, seed: int = 0
) -> None:
    """Kill processes that write without end, `kills` times."""
    rng = random.Random(seed)
    with scratch() as name:
        folder = Path(name) / "folder"
        folder.mkdir()
        operation.write(folder, 1)
        began = time.monotonic()
        operation.write(folder, 2)
        duration = time.monotonic() - began
        wanted, number = files_in(folder), 2
        for _ in range(kills):
            written = [_CHILDREN.Value("i", number, lock=False) for _ in range(writers)]
            processes = [
                start(_write_without_end, operation.name, folder, following(number), one)
                for one in written
            ]
            if rng.random() < 0.8:  # otherwise they may be killed before the first write
                while all(one.value == number for one in written):
                    time.sleep(0.001)
            time.sleep(rng.uniform(0, 2 * duration))
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
            allowed: set[int | None] = set()
            for one in written:
                allowed |= {one.value, following(one.value)}
                if operation.gradual and following(one.value) == 1:
                    allowed.add(None)
            found = look(operation, folder, allowed, report)
            number = found or 1
            if found is None or rng.random() < 0.7:  # otherwise the next child finds all of it
                number = following(number)
                operation.write(folder, number)
                if litter := files_in(folder) ^ wanted:
                    report.litter.append(f"{operation.name}: {sorted(litter)}")


def kill_operation(operation: Operation, kills: int, writers: int) -> Report:
    """Kill an operation at each of its calls, and at random for the rest."""
    report = Report()
    done = 0
    for before in (None, operation.write, *operation.others):
        done += kill_at_every_call(operation, before, report)
    kill_at_random(operation, max(0, kills - done), writers, report)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operations", nargs="*", default=list(OPERATIONS))
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--writers", type=int, default=1)
    options = parser.parse_args()
    kills = -(-options.kills // len(options.operations))
    return report_on(options.operations, lambda one: kill_operation(one, kills, options.writers))


if __name__ == "__main__":
    sys.exit(main())
