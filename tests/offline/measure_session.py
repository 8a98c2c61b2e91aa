"""Prints how far memory rises above the open session in its first steps.

`python measure_session.py <artifacts> <eval_step or step>`: inputs are (4, 1024) numbers.
"""

import sys
from pathlib import Path

import numpy as np

from onnxtrain import TrainingSession


def status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


if __name__ == "__main__":
    session = TrainingSession(sys.argv[1])
    run = getattr(session, sys.argv[2])
    x = np.ones((4, 1024), np.float32)
    before = status("VmRSS")
    for _ in range(2):
        run(x, x)
    print(status("VmHWM") - before)
