"""The last step before a model leaves: stamp it with its versions.

A model that claims a newer opset or IR version than its content needs is refused by runtimes that
could run it. So the stamp is computed from what the model contains, never from what made it.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.errors import ModelError
from onnxtrain.offline.graph.subgraphs import values_of
from onnxtrain.offline.graph.versions import FLOOR_OPSET, least_ir_version
from onnxtrain.offline.writer.opset_downgrade import highest_opset, lowest_opset, move

_TYPES_SINCE = {
    9: "FLOAT8E4M3FN FLOAT8E4M3FNUZ FLOAT8E5M2 FLOAT8E5M2FNUZ",
    10: "INT4 UINT4",
    11: "FLOAT4E2M1",
    12: "FLOAT8E8M0",
    13: "INT2 UINT2",
    14: "FLOAT6E2M3 FLOAT6E3M2",
}
_IR_VERSION_OF_TYPE = {name: v for v, names in _TYPES_SINCE.items() for name in names.split()}
_IR_VERSION_OF_OVERLOADS = 10
_QUANTIZATION = "quant_parameter_tensor_names"  # where onnx_ir keeps a quantization annotation


def stamp(model: ir.Model) -> None:
    """Set the lowest opset and IR version that the content permits.

    What exporters note on nodes and values for their own debugging is left out: it would ask for a
    newer IR version. What is noted on the model stays.
    """
    graphs = [model.graph, *model.graph.subgraphs()]
    nodes = [node for graph in graphs for node in graph]
    values = [value for graph in graphs for value in values_of(graph)]
    _strip_notes(model, graphs, nodes, values)
    own = [node for node in nodes if node.domain == ""]
    opset = model.opset_imports.get("", FLOOR_OPSET)
    target = max((FLOOR_OPSET, *(lowest_opset(node, opset) for node in own)))
    if opset < FLOOR_OPSET:
        target = opset  # an operator of then may mean something else at the floor
    elif target > opset:
        _require_reach(own, opset, target)
    for node in own:
        move(node, opset, target)
    model.opset_imports[""] = target
    used = {node.domain for node in nodes} | {""}
    for domain in [d for d in model.opset_imports if d not in used]:
        del model.opset_imports[domain]
    model.ir_version = max(
        [
            least_ir_version(model.opset_imports),
            *(_IR_VERSION_OF_TYPE.get(name, 0) for name in _type_names(values)),
            *(_IR_VERSION_OF_OVERLOADS for node in nodes if node.overload),
        ]
    )


def _require_reach(nodes: list[ir.Node], opset: int, target: int) -> None:
    """Refuse a model in which one node needs a newer opset than another one can follow to."""
    for node in nodes:
        if highest_opset(node, opset) < target:
            newer = next(n for n in nodes if lowest_opset(n, opset) == target)
            raise ModelError(
                f"{newer.op_type} (node {newer.name!r}) on values of type "
                f"{', '.join(sorted({str(v.dtype) for v in newer.inputs if v is not None}))} needs "
                f"opset {target}, but {node.op_type} (node {node.name!r}) of opset {opset} means "
                f"something else there: export the model again with opset {target} or newer"
            )


def _type_names(values: Sequence[ir.Value]) -> set[str]:
    """Return the names of the element types of values and of the tensors that they hold."""
    tensors = (v.const_value for v in values if v.const_value is not None)
    types = {v.dtype for v in values} | {tensor.dtype for tensor in tensors}
    return {dtype.name for dtype in types if dtype is not None}


def _strip_notes(
    model: ir.Model,
    graphs: Sequence[ir.Graph],
    nodes: Sequence[ir.Node],
    values: Sequence[ir.Value],
) -> None:
    model.device_configurations = ()
    for graph in graphs:
        graph.metadata_props.clear()
    for node in nodes:
        node.metadata_props.clear()
        node.device_configurations = ()
    names = {value.name for value in values}
    for value in values:
        value.metadata_props.clear()
        annotation = value.meta.get(_QUANTIZATION)
        if annotation and not names.issuperset(annotation.values()):
            del value.meta[_QUANTIZATION]  # it speaks of a tensor that was swept
