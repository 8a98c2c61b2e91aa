"""Rules for onnxruntime's products with quantized weights, which stay in the forward pass.

The weights are frozen integers. The backward pass expands those of one layer when the gradient of
its output is there, multiplies, and forgets them: at no time is there a second float matrix, and
onnxruntime cannot expand them when it loads the graph, because they wait for the gradient.

The integers are read where they are, two or four to a byte. They are never put side by side: the
lower halves of all bytes are one matrix, the upper halves another, and only their products with the
gradient, which are small, are woven together. A block of integers that share a scale is a row here,
so that DequantizeLinear of one scale for each row does it, which every opset has. For a matrix of
1536×576 and 256 rows this took 5.2 ms of one core, DequantizeLinear of a 4-bit tensor (opset 21,
and a second copy of the weights in the file) 6.7, and the product with floats alone 4.2.

The native library multiplies by the integers without expanding them (`native/kernels/quantized.h`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import (
    Cotangents,
    optional,
    required,
    rule,
    zero_gradient,
)
from onnxtrain.offline.graph.control_dependencies import flag_of, wait_for
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.quantized_operators import MICROSOFT, is_kept
from onnxtrain.offline.graph.shapes import constant_array, is_float, static_dims, working_type

zero_gradient(
    "GatherBlockQuantized",
    domain=MICROSOFT,
    reason="it looks up integers, and its quantization scales do not train",
)


@rule(
    "MatMulNBits",
    domain=MICROSOFT,
    covers=is_kept,
    notes="to the matrix and the bias; weights are expanded when the gradient is there",
)
def matmul_n_bits(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """DA = dY W with W = (quantized - zero point) scale, and dbias = Σ dY."""
    (a,), bias = required(node), optional(node, 5)
    seed = op.cast(dy, working_type(dy))
    product = _times_weights(op, node, seed)
    da = op.cast(op.shape_as(product, a), dy.dtype)
    return da, None, None, None, None, None if bias is None else op.sum_to(dy, bias)


@dataclass(frozen=True)
class _Layout:
    """How MatMulNBits stores its matrix, of a row for each output."""

    rows: int
    columns: int
    block: int  # so many columns share a scale
    bits: int

    @staticmethod
    def of(node: ir.Node) -> _Layout:
        read = node.attributes
        rows, columns, block = (read[name].as_int() for name in ("N", "K", "block_size"))
        return _Layout(rows, columns, block, read.get_int("bits", 4))

    @property
    def blocks(self) -> int:
        """The number of blocks in a row, the last of which may be longer than what is left."""
        return -(-self.columns // self.block)

    @property
    def in_byte(self) -> int:
        """How many numbers are in a byte."""
        return 8 // self.bits


def _times_weights(op: Ops, node: ir.Node, dy: ir.Value) -> ir.Value:
    """Return dY W."""
    layout = _Layout.of(node)
    (_, b, scales), given = required(node, 3), optional(node, 3)
    is_integer = given is None or not is_float(given)
    zeros = op.const(_integer_zero_points(given, layout)) if is_integer else given
    assert zeros is not None
    (product,) = op.kernel(
        "QuantizedProductGrad",
        [dy, b, scales, zeros],
        lambda: [_expanded_product(op, dy, b, scales, zeros, layout)],
        N=layout.rows, K=layout.columns, block_size=layout.block, bits=layout.bits,
    )  # fmt: skip
    return product


def _expanded_product(
    op: Ops, dy: ir.Value, b: ir.Value, scales: ir.Value, zeros: ir.Value, layout: _Layout
) -> ir.Value:
    """Return dY W from matrices of floats that are there when dY is."""
    rows, blocks = layout.rows, layout.blocks
    flag = flag_of(op, dy)
    packed = wait_for(op, flag, b, [rows * blocks, layout.block // layout.in_byte])
    factors = op.cast(_as_vector(op, scales), dy.dtype)  # small: they need not wait
    integers = () if is_float(zeros) else (zeros,)
    shape = [rows, blocks * layout.block // layout.in_byte]
    products = []
    for part in range(layout.in_byte):
        numbers = _part(op, packed, part, layout.bits)
        (weights,) = op.call("DequantizeLinear", numbers, factors, *integers, axis=0, like=packed)
        weights.type = dy.type
        products.append(op.MatMul(dy, op.with_dims(op.reshape(weights, shape), shape)))
    whole = _woven(op, products, shape[-1])
    if is_float(zeros):
        shifts = op.cast(_as_vector(op, zeros), dy.dtype)
        steps = op.with_dims(op.reshape(shifts * factors, [rows, blocks]), [rows, blocks])
        whole = _minus_blocks(op, whole, op.MatMul(dy, steps), layout)
    if blocks * layout.block == layout.columns:
        return whole
    return op.slice(whole, -1, 0, layout.columns)


def _as_vector(op: Ops, value: ir.Value) -> ir.Value:
    dims = static_dims(value)
    return value if dims is not None and len(dims) == 1 else op.Reshape(value, [-1])


def _part(op: Ops, packed: ir.Value, part: int, bits: int) -> ir.Value:
    """Return one of the numbers in each byte, the lowest first."""
    shift, mask = (np.array(n, np.uint8) for n in (part * bits, 2**bits - 1))
    moved = packed
    if part:
        moved = op.call("BitShift", packed, op.const(shift), like=packed, direction="RIGHT")[0]
    is_last = (part + 1) * bits == 8
    return moved if is_last else op.type_as(op.BitwiseAnd(moved, op.const(mask)), packed)


def _integer_zero_points(given: ir.Value | None, layout: _Layout) -> np.ndarray[Any, Any]:
    """Return the zero point of each block, unpacked: half of the range where none is given."""
    bits, rows, blocks = layout.bits, layout.rows, layout.blocks
    if given is None:
        return np.full(rows * blocks, 2 ** (bits - 1), np.uint8)
    packed = constant_array(given)
    assert packed is not None
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    numbers = (packed.reshape(rows, -1, 1) >> shifts) & np.uint8(2**bits - 1)
    return np.ascontiguousarray(numbers.reshape(rows, -1)[:, :blocks].reshape(-1))


def _woven(op: Ops, parts: Sequence[ir.Value], columns: int) -> ir.Value:
    """Take the columns of several matrices in turn."""
    if len(parts) == 1:
        return parts[0]
    rank = op.rank(parts[0])
    side_by_side = op.Concat(*(op.unsqueeze(part, [rank]) for part in parts), axis=rank)
    return _with_last(op, side_by_side, parts[0], [columns * len(parts)])


def _minus_blocks(op: Ops, whole: ir.Value, shifts: ir.Value, layout: _Layout) -> ir.Value:
    """Subtract one number from all columns of a block."""
    apart = _with_last(op, whole, whole, [layout.blocks, layout.block])
    less = apart - op.unsqueeze(shifts, [op.rank(shifts)])
    return _with_last(op, less, whole, [layout.blocks * layout.block])


def _with_last(op: Ops, value: ir.Value, like: ir.Value, last: Sequence[int]) -> ir.Value:
    """Reshape to the sizes of another value, but for its last axis."""
    lead = op.dims(like)[:-1]
    shape = [0] * len(lead) + list(last)  # zero stands for the size that there is
    return op.with_dims(op.Reshape(value, shape), [*lead, *last])
