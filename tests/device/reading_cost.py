"""What it costs to read files: memory and time, in a process that has little of both."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PROGRAM = """
import json, resource, sys, time
from onnxtrain.errors import OnnxTrainError
from onnxtrain.format.checkpoint.file import read_checkpoint
from onnxtrain.format.model.file import ModelFile

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if "VmHWM" in line)

read = {"checkpoint": read_checkpoint, "model": ModelFile.read}[sys.argv[1]]
limit = 1 << 31  # of addresses; a terabyte must not even be asked for in vain
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for path in sys.argv[2:]:
    before, began = peak(), time.monotonic()
    try:
        read(path)
        error = None
    except OnnxTrainError as wrong:
        error = str(wrong)
    print(json.dumps([error, peak() - before, time.monotonic() - began]), flush=True)
"""


def costs_of(kind: str, paths: Sequence[Path]) -> list[tuple[str | None, int, float]]:
    """The error, the kilobytes and the seconds of each file, which is a checkpoint or a model."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind, *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    found = [tuple(json.loads(line)) for line in result.stdout.splitlines()]
    assert len(found) == len(paths)
    return found
