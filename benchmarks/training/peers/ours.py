"""onnxtrain: the artifacts of the folder, in the fused step, as a user gets it by default.

With the option `calls="module"`, by the calls of scripts for onnxruntime's own training API.
"""

from __future__ import annotations

import os
from typing import Any

from onnxtrain.api import CheckpointState, Module, Optimizer, TrainingSession
from plan import LEARNING_RATE, Workload


def open_step(workload: Workload, folder: str, options: dict[str, Any], threads: int):
    if options.get("calls") == "module":
        return _open_module(f"{folder}/ours", threads)
    session = TrainingSession.from_folder(f"{folder}/ours", session_options=_options(threads))
    session.set_learning_rate(LEARNING_RATE)

    def step(x, labels) -> float:
        return float(session.step(x, labels))

    return step


def _open_module(folder: str, threads: int):
    state = CheckpointState.load_checkpoint(f"{folder}/checkpoint")
    module = Module(f"{folder}/training_model.onnx", state, session_options=_options(threads))
    optimizer = Optimizer(f"{folder}/optimizer_model.onnx", module)
    optimizer.set_learning_rate(LEARNING_RATE)

    def step(x, labels) -> float:
        loss = module(x, labels)
        optimizer.step()
        module.lazy_reset_grad()
        return float(loss)

    return step


def _options(threads: int):
    """None, the default, unless the machine has more cores than there are to be threads."""
    if os.cpu_count() == threads:
        return None
    from onnxtrain.device.run.session_settings import default_options

    def limited():
        made = default_options()
        made.intra_op_num_threads = threads
        return made

    return limited
