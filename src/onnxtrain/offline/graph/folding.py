"""Constant folding of the small numbers that shape inference and rules need.

Function bodies of the ONNX standard compute ranks and cast constants at run time, and exporters
compute axes and bounds from constants. Shape inference does not see through that, and rules write
simpler gradients for constant axes, so these few numbers are folded here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from onnxtrain.offline.graph.initializers import replace_by_initializer
from onnxtrain.offline.graph.op_facts import FOLDS_INTEGERS, RANDOM
from onnxtrain.offline.graph.shapes import constant_array

Array = np.ndarray[Any, Any]
_MOST = 64  # elements: axes, shapes and scalars
_SUBGRAPHS = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)


def fold_integers(graph: ir.Graph, opset: int) -> None:
    """Replace nodes that compute with small integer constants alone by initializers, in place."""
    imports = [onnx.helper.make_opsetid("", opset)]
    for node in graph:
        known = _integers_read(node)
        if known is None or len(node.outputs) != 1 or node.outputs[0].is_graph_output():
            continue
        try:
            value = np.asarray(_evaluate(ir.serde.serialize_node(node), known, imports)[0])
        except Exception:  # it fails, or the evaluator lacks it: the node is left to the runtime
            continue
        if value.dtype.kind in "iub" and value.size <= _MOST:
            replace_by_initializer(graph, node, ir.tensor(value))


def _integers_read(node: ir.Node) -> dict[str, Array] | None:
    """Return the inputs of a node by name, if all of them are small integer constants."""
    sized_by_input = node.op_type in ("ConstantOfShape", "Expand")
    if node.domain != "" or not (sized_by_input or node.op_type in FOLDS_INTEGERS):
        return None
    known = {v.name or "": _small_integers(v) for v in node.inputs if v is not None}
    arrays = {name: array for name, array in known.items() if array is not None}
    if len(arrays) < len(known) or not arrays:
        return None
    if sized_by_input and np.prod([*arrays.values()][-1], dtype=np.float64) > _MOST:
        return None
    return arrays


def _small_integers(value: ir.Value) -> Array | None:
    """Return the integers or booleans of a small constant; weights are never read."""
    tensor = value.const_value
    if tensor is not None and (tensor.size > _MOST or tensor.dtype.is_floating_point()):
        return None
    array = constant_array(value)
    small = array is not None and array.size <= _MOST and array.dtype.kind in "iub"
    return array if small else None


def fold_constants(model: onnx.ModelProto) -> onnx.ModelProto:
    """Replace nodes with a constant result by Constant nodes, and drop what is then unused."""
    known: dict[str, Array] = {
        tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer
    }
    while True:
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
        if not _fold_once(model, known):
            break
    _drop_unused(model.graph)
    return model


def _fold_once(model: onnx.ModelProto, known: dict[str, Array]) -> bool:
    graph = model.graph
    infos = (*graph.input, *graph.value_info, *graph.output)
    types = {info.name: info.type.tensor_type for info in infos}
    folded = False
    for node in graph.node:
        if node.op_type == "Constant" or not node.output or node.output[0] in known:
            if node.op_type == "Constant" and node.output[0] not in known:
                known[node.output[0]] = _evaluate(node, {}, model.opset_import)[0]
            continue
        value = _value_of(node, known, types, model)
        if value is not None and value.size <= _MOST:
            known[node.output[0]] = value
            tensor = onnx.numpy_helper.from_array(value)
            constant = onnx.helper.make_node("Constant", [], [node.output[0]], value=tensor)
            node.CopyFrom(constant)
            folded = True
    return folded


def _value_of(
    node: onnx.NodeProto,
    known: dict[str, Array],
    types: dict[str, onnx.TypeProto.Tensor],
    model: onnx.ModelProto,
) -> Array | None:
    """Return the value of a node with one output, if it is known."""
    if node.domain or len(node.output) != 1 or node.op_type in RANDOM or not node.input:
        return None
    if any(attribute.type in _SUBGRAPHS for attribute in node.attribute):
        return None
    if node.op_type in ("Shape", "Size"):
        return _shape_or_size(node, types.get(node.input[0]))
    if node.op_type == "CastLike" and node.input[0] in known and node.input[1] in types:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(types[node.input[1]].elem_type)
        return known[node.input[0]].astype(dtype)
    if any(name and name not in known for name in node.input):
        return None
    try:
        return np.asarray(_evaluate(node, known, model.opset_import)[0])
    except Exception:  # it fails, or the evaluator lacks it: the node is left to the runtime
        return None


def _shape_or_size(node: onnx.NodeProto, kind: onnx.TypeProto.Tensor | None) -> Array | None:
    if kind is None or not kind.HasField("shape"):
        return None
    bounds = {a.name: a.i for a in node.attribute}
    dims = kind.shape.dim[bounds.get("start", 0) : bounds.get("end", len(kind.shape.dim))]
    if not all(d.HasField("dim_value") for d in dims):
        return None
    sizes = np.array([d.dim_value for d in dims], dtype=np.int64)
    return sizes if node.op_type == "Shape" else np.array(np.prod(sizes, dtype=np.int64))


def _evaluate(
    node: onnx.NodeProto, known: dict[str, Array], imports: Iterable[onnx.OperatorSetIdProto]
) -> list[Array]:
    graph = onnx.helper.make_graph(
        [node],
        "one",
        [],
        [onnx.helper.make_empty_tensor_value_info(node.output[0])],
        [onnx.numpy_helper.from_array(known[n], n) for n in dict.fromkeys(node.input) if n],
    )
    whole = onnx.helper.make_model(graph, opset_imports=list(imports))
    return list(ReferenceEvaluator(whole).run(None, {}))


def _drop_unused(graph: onnx.GraphProto) -> None:
    used = {info.name for info in graph.output}
    for index in reversed(range(len(graph.node))):
        node = graph.node[index]
        if used.isdisjoint(node.output):
            del graph.node[index]
        else:
            used.update(_names_used(node))


def _names_used(node: onnx.NodeProto) -> set[str]:
    """Return what a node reads, its subgraphs included."""
    names = set(node.input)
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            names.update(info.name for info in attribute.g.output)
            names.update(*(_names_used(inner) for inner in attribute.g.node))
    return names
