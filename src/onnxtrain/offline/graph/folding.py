"""Constant folding of the small numbers that shape inference and rules need.

Function bodies of the ONNX standard compute ranks and cast constants at run time, and exporters
compute axes and bounds from constants. Shape inference does not see through that, and rules write
simpler gradients for constant axes, so these few numbers are folded here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from onnxtrain.offline.graph.initializers import replace_by_initializer
from onnxtrain.offline.graph.onnx_inference import infer_shapes
from onnxtrain.offline.graph.op_facts import (
    BROADCASTS,
    FOLDS_INTEGERS,
    KEEPS_SHAPE,
    RANDOM,
    READS_ONCE,
    REDUCTIONS,
)
from onnxtrain.offline.graph.shapes import constant_array, dims_read, integers
from onnxtrain.offline.graph.subgraphs import subgraphs_of
from onnxtrain.offline.graph.sweep import sweep

Array = np.ndarray[Any, Any]
_MOST = 64  # elements: axes, shapes and scalars


def fold_integers(graph: ir.Graph, opset: int, *, sizes: bool = False) -> bool:
    """Replace nodes that compute with small integer constants alone by initializers, in place.

    With `sizes`, the known shapes of values are such constants too. Tells whether it folded any.
    """
    folded = False
    for node in graph:
        if len(node.outputs) != 1 or node.outputs[0].is_graph_output():
            continue
        if sizes and node.domain == "" and node.op_type in ("Shape", "Size"):
            value = _value_of(node, opset)
        else:
            value = _evaluate(node, opset) if _folds(node) else None
        if value is not None and value.dtype.kind in "iub" and value.size <= _MOST:
            replace_by_initializer(graph, node, ir.tensor(value))
            folded = True
    return folded


def fold_known_dims(graph: ir.Graph) -> bool:
    """Replace a size that is picked from a shape of which it is known; tell whether there was one.

    So a half of the last axis, as of rotary positions, is known although the batch is not.
    """
    folded = False
    for node in [n for n in graph if n.op_type == "Gather" and n.domain == ""]:
        shape, index = node.inputs
        maker = None if shape is None else shape.producer()
        places = constant_array(index)
        if maker is None or maker.op_type != "Shape" or maker.domain or places is None:
            continue
        dims = dims_read(maker)
        if dims is None or places.size != 1 or not -len(dims) <= places.item() < len(dims):
            continue
        size = dims[places.item()]
        if isinstance(size, int) and not node.outputs[0].is_graph_output():
            replace_by_initializer(graph, node, ir.tensor(np.full(places.shape, size, np.int64)))
            folded = True
    return folded


def _folds(node: ir.Node) -> bool:
    """Tell whether all that a node reads are small integer constants."""
    if node.domain != "" or node.op_type not in FOLDS_INTEGERS | {"ConstantOfShape", "Expand"}:
        return False
    given = [v for v in node.inputs if v is not None]
    return bool(given) and all(_small_integers(v) is not None for v in given)


def _small_integers(value: ir.Value) -> Array | None:
    """Return the integers or booleans of a small constant; weights are never read."""
    tensor = value.const_value
    if tensor is not None and (tensor.size > _MOST or tensor.dtype.is_floating_point()):
        return None
    array = constant_array(value)
    small = array is not None and array.size <= _MOST and array.dtype.kind in "iub"
    return array if small else None


def fold_constants(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Replace nodes with a constant result by Constant nodes, and drop what is then unused."""
    while True:
        inferred = infer_shapes(proto, data_prop=True)
        model = ir.from_proto(inferred)
        folded = [
            place for place, node in enumerate(model.graph) if _fold(node, model.opset_imports[""])
        ]
        if not folded:
            break
        proto, nodes = inferred, list(model.graph)
        for place in folded:
            proto.graph.node[place].CopyFrom(ir.serde.serialize_node(nodes[place]))
    sweep(model.graph)
    return ir.to_proto(model)


def _fold(node: ir.Node, opset: int) -> bool:
    if node.domain or len(node.outputs) != 1 or not node.inputs or subgraphs_of(node):
        return False
    value = _value_of(node, opset)
    if value is None or value.size > _MOST:
        return False
    node.op_type = "Constant"
    node.resize_inputs(0)
    node.attributes.clear()
    node.attributes.add(ir.AttrTensor("value", ir.tensor(value)))
    return True


def _value_of(node: ir.Node, opset: int) -> Array | None:
    """Return the result of a node, if it is known."""
    if node.op_type in ("Shape", "Size"):
        sizes = integers(dims_read(node))
        if sizes is None:
            return None
        return np.array(sizes if node.op_type == "Shape" else math.prod(sizes), np.int64)
    if node.op_type == "CastLike":
        array, like = constant_array(node.inputs[0]), node.inputs[1]
        if array is None or like is None or like.dtype is None:
            return None
        return array.astype(like.dtype.numpy())
    return None if node.op_type in RANDOM else _evaluate(node, opset)


def _evaluate(node: ir.Node, opset: int) -> Array | None:
    """Compute a node of known inputs with a small result; None where it is not, or that fails."""
    if node.op_type not in _CHEAP:
        return None
    arrays = [constant_array(v) for v in node.inputs if v is not None]
    known = [array for array in arrays if array is not None]
    try:
        if len(known) < len(arrays) or not _count(node.op_type, known) <= _MOST:
            return None
        names = [v.name or "" for v in node.inputs if v is not None]
        graph = onnx.helper.make_graph(
            [ir.serde.serialize_node(node)],
            "one",
            [],
            [onnx.helper.make_empty_tensor_value_info(node.outputs[0].name or "")],
            [
                onnx.numpy_helper.from_array(array, name)
                for name, array in dict(zip(names, known, strict=True)).items()
            ],
        )
        imports = [onnx.helper.make_opsetid("", opset)]
        whole = onnx.helper.make_model(graph, opset_imports=imports)
        (result,) = ReferenceEvaluator(whole).run(None, {})
        return np.asarray(result)
    except Exception:  # it fails, or the evaluator lacks it: the node is left to the runtime
        return None


# Others may be cheap, too, but a convolution with pads of 2**40 has a small result as well.
_CHEAP = FOLDS_INTEGERS | BROADCASTS | KEEPS_SHAPE | REDUCTIONS | READS_ONCE


def _count(op: str, given: Sequence[Array]) -> float:
    """Return how many elements the result of an operator has, or a bound, before it is computed."""
    if any(array.dtype.kind not in "iubf" for array in given):
        return math.inf  # texts grow in themselves
    if op == "Range":
        start, limit, step = (float(array.reshape(-1)[0]) for array in given)
        return abs(limit - start) / abs(step)
    if op == "ConstantOfShape":
        return float(math.prod(given[0].reshape(-1).tolist()))
    if op == "Tile":
        return float(given[0].size * math.prod(given[1].reshape(-1).tolist()))
    if op == "Gather":
        return given[0].size * given[1].size
    if op == "Expand":
        target = [abs(n) or 1 for n in given[1].reshape(-1).tolist()]
        return float(given[0].size * math.prod(target))
    if op in BROADCASTS:
        return math.prod(np.broadcast_shapes(*(array.shape for array in given)))
    if op == "Concat":
        return sum(array.size for array in given)
    return 0.0  # no more than is read
