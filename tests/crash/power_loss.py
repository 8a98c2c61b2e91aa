"""Lets power fail at every moment of an operation, and looks at what is left.

    python tests/crash/power_loss.py [operation ...] [--limit 2000] [--nested 40]

What is found must be the old state or the new, whole; the next write must succeed, and leave the
files of a write without a crash. The same is done for that next write, which has more to tidy up.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from disk import Recorder, Tree, crash_states, replay
from operations import OPERATIONS, Operation

Write = Callable[[Path, int], object]
OLD, NEW = 1, 2


@dataclass
class Report:
    """How many states were found old or new, and what was wrong."""

    found: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    litter: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        states = ", ".join(f"{n} {what}" for what, n in sorted(self.found.items(), key=str))
        return f"{self.found.total()} states: {states}; {len(self.litter)} with litter"


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder in memory, if there is one: the recorder plays the disk."""
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)


def files_in(folder: Path) -> set[str]:
    """All paths in a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def record(write: Write, number: int, before: Tree) -> tuple[Tree, list, set[str]]:
    """Write in a folder with some content; return it, the operations, and the files afterwards."""
    with scratch() as name:
        folder = Path(name)
        before.write(folder)
        with Recorder(folder) as recorder:
            write(folder, number)
        whole = Tree()
        with Recorder(folder) as after:
            whole = after.start
        assert replay(recorder.start, recorder.operations).key() == whole.key(), "it missed a call"
        return recorder.start, recorder.operations, files_in(folder)


def state_after(write: Write | None, number: int) -> Tree:
    """What a folder holds after a write; nothing, without one."""
    with scratch() as name:
        folder = Path(name)
        if write is not None:
            write(folder, number)
        with Recorder(folder) as recorder:
            return recorder.start


def fail_during(
    operation: Operation,
    before: Tree,
    allowed: set[int | None],
    number: int,
    limit: int,
    nested: int,
    report: Report,
    wanted: set[str] | None = None,
    every: int = 1,
) -> None:
    """Let power fail while `operation` writes a number where `before` is.

    A state that is left even after the write has returned must be the new one.
    """
    start, operations, files = record(operation.write, number, before)
    wanted = wanted or files
    allowed = allowed | {number} | (set(range(1, number)) if operation.gradual else set())
    states = list(crash_states(start, operations, limit))
    step = max(1, len(states) // nested) if nested else len(states) + 1
    for k, (tree, returned) in enumerate(states):
        may_be = {number} if returned else allowed
        following = number + 1 if k % every == 0 else None
        found = check(operation, tree, may_be, following, wanted, report)
        if nested and k % step == step - 1 and found != "wrong":
            fail_during(operation, tree, {found}, number + 1, min(limit, 30), 0, report, wanted)


def check(
    operation: Operation,
    tree: Tree,
    allowed: set[int | None],
    following: int | None,
    wanted: set[str],
    report: Report,
) -> int | str | None:
    """Read a state, and write the following number after it, if there is one."""
    with scratch() as name:
        folder = Path(name)
        tree.write(folder)
        held = ", ".join(path for path, _ in tree.paths())
        try:
            found = operation.read(folder)
            if found not in allowed:
                raise AssertionError(f"{found} was found, not {allowed}")
            if following is not None:
                operation.write(folder, following)
                if (after := operation.read(folder)) != following:
                    raise AssertionError(f"after the next write, {after} was found")
                if missing := wanted - files_in(folder):
                    raise AssertionError(f"the next write lacks {sorted(missing)}")
        except Exception as error:
            report.found["wrong"] += 1
            report.wrong.append(f"{operation.name}: {type(error).__name__}: {error} [{held}]")
            return "wrong"
        if following is not None and (litter := files_in(folder) - wanted):
            report.litter.append(f"{operation.name}: the next write left {litter} [{held}]")
        report.found[found] += 1
        return found


def check_operation(operation: Operation, limit: int, nested: int, every: int = 1) -> Report:
    """Check an operation in an empty folder, over its own files, and over those of other ways.

    One in `every` states is written over.
    """
    report = Report()
    for write in (None, operation.write, *operation.others):
        before = state_after(write, OLD)
        old = None if write is None else OLD
        fail_during(operation, before, {old}, NEW, limit, nested, report, every=every)
    return report


def report_on(names: list[str], check: Callable[[Operation], Report]) -> int:
    """Print what a check of each operation finds; return 1 if something is wrong."""
    wrong = 0
    for name in names:
        began = time.monotonic()
        report = check(OPERATIONS[name])
        print(f"{name:18} {report} ({time.monotonic() - began:.0f} s)", flush=True)
        for line in (report.wrong + report.litter)[:12]:
            print("   ", line)
        wrong += len(report.wrong + report.litter)
    return int(wrong > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operations", nargs="*", default=list(OPERATIONS))
    parser.add_argument("--limit", type=int, default=2000)
    parser.add_argument("--nested", type=int, default=40)
    options = parser.parse_args()
    return report_on(
        options.operations, lambda one: check_operation(one, options.limit, options.nested)
    )


if __name__ == "__main__":
    sys.exit(main())
