"""Chunked updates: all operators of an update run on one chunk of a large tensor, then on the next.

onnxruntime runs one element-wise operator after the other, each over the whole tensor. The twelve
of AdamW read and write a large table twelve times from memory. A Scan over chunks runs all twelve
while a chunk is in the cache. Its slices are views of its inputs and outputs, so nothing is copied.

AdamW in place, ms, median of 20 on 2 quiet cores (1 MiB of second-level cache each, one last-level
cache), the tensors out of the caches before each:

    parameters                     2.36 million     3.91 million     1.18 million
    threads                         two     one      two     one      two     one
    whole                           5.6     8.9     10.2    15.4      2.7     3.9
    Scan, 32,768 elements each      6.2     6.3     10.0    10.2      3.2     3.2
    Scan, 65,536                    5.9     6.2      9.6     9.7      3.0     3.1
    Scan, 131,072                   4.1     5.9      6.5     9.4      2.0     3.0
    Scan, 262,144                   3.6     5.8      5.6     9.0      1.9     3.1
    Scan, 524,288                   3.7     6.2      5.7     9.5      2.2     3.3
    torch, fused                    1.7     1.9      2.5     2.7      1.1     1.1

Below 131,072 elements onnxruntime leaves a second thread idle (benchmarks/optimizers.py).

A Reshape of the results to the shape of the parameter would be a copy, since it makes an output of
the graph, and cost what chunking gains. So the results stay chunked; the memory is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import static_dims

CHUNK = 262_144  # elements; see the table


def update_chunked(
    op: Ops,
    update: Callable[..., Sequence[ir.Value]],
    tensors: Sequence[ir.Value],
) -> tuple[ir.Value, ...] | None:
    """Write `update(parameter, gradient, *states)` as a Scan over chunks of all of them.

    The results have the shape [chunks, elements of a chunk]. None for a tensor that is too small,
    or whose size has no suitable divisor.
    """
    cut = chunks_of(tensors[0])
    if cut is None:
        return None
    count, size = cut
    chunks = [op.reshape(tensor, [count, size]) for tensor in tensors]
    labels = ["parameter", "gradient", *(f"momentum{i}" for i in range(len(tensors) - 2))]
    inputs = [
        (n, t.dtype or ir.DataType.FLOAT, [size]) for n, t in zip(labels, tensors, strict=True)
    ]
    body = op.body(inputs, update, "chunk")
    results = op.call(
        "Scan", *chunks, outputs=len(body.outputs), body=body, num_scan_inputs=len(chunks)
    )
    for result, inner in zip(results, body.outputs, strict=True):
        result.type = inner.type
        op.with_dims(result, [count, size])
    return results


def chunks_of(tensor: ir.Value) -> tuple[int, int] | None:
    """Return how many chunks a tensor is cut into, and their size; None if it stays whole."""
    dims = static_dims(tensor)
    size = None if dims is None else chunk_size(math.prod(dims))
    return None if dims is None or size is None else (math.prod(dims) // size, size)


def chunk_size(elements: int) -> int | None:
    """Return the divisor nearest to CHUNK, within a factor of two; None if there is none."""
    if elements < 2 * CHUNK:
        return None
    counts = range(math.ceil(elements / (2 * CHUNK)), elements // (CHUNK // 2) + 1)
    fitting = [elements // count for count in counts if elements % count == 0]
    return min(fitting, key=lambda size: abs(size - CHUNK), default=None)
