"""Products that compute queries, keys and values at once, as decoders for GenAI have them."""

from __future__ import annotations

from onnxtrain.offline.graph.op_facts import REORDERS
from onnxtrain.offline.passes.lora.graph_index import GraphIndex, attribute, operator_of

_GROUPED = "com.microsoft.GroupQueryAttention"


def parts_behind(index: GraphIndex, y: str, width: int) -> tuple[tuple[str, int], ...]:
    """Return names and widths of the projections in y, if the attention behind it splits it."""
    value = y
    reader = index.only_reader(value)
    while reader is not None and operator_of(reader) in REORDERS:
        value = reader.output[0]
        reader = index.only_reader(value)
    if reader is None or operator_of(reader) != _GROUPED or reader.input[0] != value:
        return ()
    if any(reader.input[1:3]):  # keys and values come from products of their own
        return ()
    heads, shared = attribute(reader, "num_heads", 0), attribute(reader, "kv_num_heads", 0)
    size, rest = divmod(width, heads + 2 * shared) if heads and shared else (0, 1)
    if rest:
        return ()
    return ("query", heads * size), ("key", shared * size), ("value", shared * size)
