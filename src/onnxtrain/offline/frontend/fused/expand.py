"""The pass over a model that replaces fused operators."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.offline.autodiff.definitions import Definition, definition_of, write_definition
from onnxtrain.offline.frontend.fused.domain import MICROSOFT
from onnxtrain.offline.frontend.fused.types import infer_node
from onnxtrain.offline.graph.infer import infer_shapes
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.subgraphs import subgraphs_of

# Operators that onnxruntime has in the domain "" although ONNX does not (or not before the opset).
_UNOFFICIAL = {"SimplifiedLayerNormalization": None, "LayerNormalization": 17}


def adopt_unofficial(model: ir.Model) -> None:
    """Move the operators that only onnxruntime has in ai.onnx to the domain com.microsoft.

    Neither the checker of onnx nor an upgrade of the opset knows them: call this before either. The
    opset of the domain is stated where it is missing, as in models that the tool for transformers
    hands over in memory; onnxruntime does not ask for it.
    """
    opset = model.opset_imports.get("", 1)
    for node in model.graph.all_nodes():
        if node.domain == "" and node.op_type in _UNOFFICIAL:
            since = _UNOFFICIAL[node.op_type]
            if since is None or opset < since:
                node.domain = MICROSOFT
        if node.domain == MICROSOFT:
            model.opset_imports.setdefault(MICROSOFT, 1)


def expand_fused(model: ir.Model) -> None:
    """Replace the fused operators of onnxruntime by plain ones, in place.

    Names of values survive. Ranks and types are inferred on the way, as the models that
    onnxruntime saves carry none.
    """
    adopt_unofficial(model)
    if any(_fused(node) for node in model.graph.all_nodes()):
        op = Ops(model.graph, model.opset_imports[""])
        with op.arithmetic():
            while True:
                infer_shapes(model)
                expanded, postponed = _walk(op, model.graph)
                if not postponed or not expanded:
                    break
    _drop_unused_domains(model)


def _fused(node: ir.Node) -> Definition | None:
    return definition_of(node) if node.domain == MICROSOFT else None


def _walk(op: Ops, graph: ir.Graph) -> tuple[int, int]:
    """Expand what can be expanded in one pass; count that, and what waits for its types."""
    expanded = postponed = 0
    for node in list(graph):
        for body in subgraphs_of(node):
            done, waiting = _walk(op, body)
            expanded, postponed = expanded + done, postponed + waiting
        found = _fused(node)
        if found is None:
            infer_node(node, op.opset)
        elif not found.is_ready(node):
            postponed += 1
        else:
            written = write_definition(op, node, found)
            expanded += written is not None
            for new in written or ():
                infer_node(new, op.opset)
    return expanded, postponed


def _drop_unused_domains(model: ir.Model) -> None:
    """Forget the opset imports that onnxruntime writes for every domain it knows."""
    used = {node.domain for node in model.graph.all_nodes()} | {""}
    for function in model.functions.values():
        used.update((function.domain, *(node.domain for node in function.all_nodes())))
    for domain in [d for d in model.opset_imports if d not in used]:
        del model.opset_imports[domain]
