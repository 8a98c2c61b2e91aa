"""The last step before a model leaves: sweep what nobody needs, stamp the versions.

A model that claims a newer opset or IR version than its content needs is refused by runtimes that
could run it. So the stamp is computed from what the model contains, never from what made it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import onnx
import onnx_ir as ir

from onnxtrain.errors import ModelError
from onnxtrain.offline.graph.opset_downgrade import FLOOR_OPSET, highest_opset, lowest_opset, move
from onnxtrain.offline.graph.subgraphs import bodies_of, release, values_of

__all__ = ["FLOOR_OPSET", "least_ir_version", "stamp", "sweep"]

FLOOR_IR_VERSION = 8
_IR_VERSION_OF_TYPE = {
    "FLOAT8E4M3FN": 9,
    "FLOAT8E4M3FNUZ": 9,
    "FLOAT8E5M2": 9,
    "FLOAT8E5M2FNUZ": 9,
    "INT4": 10,
    "UINT4": 10,
    "FLOAT4E2M1": 11,
    "FLOAT8E8M0": 12,
    "INT2": 13,
    "UINT2": 13,
    "FLOAT6E2M3": 14,
    "FLOAT6E3M2": 14,
}
_IR_VERSION_OF_OVERLOADS = 10
_QUANTIZATION = "quant_parameter_tensor_names"  # where onnx_ir keeps a quantization annotation


def sweep(graph: ir.Graph, keep: Collection[ir.Value] = ()) -> None:
    """Remove nodes and initializers that no output, and no value to keep, needs; in subgraphs too.

    Graph inputs and outputs stay, used or not: they are the interface of the model, or of a body.
    The graph is in topological order, so one pass from its end meets every use before its value.
    """
    dead, kept = [], set(keep)
    for node in reversed(graph):
        if any(v.uses() or v.is_graph_output() or v in kept for v in node.outputs):
            for body in bodies_of(node):
                sweep(body)
        else:
            release(node)
            dead.append(node)
    graph.remove(dead)
    for name, value in list(graph.initializers.items()):
        if not (value.uses() or value.is_graph_output() or value.is_graph_input() or value in kept):
            del graph.initializers[name]


def stamp(model: ir.Model) -> None:
    """Set the lowest opset and IR version that the content permits.

    What exporters note on nodes and values for their own debugging is left out: it would ask for a
    newer IR version. What is noted on the model stays.
    """
    nodes = list(model.graph.all_nodes())
    _strip_notes(model, nodes)
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
            *(_IR_VERSION_OF_TYPE.get(name, 0) for name in _type_names(model.graph)),
            *(_IR_VERSION_OF_OVERLOADS for node in nodes if node.overload),
        ]
    )


def least_ir_version(opset_imports: Mapping[str, int]) -> int:
    """Return the IR version that came with the opsets of a model, 8 or newer."""
    known = onnx.helper.OP_SET_ID_VERSION_MAP
    names = {"": "ai.onnx"}
    came_with = (known.get((names.get(d, d), version), 0) for d, version in opset_imports.items())
    return max([FLOOR_IR_VERSION, *came_with])


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


def _type_names(graph: ir.Graph) -> Iterator[str]:
    """Yield the name of every element type in a model (with repetitions)."""
    for each in (graph, *graph.subgraphs()):
        for value in values_of(each):
            if value.dtype is not None:
                yield value.dtype.name
        for tensor in (v.const_value for v in each.initializers.values()):
            if tensor is not None:
                yield tensor.dtype.name


def _strip_notes(model: ir.Model, nodes: list[ir.Node]) -> None:
    model.device_configurations = ()
    for node in nodes:
        node.metadata_props.clear()
        node.device_configurations = ()
    graphs = [model.graph, *model.graph.subgraphs()]
    names = {value.name for graph in graphs for value in values_of(graph)}
    for graph in graphs:
        graph.metadata_props.clear()
        for value in values_of(graph):
            value.metadata_props.clear()
            annotation = value.meta.get(_QUANTIZATION)
            if annotation and not names.issuperset(annotation.values()):
                del value.meta[_QUANTIZATION]  # it speaks of a tensor that was swept
