"""The pass over a model that replaces fused operators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir

from onnxtrain.autodiff.fused.table import (
    MICROSOFT,
    Expansion,
    NotExpandable,
    expansion_of,
    wanted,
)
from onnxtrain.autodiff.fused.types import infer_node
from onnxtrain.autodiff.infer import infer_shapes
from onnxtrain.autodiff.ops import Ops
from onnxtrain.autodiff.shapes import dims_of

# Operators that onnxruntime puts in the domain "" although ONNX does not have them there (or did
# not before the given opset).
_UNOFFICIAL = {"SimplifiedLayerNormalization": None, "LayerNormalization": 17}


def adopt_unofficial(model: ir.Model) -> None:
    """Move the operators that only onnxruntime has in ai.onnx to the domain com.microsoft.

    Neither the checker nor the version converter of onnx knows them: call this before either.
    """
    opset = model.opset_imports.get("", 1)
    for node in model.graph.all_nodes():
        if node.domain == "" and node.op_type in _UNOFFICIAL:
            since = _UNOFFICIAL[node.op_type]
            if since is None or opset < since:
                node.domain = MICROSOFT
                model.opset_imports.setdefault(MICROSOFT, 1)


def expand_fused(model: ir.Model) -> None:
    """Replace the fused operators of onnxruntime by plain ones, in place.

    Names of values survive. Ranks and types are inferred on the way, as the models that
    onnxruntime saves carry none.
    """
    adopt_unofficial(model)
    if not any(expansion_of(node) for node in model.graph.all_nodes()):
        _drop_unused_domains(model)
        return
    op = Ops(model.graph, model.opset_imports[""])
    with op.arithmetic():
        while True:
            infer_shapes(model)
            expanded, postponed = _walk(op, model.graph)
            if not postponed or not expanded:
                break
    _drop_unused_domains(model)


def _walk(op: Ops, graph: ir.Graph) -> tuple[int, int]:
    """Expand what can be expanded in one pass; count that, and what waits for its types."""
    expanded = postponed = 0
    for node in list(graph):
        for inner in _subgraphs(node):
            done, waiting = _walk(op, inner)
            expanded, postponed = expanded + done, postponed + waiting
        found = expansion_of(node)
        if found is None:
            infer_node(node, op.opset)
        elif not _ready(found, node):
            postponed += 1
        elif _expand(op, graph, node, found):
            expanded += 1
    return expanded, postponed


def _subgraphs(node: ir.Node) -> Iterator[ir.Graph]:
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.value
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.value


def _ready(found: Expansion, node: ir.Node) -> bool:
    given = [v for v in node.inputs if v is not None]
    ranked = [node.inputs[i] for i in found.ranks if i < len(node.inputs)]
    return all(v.dtype is not None for v in given) and all(
        dims_of(v) is not None for v in ranked if v is not None
    )


def _expand(op: Ops, graph: ir.Graph, node: ir.Node, found: Expansion) -> bool:
    """Put the plain nodes in the place of a fused one; tell whether there are such."""
    op.scope = node.name or node.outputs[0].name or node.op_type
    places: list[int] = []
    written: list[ir.Graph] = []

    def write() -> Sequence[ir.Value]:
        written.append(op.target)
        returned = found.function(op, node, *node.inputs)
        made = [returned] if isinstance(returned, ir.Value) else list(returned)
        results = []
        for index in range(len(node.outputs)):
            if wanted(node, index):
                value = made[index] if index < len(made) else None
                if value is None:
                    raise NotExpandable(f"output {index}")
                places.append(index)
                results.append(value)
        return results

    try:
        body = op.body([], write)
    except NotExpandable:
        _detach(written[0])
        return False
    results = list(body.outputs)
    body.outputs.clear()
    nodes = list(body)
    body.remove(nodes)
    graph.insert_before(node, nodes)
    for index, result in zip(places, results, strict=True):
        replace_value(node.outputs[index], result)
    graph.remove(node, safe=True)
    for new in nodes:
        infer_node(new, op.opset)
    return True


def _detach(graph: ir.Graph) -> None:
    """Give up the uses that abandoned nodes make of values elsewhere."""
    for node in graph:
        for index in range(len(node.inputs)):
            node.replace_input_with(index, None)


def replace_value(old: ir.Value, new: ir.Value) -> None:
    """Let a new value take the place, the name and, where it has none, the type of an old one."""
    name = old.name
    new.type = new.type or old.type
    new.shape = new.shape if new.shape is not None else old.shape
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    old.name = None
    new.name = name


def _drop_unused_domains(model: ir.Model) -> None:
    """Forget the opset imports that onnxruntime writes for every domain it knows."""
    used = {node.domain for node in model.graph.all_nodes()} | {""}
    used.update(node.domain for f in model.functions.values() for node in f.all_nodes())
    used.update(f.domain for f in model.functions.values())
    for domain in [d for d in model.opset_imports if d not in used]:
        del model.opset_imports[domain]
