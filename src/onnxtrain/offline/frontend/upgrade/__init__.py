"""Old models, upgraded to the opset that gradient rules are written for.

An operator that changed between the opset of a model and the floor is rewritten so that it means
at the floor what it meant before: attributes become inputs, defaults that changed are written out,
and operators that are gone are replaced. Each change since `OLDEST_OPSET` is known in one of two
places: `adapters.py` says how to follow it, `unchanged.py` says why there is nothing to do.

Values keep their names, weights are not read, and the bodies of If, Loop and Scan are upgraded too.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

from onnxtrain.errors import ModelError, ShapeInferenceError
from onnxtrain.offline.frontend.upgrade.adapters import ADAPTERS
from onnxtrain.offline.frontend.upgrade.rewrite import Rewriter
from onnxtrain.offline.graph.error_context import error_context
from onnxtrain.offline.graph.infer import infer_shapes
from onnxtrain.offline.graph.names import Names, label_of
from onnxtrain.offline.graph.versions import FLOOR_OPSET, least_ir_version


def upgrade_to_floor(model: ir.Model) -> None:
    """Upgrade a model of opset 7 to 17 to opset 18, in place; a newer one stays as it is."""
    opset = model.opset_imports.get("", FLOOR_OPSET)
    if opset >= FLOOR_OPSET:
        return
    contradiction = _infer_if_possible(model)
    rewriter = Rewriter(Names.of(model.graph), opset)
    for graph in [model.graph, *model.graph.subgraphs()]:
        for node in list(graph):
            if node.domain == "":
                try:
                    _upgrade_node(rewriter, node, opset)
                except ModelError as refused:
                    if contradiction is None:
                        raise
                    raise ModelError(f"{refused}. A possible cause: {contradiction}") from None
    model.opset_imports[""] = FLOOR_OPSET
    model.ir_version = max(model.ir_version, least_ir_version(model.opset_imports))


def _infer_if_possible(model: ir.Model) -> ShapeInferenceError | None:
    """Infer types and ranks, which some adapters need; return the error where that fails.

    A model whose shapes contradict each other is reported when inference runs on the result; it
    need not fail here, where most operators get along without shapes.
    """
    try:
        infer_shapes(model)
    except ShapeInferenceError as error:
        return error
    return None


def _upgrade_node(rewriter: Rewriter, node: ir.Node, opset: int) -> None:
    version = opset
    while (step := _next_step(node.op_type, version)) is not None:
        with error_context(node, f"upgrading to opset {step} the operator"):
            ADAPTERS[node.op_type, step](rewriter, node)
        version = step
    if not onnx.defs.has(node.op_type, FLOOR_OPSET, ""):
        raise ModelError(
            f"the operator {node.op_type} of node {label_of(node)!r} is not part of ONNX at opset "
            f"{FLOOR_OPSET}: export the model again with a newer exporter"
        )


def _next_step(op_type: str, version: int) -> int | None:
    return min((v for op, v in ADAPTERS if op == op_type and v > version), default=None)
