"""Graphs for WebGPU: which operators have kernels, and how to write the others with these.

`generate_artifacts(..., target="webgpu")` rewrites every graph with `rewrite_for_webgpu`, and tells
with `uncovered` which nodes on floats onnxruntime-web would still run on the CPU.
"""

from onnxtrain.offline.passes.webgpu.kernels import (
    ONNXRUNTIME_WEB,
    Uncovered,
    uncovered,
    warn_of_uncovered,
)
from onnxtrain.offline.passes.webgpu.rewrite import rewrite_for_webgpu

__all__ = ["ONNXRUNTIME_WEB", "Uncovered", "rewrite_for_webgpu", "uncovered", "warn_of_uncovered"]
