"""Ranks that onnx does not infer.

Where a size or a bound is computed at run time, onnx often gives up. But the parts of a Split have
the rank of the whole, however long they are, and a Reshape to a vector of four numbers has rank
four, whatever they are. Other ranks are known only from the operators that read a value.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnxtrain.offline.graph.op_facts import (
    BROADCASTS,
    INPUT_RANK,
    KEEPS_RANK,
    KEEPS_SHAPE,
    REDUCTIONS,
)
from onnxtrain.offline.graph.shapes import (
    UNKNOWN,
    Dims,
    broadcast_dims,
    constant_array,
    dims_of,
    infer_dims,
    static_dims,
)
from onnxtrain.offline.graph.writer import attributes_of


def learn_ranks(graph: ir.Graph) -> bool:
    """Set the rank of results that have none yet, in place; tell whether there were any."""
    learnt = False
    for node in graph:
        for output in node.outputs:
            if output.shape is None and output.dtype is not None and node.domain == "":
                dims = _dims_of_result(node)
                if dims is not None:
                    output.shape = ir.Shape(dims)
                    learnt = True
    return learnt


def _dims_of_result(node: ir.Node) -> Dims | None:
    op_type, inputs = node.op_type, node.inputs
    shapes = [None if v is None else dims_of(v) for v in inputs]
    if op_type in BROADCASTS:
        return broadcast_dims(shapes)
    if not shapes or (first := shapes[0]) is None:
        if op_type == "Concat":
            first = next((s for s in shapes if s is not None), None)
            return None if first is None else (UNKNOWN,) * len(first)
        return None
    if op_type in KEEPS_RANK:
        return (UNKNOWN,) * len(first)
    if op_type in REDUCTIONS and node.attributes.get_int("keepdims", 1) == 1:
        return (UNKNOWN,) * len(first)
    vector = inputs[0] if op_type == "ConstantOfShape" else inputs[1] if len(inputs) > 1 else None
    lengths = None if vector is None else static_dims(vector)
    if lengths is not None and len(lengths) == 1 and op_type in _RANK_FROM_VECTOR:
        return (UNKNOWN,) * _RANK_FROM_VECTOR[op_type](len(first), lengths[0])
    if op_type in _RANK_FROM_VECTOR:
        return None
    return infer_dims(op_type, inputs, attributes_of(node))


# The rank of the result, from that of the first input and the length of a vector of integers.
_RANK_FROM_VECTOR: dict[str, Callable[[int, int], int]] = {
    "ConstantOfShape": lambda rank, length: length,
    "Expand": max,
    "Reshape": lambda rank, length: length,
    "Squeeze": lambda rank, length: rank - length,
    "Unsqueeze": lambda rank, length: rank + length,
}


# ---- from use ------------------------------------------------------------------------------------

RANK_FROM_USE = "rank from use"  # in the meta of a value: no other rank would do
_RANK_OF_OUTPUT = {"STFT": 4}  # which onnx infers with static dimensions only


def learn_ranks_from_use(graph: ir.Graph) -> bool:
    """Set the rank of values that only their use tells, such as the input of a Conv."""
    learnt = False
    for node in reversed(graph):
        if node.domain != "":
            continue
        if node.op_type in _RANK_OF_OUTPUT and node.outputs[0].shape is None:
            node.outputs[0].shape = ir.Shape([None] * _RANK_OF_OUTPUT[node.op_type])
            learnt = True
        for index, x in enumerate(node.inputs):
            if x is None or x.shape is not None or x.dtype is None or x.graph is not graph:
                continue  # a body need not run, so it tells nothing of values outside it
            rank = _rank_of_input(node, index)
            if rank is not None:
                x.shape = ir.Shape([None] * rank)
                x.meta[RANK_FROM_USE] = rank
                learnt = True
    return learnt


def _rank_of_input(node: ir.Node, index: int) -> int | None:
    # Ranks that were declared, not needed, may be wrong.
    needed = {v.meta[RANK_FROM_USE] for v in node.outputs if RANK_FROM_USE in v.meta}
    rank: int | None = next(iter(needed), None)
    others = [_rank(v) for i, v in enumerate(node.inputs) if i != index]
    if node.op_type == "Concat":
        return next((r for r in (rank, *others) if r is not None), None)
    if node.op_type == "MatMul":
        return rank if others == [2] and rank is not None and rank > 2 else None
    if index:
        return None
    if node.op_type in ("Conv", "ConvTranspose"):
        return others[0]
    if node.op_type == "Transpose" and "perm" in node.attributes:
        return len(node.attributes["perm"].as_ints())
    if node.op_type in INPUT_RANK:
        return INPUT_RANK[node.op_type]
    if rank is not None and node.op_type == "Unsqueeze":
        axes = constant_array(node.inputs[1])
        return None if axes is None else rank - axes.size
    return rank if node.op_type in KEEPS_SHAPE | KEEPS_RANK else None


def _rank(value: ir.Value | None) -> int | None:
    return None if value is None or value.shape is None else len(value.shape)
