"""Saves, and dies at the k-th call of whatever changes the disk, for each k.

    python die_at_every_step.py <module> <folder> <file> <before> <after>

The module has `save(path, scale, threshold)` and `scale_of(path)`. Prints as JSON, for each k: what
could be read after the crash, what after one more save, and all files that are there then.
"""

import json
import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

CHANGES = ("replace", "rename", "fsync", "chmod", "unlink", "open", "link", "mkdir", "rmdir")


def die_at_every_step(module: str, folder: Path, file: str, before: int, after: int) -> list:
    """Run this program for a module of tests beside it."""
    result = subprocess.run(
        [sys.executable, __file__, module, str(folder), file, str(before), str(after)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def _dying(function, calls, limit):
    def call(*arguments, **keywords):
        calls.append(None)
        if len(calls) == limit:
            os._exit(9)
        return function(*arguments, **keywords)

    return call


def _save_and_die(tests, path, after, limit):
    """Save in a process of its own; return whether it lived."""
    child = os.fork()
    if child == 0:
        calls = []
        for name in CHANGES:
            setattr(os, name, _dying(getattr(os, name), calls, limit))
        tests.save(path, 2.0, after)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def main(module, folder, file, before, after):
    tests, folder = import_module(module), Path(folder)
    path = folder / file
    lines, lived = [], False
    while not lived:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        tests.save(path, 1.0, int(before))
        lived = _save_and_die(tests, path, int(after), len(lines) + 1)
        folder.rename(folder.with_name("moved"))  # nothing depends on where it is
        folder.with_name("moved").rename(folder)
        found = tests.scale_of(path)
        tests.save(path, 3.0, int(after))
        files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))
        lines.append([found, tests.scale_of(path), files])
    print(json.dumps(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
