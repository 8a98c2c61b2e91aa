"""Old models, upgraded to the opset that gradient rules are written for.

An operator that changed between the opset of a model and the floor is rewritten so that it means
at the floor what it meant before: attributes become inputs, defaults that changed are written out,
and operators that are gone are replaced. A test checks that each change since opset 1 has an
adapter, or a reason why there is nothing to do.

Values keep their names, weights are not read, and the bodies of If, Loop and Scan are upgraded too.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

from onnxtrain.errors import ModelError, ShapeInferenceError
from onnxtrain.offline.frontend.canonicalize import release_initializers, sort_nodes
from onnxtrain.offline.frontend.upgrade import adapters, first_opsets  # noqa: F401  (register)
from onnxtrain.offline.frontend.upgrade.rewrite import ADAPTERS, Rewriter
from onnxtrain.offline.graph.error_context import error_context
from onnxtrain.offline.graph.infer import infer_shapes
from onnxtrain.offline.graph.names import Names, label_of
from onnxtrain.offline.graph.versions import FLOOR_OPSET, least_ir_version


def upgrade_to_floor(model: ir.Model) -> None:
    """Upgrade a model of opset 1 to 17 to opset 18, in place; a newer one stays as it is."""
    opset = model.opset_imports.get("", FLOOR_OPSET)
    if opset >= FLOOR_OPSET:
        return
    contradiction: ShapeInferenceError | None = None
    try:
        infer_shapes(model)  # some adapters need types and ranks
    except ShapeInferenceError as error:
        contradiction = error  # inference of the result reports it; most operators need no shapes
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


def upgraded(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model at opset 18, where its values have the names that they had."""
    model = ir.from_proto(proto)
    release_initializers(model)
    sort_nodes(model)
    upgrade_to_floor(model)
    result: onnx.ModelProto = ir.to_proto(model)
    return result


def _upgrade_node(rewriter: Rewriter, node: ir.Node, opset: int) -> None:
    for version in range(opset + 1, FLOOR_OPSET + 1):
        if (node.op_type, version) in ADAPTERS:
            with error_context(node, f"upgrading to opset {version} the operator"):
                ADAPTERS[node.op_type, version](rewriter, node)
    if not onnx.defs.has(node.op_type, FLOOR_OPSET, ""):
        raise ModelError(
            f"the operator {node.op_type} of node {label_of(node)!r} is not part of ONNX at opset "
            f"{FLOOR_OPSET}: export the model again with a newer exporter"
        )
