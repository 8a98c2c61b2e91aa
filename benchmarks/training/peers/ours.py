"""onnxtrain: the artifacts of the folder, in the fused step, as a user gets it by default."""

from __future__ import annotations

import os
from typing import Any

from onnxtrain.api import TrainingSession
from plan import LEARNING_RATE, Workload


def open_step(workload: Workload, folder: str, options: dict[str, Any], threads: int):
    session = TrainingSession.from_folder(f"{folder}/ours", session_options=_options(threads))
    session.set_learning_rate(LEARNING_RATE)

    def step(x, labels) -> float:
        return float(session.step(x, labels))

    return step


def _options(threads: int):
    """None, the default, unless the machine has more cores than there are to be threads."""
    if os.cpu_count() == threads:
        return None
    from onnxtrain.device.run.graph import default_options

    def limited():
        made = default_options()
        made.intra_op_num_threads = threads
        return made

    return limited
