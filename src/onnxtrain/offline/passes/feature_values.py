"""The values of a model that a new last layer can read."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onnxtrain.offline.graph.op_facts import POOLS, PRODUCTS, REORDERS
from onnxtrain.offline.graph.shapes import dims_of, is_float


def feature_values(
    output: ir.Value, values: Mapping[str, ir.Value] | None = None, most: int = 5
) -> list[ir.Value]:
    """Return the values nearest to an output that a new layer can read (`after`).

    A vector for each sample suits best; where there is none, so does all whose sizes are known.
    Of several with one shape, there is the last; what the last layer makes is left out. `values`
    has the types and shapes, where the graph itself does not.
    """
    typed = values or {}
    samples = (dims_of(typed.get(output.name or "", output)) or (None,))[0]
    vectors: list[ir.Value] = []
    others: list[ir.Value] = []
    waiting, seen = [(output, False)], {output}
    while waiting and len(vectors) < most:
        value, behind_layer = waiting.pop(0)
        producer = value.producer()
        if producer is None:
            continue
        batch, *sizes = dims_of(typed.get(value.name or "", value)) or (None,)
        is_known = bool(sizes) and all(isinstance(d, int) for d in sizes)
        is_sample = batch == samples or (isinstance(batch, ir.SymbolicDim) and _is_name(batch))
        is_new = behind_layer and not (producer.domain == "" and producer.op_type in REORDERS)
        if is_known and is_sample and is_new and is_float(typed.get(value.name or "", value)):
            is_pooled = len(sizes) != 2 or producer.op_type in POOLS
            is_vector = is_pooled and sizes[0] != 1 and all(d == 1 for d in sizes[1:])
            shapes = {dims_of(typed.get(v.name or "", v)) for v in (*vectors, *others)}
            if (batch, *sizes) not in shapes:  # values in a row often have the same
                (vectors if is_vector else others).append(value)
        behind_layer = behind_layer or producer.op_type in PRODUCTS
        for source in producer.inputs:
            if source is not None and source not in seen:
                seen.add(source)
                waiting.append((source, behind_layer))
    return vectors or others[:most]


def _is_name(dim: ir.SymbolicDim) -> bool:
    """Whether a dimension is a name, and not computed from others, as 4*batch is."""
    return all(c.isalnum() or c in "_." for c in dim.value or "*")
