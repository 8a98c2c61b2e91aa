"""Prints how far memory rises above the loaded session while a graph runs once.

`python measure_memory.py <graph> <batch>`: every symbolic dimension is the batch.
"""

import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort

from onnxtrain.device.run.session_settings import default_options

TYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(bool)": np.bool_}


def status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


if __name__ == "__main__":
    # As a device makes it.
    session, batch = ort.InferenceSession(sys.argv[1], default_options()), int(sys.argv[2])
    feeds = {
        i.name: np.full([d if isinstance(d, int) else batch for d in i.shape], 0.01).astype(
            TYPES[i.type]
        )
        for i in session.get_inputs()
    }
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = status("VmRSS")
    session.run(None, feeds)
    print(status("VmHWM") - before)
