"""Gradients are added to what was accumulated, or replace it."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.offline.graph.ops import Ops

Pair = tuple[ir.Value, ir.Value]  # what was accumulated so far, and the gradient


def accumulate(
    op: Ops, reset: ir.Value, pairs: Sequence[Pair], *, branches: bool = True
) -> list[ir.Value]:
    """Return the sum of each pair, or, where `reset` is true (BOOL[1]), its gradient.

    With `branches`, the choice is made once for all of them. A gradient that replaces what was
    there is then not touched: where a runtime binds it to the memory of the result, nothing is
    copied.
    """

    def write() -> Sequence[ir.Value]:
        if not branches:
            flag = op.squeeze(reset, [0])
            return [op.Where(flag, gradient, op.Add(old, gradient)) for old, gradient in pairs]
        replaced = op.body([], lambda: [gradient for _, gradient in pairs], "replace")
        added = op.body([], lambda: [op.Add(*pair) for pair in pairs], "add")
        made = op.call("If", reset, outputs=len(pairs), then_branch=replaced, else_branch=added)
        for total, (_, gradient) in zip(made, pairs, strict=True):
            op.type_as(total, gradient)
        return made

    inputs = [reset, *(value for pair in pairs for value in pair)]
    return op.kernel("AccumulateGradients", inputs, write, gradients=len(pairs))
