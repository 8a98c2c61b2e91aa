"""Time the optimizers on stock onnxruntime, beside torch's.

    python benchmarks/optimizers.py [--threads 1 2] [--repeats 30] [--rows 36864]

One table: milliseconds for one step over a table of rows × 128 parameters (4.7 million by default),
updated in place; the best and the median. All take turns, so that a busy machine disturbs them
alike; threads do not spin between turns, or each would slow down the next.

Columns: torch, one kernel for all (fused) and one for each operation (foreach); here, the operators
over the whole table, or over cache-sized pieces of it.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch

from onnxtrain.offline.graph.ops import Ops
from onnxtrain.onnxblock.optim import (
    SGD,
    Adagrad,
    AdamW,
    ClipGradNorm,
    Lion,
    Optimizer,
    RMSprop,
    write_optimizer,
)

Run = Callable[[], object]
OPTIMIZERS: dict[str, tuple[Optimizer, Any, dict[str, Any]]] = {
    "AdamW": (AdamW(), torch.optim.AdamW, {"weight_decay": 0.0}),
    "AdamW, decay": (AdamW.torch(), torch.optim.AdamW, {}),
    "AdamW, clipped": (AdamW(clip_grad=ClipGradNorm(1.0)), None, {}),
    "SGD": (SGD(), torch.optim.SGD, {}),
    "SGD, momentum": (SGD(momentum=0.9), torch.optim.SGD, {"momentum": 0.9}),
    "RMSprop": (RMSprop(), torch.optim.RMSprop, {}),
    "Adagrad": (Adagrad(), torch.optim.Adagrad, {}),
    "Lion": (Lion(), None, {}),
}


def ours(optimizer: Optimizer, shape: tuple[int, ...], threads: int, chunked: bool) -> Run:
    """Return one step with outputs bound to the memory of the inputs."""
    graph = ir.Graph([], [], nodes=[], name="optimizer", opset_imports={"": 18})
    parameters = [("p", ir.DataType.FLOAT, shape)]
    write_optimizer(Ops(graph, 18), optimizer, parameters, "flag", chunked=chunked)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.add_session_config_entry("session.force_spinning_stop", "1")
    model = ir.to_proto(ir.Model(graph, ir_version=8)).SerializeToString()
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    binding, kept = session.io_binding(), {}
    for info in session.get_inputs():
        array = np.abs(rng.standard_normal(info.shape)).astype(np.float32)
        if info.name == "learning_rate":
            array = np.full(1, 1e-6, np.float32)
        if info.name == "step":
            array = np.full(1, 7, np.int64)
        kept[info.name] = ort.OrtValue.ortvalue_from_numpy(array), array
        binding.bind_ortvalue_input(info.name, kept[info.name][0])
    for info in session.get_outputs():
        if info.name == "flag":
            binding.bind_output("flag")
        else:
            address = kept[info.name.removesuffix(".updated")][0].data_ptr()
            binding.bind_output(info.name, "cpu", 0, np.float32, info.shape, address)
    return lambda: (session.run_with_iobinding(binding), kept)


def theirs(kind: Any, settings: dict[str, Any], shape: tuple[int, ...], how: str) -> Run | None:
    parameter = torch.randn(shape, requires_grad=True)
    parameter.grad = torch.randn(shape)
    try:
        optimizer = kind([parameter], lr=1e-6, **settings, **{how: True})
    except TypeError:  # RMSprop has no fused kernel
        return None
    return optimizer.step  # type: ignore[no-any-return]


def table(threads: int, repeats: int, shape: tuple[int, ...]) -> None:
    torch.set_num_threads(threads)
    columns = ["torch fused", "torch foreach", "whole", "chunked"]
    print(
        f"\nms, best / median of {repeats}, {shape[0]} x {shape[1]} parameters, {threads} threads\n"
    )
    print(f"| {'optimizer':15} | " + " | ".join(f"{c:>15}" for c in columns) + " |")
    print("|" + "---|" * (len(columns) + 1))
    for name, (optimizer, kind, settings) in OPTIMIZERS.items():
        runs: dict[str, Run | None] = {
            "torch fused": kind and theirs(kind, settings, shape, "fused"),
            "torch foreach": kind and theirs(kind, settings, shape, "foreach"),
            "whole": ours(optimizer, shape, threads, chunked=False),
            "chunked": ours(optimizer, shape, threads, chunked=True),
        }
        times: dict[str, list[float]] = {column: [] for column in columns}
        for _ in range(repeats):
            for column, run in runs.items():
                if run is not None:
                    start = time.perf_counter()
                    run()
                    times[column].append(1e3 * (time.perf_counter() - start))
        cells = [f"{min(t):6.2f} / {np.median(t):6.2f}" if t else " " * 15 for t in times.values()]
        print(f"| {name:15} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--rows", type=int, default=36864)
    options = parser.parse_args()
    for threads in options.threads:
        table(threads, options.repeats, (options.rows, 128))


if __name__ == "__main__":
    main()
