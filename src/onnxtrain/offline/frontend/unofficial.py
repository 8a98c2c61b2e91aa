"""Operators that onnxruntime has in ai.onnx although ONNX does not, or not before a later opset.

The tools of onnxruntime write them so: SimplifiedLayerNormalization in every model that its builder
for language models makes. Neither the checker of onnx nor its shape inference nor an upgrade of the
opset knows them. In the domain com.microsoft they are what they are, operators of onnxruntime.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx
import onnx_ir as ir

from onnxtrain.offline.graph.quantized_operators import MICROSOFT

_OFFICIAL_SINCE = {"SimplifiedLayerNormalization": None, "LayerNormalization": 17}


def adopt_unofficial(model: ir.Model) -> None:
    """Move the operators that only onnxruntime has in ai.onnx to the domain com.microsoft.

    The opset of the domain is stated where it is missing, as in models that the tool for
    transformers hands over in memory; onnxruntime does not ask for it.
    """
    opset = model.opset_imports.get("", 1)
    for node in model.graph.all_nodes():
        if _is_unofficial(node, opset):
            node.domain = MICROSOFT
        if node.domain == MICROSOFT:
            model.opset_imports.setdefault(MICROSOFT, 1)


def adopt_unofficial_in(model: onnx.ModelProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Do the same for the nodes of a proto that is going to be checked, or its shapes inferred."""
    given = {entry.domain: entry.version for entry in model.opset_import}
    opset = max(given.get("", 1), given.get("ai.onnx", 1))
    found = [node for node in nodes if _is_unofficial(node, opset)]
    for node in found:
        node.domain = MICROSOFT
    if found and MICROSOFT not in given:
        model.opset_import.add(domain=MICROSOFT, version=1)


def _is_unofficial(node: ir.Node | onnx.NodeProto, opset: int) -> bool:
    if node.domain not in ("", "ai.onnx") or node.op_type not in _OFFICIAL_SINCE:
        return False
    since = _OFFICIAL_SINCE[node.op_type]
    return since is None or opset < since
