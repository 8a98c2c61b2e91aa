"""Rules for matrix products, Einsum and the determinant."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import ShapeInferenceError
from onnxtrain.offline.autodiff.registry import Cotangents, optional, required, rule
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import static_dims
from onnxtrain.offline.graph.sizes import arange

_NARROW = 64  # columns or rows

# ---- products of two matrices ------------------------------------------------------------------


@rule("MatMul")
def matmul(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """DA = dY Bᵀ, dB = Aᵀ dY; vectors are matrices of one row or one column."""
    a, b = map(op.finite, required(node, 2))
    if op.rank(a) > 2 and _is_narrow(b):
        return _narrow_product(op, a, b, dy)
    rows = op.unsqueeze(a, [0]) if op.rank(a) == 1 else a
    columns = op.unsqueeze(b, [1]) if op.rank(b) == 1 else b
    if op.rank(b) == 1:
        dy = op.unsqueeze(dy, [op.rank(dy)])
    if op.rank(a) == 1:
        dy = op.unsqueeze(dy, [op.rank(dy) - 1])
    if op.rank(rows) == op.rank(columns) == 2:
        (da,) = op.call("Gemm", dy, columns, transB=1, like=rows)
    else:
        da = op.sum_to(op.MatMul(dy, op.swap_last(columns)), rows)
    if op.rank(columns) > 2:
        db = op.sum_to(op.MatMul(op.swap_last(rows), dy), columns)
    else:  # one product over all rows of the batch, instead of one per matrix and a sum over them
        (db,) = op.call("Gemm", _rows(op, rows), _rows(op, dy), transA=1, like=columns)
    return op.reshape_like(da, a), op.reshape_like(db, b)


def _is_narrow(b: ir.Value) -> bool:
    """Whether a matrix is a low-rank factor."""
    dims = static_dims(b)
    return dims is not None and len(dims) == 2 and 0 < min(dims) <= _NARROW


def _narrow_product(op: Ops, a: ir.Value, b: ir.Value, dy: ir.Value) -> Cotangents:
    """DA = dY Bᵀ, dB = Aᵀ dY, where all axes of A and dY but the last are one.

    Low-rank factors come in pairs, and several pairs read the same values: between the products
    nothing is reshaped, and what they share is reshaped once. A language model has hundreds.
    """
    rows, drows = op.rows(a), op.rows(dy)
    (da,) = op.call("Gemm", drows, b, transB=1, like=rows)
    (db,) = op.call("Gemm", rows, drows, transA=1, like=b)
    return op.shape_as(op.reshape(da, op.shape_of(a)), a), db


def _rows(op: Ops, value: ir.Value) -> ir.Value:
    """Flatten all axes but the last into rows."""
    if op.rank(value) == 2:
        return value
    return op.Reshape(value, op.dims_vector(-1, op.dim(value, -1)))


@rule("Gemm")
def gemm(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """Y = alpha A'B' + beta C, each product gradient written as one Gemm again."""
    a, b, c = *map(op.finite, required(node, 2)), optional(node, 2)
    alpha = node.attributes.get_float("alpha", 1.0)
    beta = node.attributes.get_float("beta", 1.0)
    trans_a = int(node.attributes.get_int("transA", 0) != 0)
    trans_b = int(node.attributes.get_int("transB", 0) != 0)
    if trans_a:
        (da,) = op.call("Gemm", b, dy, alpha=alpha, transA=trans_b, transB=1, like=a)
    else:
        (da,) = op.call("Gemm", dy, b, alpha=alpha, transB=1 - trans_b, like=a)
    if trans_b:
        (db,) = op.call("Gemm", dy, a, alpha=alpha, transA=1, transB=trans_a, like=b)
    else:
        (db,) = op.call("Gemm", a, dy, alpha=alpha, transA=1 - trans_a, like=b)
    if c is None:
        return da, db
    dc = op.sum_to(dy, c)
    return da, db, dc if beta == 1.0 else dc * beta


# ---- Einsum ------------------------------------------------------------------------------------


@rule("Einsum", notes="ellipsis, repeated and summed indices")
def einsum(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """The gradient of a product of tensors is the same product with one of them left out."""
    operands = [v for v in node.inputs if v is not None]
    equation = node.attributes.get_string("equation", "")
    terms, output = _labels(equation, [op.rank(v) for v in operands])
    return tuple(
        _einsum_operand(op, dy, output, terms, operands, position)
        for position in range(len(operands))
    )


def _labels(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """Split an equation into one label per axis, ellipses spelled out with further letters."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    spare = [chr(c) for c in (*range(65, 91), *range(97, 123)) if chr(c) not in equation]
    widths = [
        rank - (len(term) - 3) if "..." in term else 0
        for term, rank in zip(terms, ranks, strict=True)
    ]
    ellipsis = "".join(spare[: max(widths, default=0)])
    spelled = [
        term.replace("...", ellipsis[len(ellipsis) - width :])
        for term, width in zip(terms, widths, strict=True)
    ]
    if arrow:
        return spelled, right.replace("...", ellipsis)
    joined = "".join(terms).replace(".", "")
    once = sorted(label for label in set(joined) if joined.count(label) == 1)
    return spelled, ellipsis + "".join(once)


