"""Clipping of gradients, before an optimizer uses them."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.errors import BlockError
from onnxtrain.offline.blocks.append_graph import append_graph
from onnxtrain.offline.blocks.block import Block
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import static_dims, working_type
from onnxtrain.offline.graph.versions import FLOOR_OPSET

Clipped = tuple[list[ir.Value], ir.Value | None]

# One sum of 4.7 million squares is wrong by 1e-4 of the norm. By rows and then over the rows, it is
# right to 1e-7, and threads share the rows. Milliseconds with one and two threads, best of 25 on a
# busy machine: one ReduceL2 0.6 and 0.6; rows of 4,096 by ReduceL2 4.0 and 2.0, by ReduceSum of Mul
# 1.6 and 1.0.
_LONGEST_ROW = 8192


class GradientClip(Block):
    """A transform of all gradients before the update."""

    @abstractmethod
    def write(self, op: Ops, gradients: Sequence[ir.Value]) -> Clipped:
        """Return the gradients, and a float64 factor that the caller has to multiply them by.

        Optimizers multiply gradients by numbers anyway, so a common factor costs no extra pass.
        Gradients of a half type may come back in float32.
        """

    def build(self, *gradient_names: str) -> tuple[str, ...]:
        """Add the clipping of the named gradients; return the names of the clipped ones."""
        if not gradient_names:
            raise BlockError("there are no gradients to clip: give their names")
        return tuple(append_graph(gradient_names, self._scaled, "clip", least_opset=FLOOR_OPSET))

    def _scaled(self, op: Ops, *gradients: ir.Value) -> list[ir.Value]:
        clipped, factor = self.write(op, gradients)
        if factor is not None:
            working = [op.cast(g, working_type(g)) for g in clipped]
            clipped = [op.Mul(g, op.cast(factor, g.dtype)) for g in working]
        return [op.cast(c, g.dtype) for c, g in zip(clipped, gradients, strict=True)]


class ClipGradNorm(GradientClip):
    """Scale all gradients by min(max_norm / (norm + 1e-6), 1), of their common L2 norm."""

    def __init__(self, max_norm: float) -> None:
        super().__init__()
        if not max_norm > 0:
            raise BlockError(f"max_norm is {max_norm}; it must be above zero")
        self.max_norm = max_norm

    def write(self, op: Ops, gradients: Sequence[ir.Value]) -> Clipped:
        """Return the gradients as they are, and the factor."""
        squares = [op.cast(sum_of_squares(op, g), ir.DataType.DOUBLE) for g in gradients]
        return list(gradients), self.factor(op, op.Concat(*squares, axis=0))

    def factor(self, op: Ops, squares: ir.Value) -> ir.Value:
        """Return the factor for gradients from the sum of squares of each."""
        total = op.ReduceSum(op.cast(squares, ir.DataType.DOUBLE), keepdims=0)
        return op.Min(op.Div(self.max_norm, op.Add(op.Sqrt(total), 1e-6)), 1.0)


class ClipGradValue(GradientClip):
    """Limit each element of each gradient to [-clip_value, clip_value]."""

    def __init__(self, clip_value: float) -> None:
        super().__init__()
        if not clip_value > 0:
            raise BlockError(f"clip_value is {clip_value}; it must be above zero")
        self.clip_value = clip_value

    def write(self, op: Ops, gradients: Sequence[ir.Value]) -> Clipped:
        """Return the limited gradients."""
        working = [op.cast(g, working_type(g)) for g in gradients]
        return [op.Clip(g, -self.clip_value, self.clip_value) for g in working], None


def sum_of_squares(op: Ops, gradient: ir.Value) -> ir.Value:
    """Return the sum of the squares of all elements, as a vector of length one."""
    g = op.cast(gradient, working_type(gradient))
    dims = static_dims(gradient)
    squares = op.Mul(g, g)
    if dims is None:
        rows = squares
    else:
        count = math.prod(dims)
        row = next(r for r in range(min(count, _LONGEST_ROW) or 1, 0, -1) if count % r == 0)
        rows = op.ReduceSum(op.reshape(squares, [count // row, row]), [1], keepdims=0)
    return op.reshape(op.ReduceSum(rows, keepdims=0), [1])
