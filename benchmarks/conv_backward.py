"""Time every formulation of the gradients of Conv on stock onnxruntime, beside torch.

    python benchmarks/conv_backward.py [--threads 2] [--repeats 15] [--only weight|data]

One table for the weight gradient and one for the data gradient; milliseconds, best of the repeats.
The formulation that onnxtrain chooses for the shape is marked with *. Candidates take turns, so
that a busy machine disturbs all of them alike; threads do not spin between turns, or each would
slow down the next.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch

from onnxtrain.offline.autodiff.rules import conv_data, conv_weight
from onnxtrain.offline.autodiff.window import Window
from onnxtrain.offline.graph.ops import Ops


@dataclass(frozen=True)
class Case:
    """A square two-dimensional convolution."""

    batch: int
    channels: int
    size: int
    filters: int
    kernel: int
    stride: int
    pad: int
    groups: int = 1

    @property
    def windows(self) -> int:
        return (self.size + 2 * self.pad - self.kernel) // self.stride + 1

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """The shapes of x, w and dy."""
        return (
            (self.batch, self.channels, self.size, self.size),
            (self.filters, self.channels // self.groups, self.kernel, self.kernel),
            (self.batch, self.filters, self.windows, self.windows),
        )

    @property
    def window(self) -> Window:
        twice: Callable[[int], tuple[int, int]] = lambda i: (i, i)  # noqa: E731
        return Window(
            twice(self.kernel), twice(self.stride), twice(1), twice(self.pad), twice(self.pad)
        )

    def __str__(self) -> str:
        groups = f" /{self.groups}" if self.groups > 1 else ""
        return (
            f"{self.batch}x{self.channels}x{self.size} -> {self.filters}, "
            f"k{self.kernel} s{self.stride} p{self.pad}{groups}"
        )


RESNET18 = [
    Case(16, 3, 32, 64, 3, 1, 1),
    Case(16, 64, 32, 64, 3, 1, 1),
    Case(16, 64, 32, 128, 3, 2, 1),
    Case(16, 64, 32, 128, 1, 2, 0),
    Case(16, 128, 16, 128, 3, 1, 1),
    Case(16, 128, 16, 256, 3, 2, 1),
    Case(16, 256, 8, 256, 3, 1, 1),
    Case(16, 256, 8, 512, 3, 2, 1),
    Case(16, 256, 8, 512, 1, 2, 0),
    Case(16, 512, 4, 512, 3, 1, 1),
]
LENET = [
    Case(64, 1, 28, 32, 3, 1, 0),
    Case(64, 32, 26, 64, 3, 1, 0),
    Case(64, 6, 14, 16, 5, 1, 0),
]
MOBILENET = [
    Case(4, 3, 224, 32, 3, 2, 1),
    Case(4, 32, 112, 32, 3, 1, 1, 32),
    Case(4, 32, 112, 16, 1, 1, 0),
    Case(4, 16, 112, 96, 1, 1, 0),
    Case(4, 96, 112, 96, 3, 2, 1, 96),
    Case(4, 96, 56, 24, 1, 1, 0),
    Case(4, 24, 56, 144, 1, 1, 0),
    Case(4, 144, 56, 144, 3, 1, 1, 144),
    Case(4, 144, 56, 144, 3, 2, 1, 144),
    Case(4, 192, 28, 192, 3, 1, 1, 192),
    Case(4, 32, 28, 192, 1, 1, 0),
    Case(4, 64, 14, 384, 1, 1, 0),
    Case(4, 384, 14, 384, 3, 1, 1, 384),
    Case(4, 576, 14, 576, 3, 2, 1, 576),
    Case(4, 160, 7, 960, 1, 1, 0),
    Case(4, 960, 7, 960, 3, 1, 1, 960),
    Case(4, 320, 7, 1280, 1, 1, 0),
]
OTHER = [
    Case(16, 8, 32, 32, 3, 1, 1),
    Case(16, 16, 32, 32, 3, 1, 1),
    Case(16, 32, 32, 32, 3, 1, 1),
    Case(8, 64, 28, 64, 3, 1, 1, 4),
    Case(1, 64, 56, 64, 3, 1, 1),
    Case(32, 512, 7, 512, 3, 1, 1),
]
CASES = [*RESNET18, *LENET, *MOBILENET, *OTHER]

Write = Callable[[Ops, Sequence[ir.Value]], ir.Value]


def session(write: Write, shapes: Sequence[tuple[int, ...]], threads: int) -> ort.InferenceSession:
    """Compile a graph of float inputs i0, i1 … and one output."""
    inputs = []
    for number, shape in enumerate(shapes):
        value = ir.Value(name=f"i{number}")
        value.dtype, value.shape = ir.DataType.FLOAT, ir.Shape(shape)
        inputs.append(value)
    graph = ir.Graph(inputs, [], nodes=[], name="case", opset_imports={"": 18})
    op = Ops(graph, 18)
    with op.arithmetic():
        output = write(op, inputs)
    output.name = "out"
    graph.outputs.append(output)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.add_session_config_entry("session.force_spinning_stop", "1")
    model = ir.to_proto(ir.Model(graph, ir_version=8))
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def applicable_weight(case: Case) -> list[str]:
    if case.groups > 1 and case.channels == case.groups == case.filters:
        shifted = ["depthwise shifted"] if case.stride == 1 else []
        return ["depthwise", *shifted, "depthwise conv", "folded"]
    if case.groups > 1:
        return ["columns", "folded"]
    names = ["columns", "per image", "halves", "folded"]
    if case.batch % 2:
        names.remove("halves")
    if case.kernel == 1 and case.stride == 1:
        names = ["pointwise", "folded"]
    return names


def applicable_data(case: Case) -> list[str]:
    names = ["conv transpose"]
    if case.stride == 1:
        names.append("conv")
    if case.groups == 1:
        names.append("products")
    return names


def candidates(case: Case, kind: str, threads: int) -> tuple[dict[str, Callable[[], object]], str]:
    """Return what to time by name, checked against torch, and the name that is chosen."""
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(s).astype(np.float32) for s in case.shapes)
    tensors = [torch.from_numpy(a) for a in (dy, x, w)]

    def by_torch() -> torch.Tensor:
        mask = [kind == "data", kind == "weight", False]
        found = torch.ops.aten.convolution_backward(
            *tensors, None, [case.stride] * 2, [case.pad] * 2, [1, 1], False, [0, 0],
            case.groups, mask,
        )  # fmt: skip
        return found[0] if kind == "data" else found[1]

    runs: dict[str, Callable[[], object]] = {"torch": by_torch}
    expected = by_torch().numpy()
    chosen: list[str] = []
    for name in applicable_weight(case) if kind == "weight" else applicable_data(case):

        def write(op: Ops, inputs: Sequence[ir.Value], name: str = name) -> ir.Value:
            vx, vw, vdy = inputs
            if kind == "weight":
                pair = conv_weight.Pair(case.window, vx, vdy, case.groups, vw)
                chosen[:] = [conv_weight.choose(op, pair)]
                return conv_weight.FORMULATIONS[name](op, pair)
            arguments = (op, case.window, vdy, vw, case.groups, vx)
            chosen[:] = [conv_data.choose(*arguments)]
            return conv_data.SPREADS[name](*arguments)

        compiled = session(write, case.shapes, threads)
        feeds = {"i0": x, "i1": w, "i2": dy}
        feeds = {i.name: feeds[i.name] for i in compiled.get_inputs()}
        actual = compiled.run(None, feeds)[0]
        error = np.abs(actual - expected).max() / np.abs(expected).max()
        assert error < 1e-4, f"{case}: {name} is wrong by {error}"
        runs[name] = lambda compiled=compiled, feeds=feeds: compiled.run(None, feeds)
    return runs, chosen[0]


def best_times(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Let all take turns and return the best time of each in milliseconds."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
    return best


def table(kind: str, names: Sequence[str], threads: int, repeats: int) -> None:
    columns = ["torch", *names]
    print(f"\n{kind} gradient, ms, best of {repeats}, {threads} threads; * is chosen\n")
    print(f"| {'case':36} | " + " | ".join(f"{n:>10}" for n in columns) + " |")
    print("|" + "---|" * (len(columns) + 1))
    ours = theirs = 0.0
    for case in CASES:
        runs, chosen = candidates(case, kind, threads)
        best = best_times(runs, repeats)
        ours, theirs = ours + best[chosen], theirs + best["torch"]
        cells = [
            f"{best[n]:9.2f}{'*' if n == chosen else ' '}" if n in best else " " * 10
            for n in columns
        ]
        print(f"| {case!s:36} | " + " | ".join(cells) + " |", flush=True)
    print(f"\nsum of the chosen: {ours:.1f}, torch {theirs:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", choices=["weight", "data"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tables = {"weight": conv_weight.FORMULATIONS, "data": conv_data.SPREADS}
    for kind, formulations in tables.items():
        if options.only in (None, kind):
            table(kind, list(formulations), options.threads, options.repeats)


if __name__ == "__main__":
    main()
