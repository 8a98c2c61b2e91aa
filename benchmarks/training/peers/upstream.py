"""onnxruntime-training 1.19.2, on the artifacts that it generated itself."""

from __future__ import annotations

import os
from typing import Any

from onnxruntime import SessionOptions
from onnxruntime.training.api import CheckpointState, Module, Optimizer

from plan import LEARNING_RATE, Workload


def open_step(workload: Workload, folder: str, options: dict[str, Any], threads: int):
    files = f"{folder}/{options['artifacts']}"
    failure = f"{files}/failure.txt"
    if os.path.exists(failure):
        with open(failure) as file:
            raise RuntimeError(file.read())
    session_options = SessionOptions()
    session_options.log_severity_level = 3
    if os.cpu_count() != threads:
        session_options.intra_op_num_threads = threads
    state = CheckpointState.load_checkpoint(f"{files}/checkpoint")
    module = Module(f"{files}/training_model.onnx", state, session_options=session_options)
    optimizer = Optimizer(f"{files}/optimizer_model.onnx", module)
    optimizer.set_learning_rate(LEARNING_RATE)
    module.train()

    def step(x, labels) -> float:
        loss = module(x, labels)
        optimizer.step()
        module.lazy_reset_grad()
        return float(loss)

    return step
