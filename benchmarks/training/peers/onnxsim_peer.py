"""onnxsim, on the model with the loss in it: its training loop, or the step graph that it makes.

The loop runs its graph with all of onnxruntime's optimizations off. Its documentation offers the
graph to be run elsewhere, so it is also run in a session with the default options.
"""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import onnxruntime as ort

from plan import LEARNING_RATE, Workload


def open_step(workload: Workload, folder: str, options: dict[str, Any], threads: int):
    folder = f"{folder}/onnxsim"
    failure = f"{folder}/failure.txt"
    if os.path.exists(failure):
        with open(failure) as file:
            raise RuntimeError(file.read())
    one_hot = np.eye(workload.classes, dtype=np.float32)
    run = _loop(folder, threads) if options["run"] == "loop" else _StepGraph(folder, threads)

    def step(x, labels) -> float:
        return run({"x": x, "targets": one_hot[labels]})

    return step


def _loop(folder: str, threads: int):
    import onnx
    import onnxsim

    if os.cpu_count() != threads:
        _limit(onnxsim.backend, threads)
    with open(f"{folder}/names.json") as file:
        params = json.load(file)["params"]
    model = onnx.load(f"{folder}/model.onnx")
    loop = onnxsim.compile_training_loop(model, "loss", params)
    return lambda feeds: loop(feeds, lr=LEARNING_RATE)


def _limit(backend: Any, threads: int) -> None:
    """Its loop takes all cores and has no setting for that; give its sessions one."""
    plain = ort.SessionOptions

    def limited():
        made = plain()
        made.intra_op_num_threads = threads
        return made

    backend.rt.SessionOptions = limited


class _StepGraph:
    """The step graph; state goes back and forth between two sets of buffers."""

    def __init__(self, folder: str, threads: int) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        if os.cpu_count() != threads:
            options.intra_op_num_threads = threads
        self._session = ort.InferenceSession(f"{folder}/step.onnx", options)
        with open(f"{folder}/names.json") as file:
            names = json.load(file)
        self._loss = names["loss"]
        self._bindings = self._bind(names["state"], dict(np.load(f"{folder}/state.npz")))
        self._steps = 0

    def _bind(self, state: dict[str, str], initial: dict[str, np.ndarray]) -> list[Any]:
        values = {name: ort.OrtValue.ortvalue_from_numpy(initial[name]) for name in state}
        others = {
            name: ort.OrtValue.ortvalue_from_numpy(np.empty_like(initial[name])) for name in state
        }
        self._kept = initial, values, others  # the values alias the arrays
        bindings = []
        for read, written in ((values, others), (others, values)):
            binding = self._session.io_binding()
            for name, output in state.items():
                binding.bind_ortvalue_input(name, read[name])
                binding.bind_ortvalue_output(output, written[name])
            binding.bind_output(self._loss)
            bindings.append(binding)
        return bindings

    def __call__(self, feeds: dict[str, np.ndarray]) -> float:
        self._steps += 1
        numbers = {
            "lr": LEARNING_RATE,
            "m_correction": 1 / (1 - 0.9**self._steps),
            "v_correction": 1 / (1 - 0.999**self._steps),
        }
        binding = self._bindings[self._steps % 2 - 1]
        for name, array in feeds.items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
        for name, number in numbers.items():
            array = np.array(number, np.float32)
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
        self._session.run_with_iobinding(binding)
        return float(binding.get_outputs()[-1].numpy())