def _einsum_operand(
    op: Ops,
    dy: ir.Value,
    output: str,
    terms: Sequence[str],
    operands: Sequence[ir.Value],
    position: int,
) -> ir.Value:
    value, term = operands[position], terms[position]
    others = [t for i, t in enumerate(terms) if i != position]
    unique = "".join(dict.fromkeys(term))
    reachable = "".join(label for label in unique if label in output or label in "".join(others))
    inputs = [dy, *(v for i, v in enumerate(operands) if i != position)]
    equation = f"{','.join([output, *others])}->{reachable}"
    result = dy if equation == f"{output}->{output}" else op.Einsum(*inputs, equation=equation)
    dims = {
        label: dim
        for labels, v in zip((*terms, output), (*operands, dy), strict=True)
        for label, dim in zip(labels, op.dims(v), strict=True)
    }
    op.with_dims(result, [dims[label] for label in reachable])
    # Axes that were summed inside the operand see the same cotangent everywhere.
    missing = [i for i, label in enumerate(unique) if label not in reachable]
    result = op.unsqueeze(result, missing)
    if len(unique) == len(term):
        # An ellipsis axis of size one may have been broadcast.
        exceeds = any(
            small == 1 != large
            for large, small in zip(op.dims(result), op.dims(value), strict=True)
        )
        if exceeds or not missing:
            result = op.sum_to(result, value)
        return op.expand_like(result, value) if missing else result
    return _onto_diagonal(op, result, unique, term, value)


def _onto_diagonal(op: Ops, result: ir.Value, unique: str, term: str, value: ir.Value) -> ir.Value:
    """Place a cotangent of the diagonal of `value` there, with zeros beside it."""
    positions = [[i for i, label in enumerate(term) if label == u] for u in unique]
    first = [p[0] for p in positions]
    order = sorted(range(len(unique)), key=lambda i: first[i])
    spread = op.transpose(result, order)
    spread = op.unsqueeze(spread, [i for i in range(len(term)) if i not in first])
    on_diagonal: ir.Value | None = None
    for repeats in positions:
        for axis in repeats[1:]:
            same = op.Equal(_along(op, value, repeats[0]), _along(op, value, axis))
            on_diagonal = same if on_diagonal is None else op.And(on_diagonal, same)
    placed = op.Where(on_diagonal, spread, 0.0)
    return op.expand_like(placed, value)


def _along(op: Ops, value: ir.Value, axis: int) -> ir.Value:
    """Return 0, 1, 2 … along one axis of a value, shaped to broadcast against it."""
    rank = op.rank(value)
    steps = op.with_dims(arange(op, op.dim(value, axis)), [op.dims(value)[axis]])
    return op.unsqueeze(steps, [i for i in range(rank) if i != axis])


# ---- determinant -------------------------------------------------------------------------------


@rule("Det", notes="by cofactors, so singular matrices too; the size must be static")
def det(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """DX = dy cofactor(X): the determinants of all minors, signed, in one batched Det."""
    (x,) = required(node)
    size = op.dims(x)[-1] if isinstance(op.dims(x)[-1], int) else op.dims(x)[-2]
    if not isinstance(size, int):
        raise ShapeInferenceError(
            f"the gradient of Det (node {node.name!r}) needs the size of the matrix {x.name!r} "
            "before run time: fix its last two dimensions"
        )
    spread = op.unsqueeze(dy, [op.rank(dy), op.rank(dy) + 1])
    if size == 1:
        return (op.reshape_like(spread, x),)
    others = np.array([[j for j in range(size) if j != i] for i in range(size)], dtype=np.int64)
    rank = op.rank(x)
    minors = op.Gather(x, op.const(others), axis=rank - 2)  # ... i r n
    minors = op.Gather(minors, op.const(others), axis=rank)  # ... i r j c
    lead = list(range(rank - 2))
    i, r, j, c = range(rank - 2, rank + 2)
    cofactors = op.call("Det", op.transpose(minors, [*lead, i, j, r, c]), like=x)[0]
    sign = np.fromfunction(lambda p, q: (-1.0) ** (p + q), (size, size))
    return (cofactors * op.const(sign.astype(x.dtype.numpy())) * spread,)  # type: ignore[union-attr]
