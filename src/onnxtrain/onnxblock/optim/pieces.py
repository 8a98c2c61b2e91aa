"""Updating a large tensor piece by piece, while the piece is in the cache.

onnxruntime runs one element-wise operator after the other, each over the whole tensor. The twelve
of AdamW read and write a large table twelve times from memory. A Scan over pieces runs all twelve
on one piece before it goes on to the next; it hands out views of its inputs and outputs, so nothing
is copied to cut and join.

AdamW on 36,864 × 128 parameters in place, ms, on 2 cores (1 MiB of second-level cache each) that
others used as well. Three runs of interleaved candidates, of 25, 40 and 40 turns; the machine was
busiest in the third, so compare within a column only:

    way                            one thread, median      two threads, best
    whole                          23.1   25.0   49.7      18.8   19.4   32.1
    Slice, update, Concat, 262,144 29.4    -     61.1      30.1    -     73.3
    Scan, 65,536 elements each     17.6   16.3   33.7      11.0   12.0   25.7
    Scan, 131,072                  15.3   14.8   32.7      10.4   15.7   27.6
    Scan, 262,144                  15.8   14.1   30.1       8.3   14.3   27.7
    Scan, 524,288                   -     14.3   32.9       -     19.2   14.0
    torch fused                     7.1    6.0   11.1       2.9    1.9    3.2
    torch foreach                  13.3   12.9   31.4      10.2    9.7    9.2

With one thread a Scan takes 0.56 to 0.68 of the time of the whole, and 262,144 is as good as any.
With two threads it was faster in every run too, by anything from 1.2 to 2.3 times; which size is
best there is open, and wants a quiet machine (benchmarks/optimizers.py).

The Reshape to the shape of the parameter is a copy, since it makes an output of the graph; it costs
what the pieces gain (262,144 and one thread: 23.3 and 48.0 in the second and third run). So what
comes out in pieces stays in pieces, in the same memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnxtrain.autodiff.ops import Ops
from onnxtrain.autodiff.shapes import static_dims

PIECE = 262_144  # elements; see the table for what is known of it


def update_in_pieces(
    op: Ops,
    update: Callable[..., Sequence[ir.Value]],
    tensors: Sequence[ir.Value],
    flag: ir.Value | None = None,
) -> tuple[ir.Value, ...] | None:
    """Write `update(parameter, gradient, *states)` as a Scan over pieces of all of them.

    The results have the shape [pieces, elements of a piece]. None for what is too small, or has a
    size that cannot be cut into equal pieces. The Scan carries `flag` along, so that it waits for
    it: a Reshape that waits would be merged with the one that cuts.
    """
    dims = static_dims(tensors[0])
    piece = None if dims is None else piece_of(math.prod(dims))
    if dims is None or piece is None:
        return None
    count = math.prod(dims) // piece
    carried = [] if flag is None else [flag]
    cut = [op.reshape(tensor, [count, piece]) for tensor in tensors]
    labels = ["parameter", "gradient", *(f"momentum{i}" for i in range(len(tensors) - 2))]
    inputs = [
        *(("wait", ir.DataType.INT64, [1]) for _ in carried),
        *((n, t.dtype or ir.DataType.FLOAT, [piece]) for n, t in zip(labels, tensors, strict=True)),
    ]
    body = op.body(inputs, lambda *v: [*v[: len(carried)], *update(*v[len(carried) :])], "piece")
    results = op.call(
        "Scan", *carried, *cut, outputs=len(body.outputs), body=body, num_scan_inputs=len(cut)
    )[len(carried) :]
    for result, inner in zip(results, body.outputs[len(carried) :], strict=True):
        result.type = inner.type
        op.with_dims(result, [count, piece])
    return results


def piece_of(elements: int) -> int | None:
    """Return the size of a piece: the divisor that is nearest to PIECE, within a factor of two."""
    if elements < 2 * PIECE:
        return None
    counts = range(math.ceil(elements / (2 * PIECE)), elements // (PIECE // 2) + 1)
    fitting = [elements // count for count in counts if elements % count == 0]
    return min(fitting, key=lambda size: abs(size - PIECE), default=None)
