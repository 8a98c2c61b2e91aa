"""The values of a model that a new last layer can read."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onnxtrain.offline.graph.op_facts import POOLS, REORDERS
from onnxtrain.offline.graph.shapes import dims_of, is_float


def feature_values(
    output: ir.Value, values: Mapping[str, ir.Value] | None = None, most: int = 5
) -> list[ir.Value]:
    """Return the values nearest to an output that a new layer can read (`after`).

    A vector for each sample suits best; where there is none, so does all whose sizes are known.
    `values` has the types and shapes, where the graph itself does not.
    """
    vectors: list[ir.Value] = []
    others: list[ir.Value] = []
    waiting, seen = [output], {output}
    while waiting and len(vectors) < most:
        value = waiting.pop(0)
        producer = value.producer()
        if producer is None:
            continue
        typed = (values or {}).get(value.name or "", value)
        batch, *sizes = dims_of(typed) or (None,)
        is_known = bool(sizes) and is_float(typed) and all(isinstance(d, int) for d in sizes)
        if value is not output and is_known and _counts_samples(batch) and not _is_view(producer):
            is_pooled = len(sizes) != 2 or producer.op_type in POOLS
            is_vector = is_pooled and sizes[0] != 1 and all(d == 1 for d in sizes[1:])
            (vectors if is_vector else others).append(value)
        for source in producer.inputs:
            if source is not None and source not in seen:
                seen.add(source)
                waiting.append(source)
    return vectors or others[:most]


def _counts_samples(dim: int | ir.SymbolicDim | None) -> bool:
    """Whether a dimension may be the batch, and is not computed from it."""
    return isinstance(dim, int) or (dim is not None and (dim.value or "").isidentifier())


def _is_view(node: ir.Node) -> bool:
    return node.domain == "" and node.op_type in REORDERS
