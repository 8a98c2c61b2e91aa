"""Prints how far memory rises above a loaded session while steps are taken.

`python measure_step.py <artifacts> <batch>`: inputs are filled with small numbers.
"""

import sys
from pathlib import Path

import numpy as np

from onnxtrain.api import TrainingSession

TYPES = {1: np.float32, 7: np.int64}


def status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


if __name__ == "__main__":
    session, batch = TrainingSession.from_folder(sys.argv[1]), int(sys.argv[2])
    shape = [int(size) for size in sys.argv[3].split(",")]
    x = np.random.default_rng(0).standard_normal((batch, *shape)).astype(np.float32)
    y = np.zeros(batch, np.int64)
    session.step(x[:1], y[:1])  # moments and gradients have their memory from here on
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = status("VmRSS")
    session.step(x, y)
    session.step(x, y)
    print(status("VmHWM") - before)
