"""The product of a gradient with a large quantized matrix, some rows of the matrix at a time.

Expanded to floats, the last layer of a language model is its largest matrix by far: 113 MB where a
layer of its blocks has 4. So the backward pass goes through it in a Scan, whose step expands some
rows, multiplies, and forgets them.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import optional
from onnxtrain.offline.autodiff.rules.quantized_weights import matmul_n_bits
from onnxtrain.offline.graph.control_dependencies import flag_of, wait_for
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import UNKNOWN, Dim

PIECE_ELEMENTS = 2**21  # of the matrix, at a time


def multiply_in_pieces(op: Ops, node: ir.Node, dy: ir.Value) -> ir.Value | None:
    """Return dY W for a MatMulNBits whose gradient is (rows, N); None where pieces do not help."""
    if node.op_type != "MatMulNBits" or any(optional(node, i) is not None for i in range(3, 6)):
        return None
    rows, columns, block = (node.attributes[name].as_int() for name in ("N", "K", "block_size"))
    count = _pieces(rows, rows * columns)
    if count < 2 or dy.dtype != ir.DataType.FLOAT:
        return None
    _, weights, scales = node.inputs[:3]
    assert weights is not None and scales is not None and scales.dtype is not None
    each, blocks = rows // count, -(-columns // block)
    size = block * node.attributes.get_int("bits", 4) // 8
    flag = flag_of(op, dy)
    packed = wait_for(op, flag, weights, [count, each, blocks, size])
    factors = wait_for(op, flag, scales, [count, each * blocks])
    parts = op.Transpose(op.Reshape(dy, [0, count, each]), perm=[1, 0, 2])
    op.with_dims(parts, (count, UNKNOWN, each))
    shape = op.dims_vector(op.Shape(dy, start=0, end=1), columns)
    zeros = op.with_dims(op.Expand(op.const(0.0, dy.dtype), shape), (UNKNOWN, columns))

    def step(total: ir.Value, part: ir.Value, some: ir.Value, scale: ir.Value) -> list[ir.Value]:
        attributes = [a for a in node.attributes.values() if a.name != "N"]
        piece = ir.Node(
            node.domain, node.op_type, [total, some, scale], [*attributes, ir.AttrInt64("N", each)]
        )
        product = matmul_n_bits(op, piece, part)
        piece.resize_inputs(0)
        assert not isinstance(product, dict)
        (added, *_) = product
        return [op.type_as(op.Add(total, added), total)]

    given: list[tuple[str, ir.DataType, Sequence[Dim] | None]] = [
        ("total", ir.DataType.FLOAT, (UNKNOWN, columns)),
        ("gradient", ir.DataType.FLOAT, (UNKNOWN, each)),
        ("weights", ir.DataType.UINT8, (each, blocks, size)),
        ("scales", scales.dtype, (each * blocks,)),
    ]
    body = op.body(given, step, name="piece")
    (made,) = op.call("Scan", zeros, parts, packed, factors, body=body, num_scan_inputs=3)
    return op.type_as(made, zeros)


def _pieces(rows: int, elements: int) -> int:
    """Return into how many equal pieces to divide the rows."""
    wanted = max(1, elements // PIECE_ELEMENTS)
    return next((n for n in range(wanted, min(rows, 8 * wanted) + 1) if rows % n == 0), 1)
