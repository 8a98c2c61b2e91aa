"""Strict shape inference for models of any size.

onnx's own inference runs in C++ on a serialized model. It is given a *skeleton*: the model with its
large initializers turned into inputs, so that neither size nor external data matter.
"""

from __future__ import annotations

import re

import onnx
import onnx_ir as ir

from onnxtrain.errors import ModelError, ShapeInferenceError
from onnxtrain.offline.graph.folding import fold_integers, fold_known_dims
from onnxtrain.offline.graph.limits import require_moderate_shapes
from onnxtrain.offline.graph.loop_shapes import infer_with_loops
from onnxtrain.offline.graph.ranks import learn_ranks, learn_ranks_from_use
from onnxtrain.offline.graph.subgraphs import values_of

SMALL = 1024  # bytes; what shape arithmetic reads (axes, shapes, scales) is no larger


def skeleton(model: ir.Model) -> onnx.ModelProto:
    """Return the model as a proto in which large initializers are inputs without data.

    So are initializers that are inputs too: their data are a default, which inference must not use.
    """
    graph = model.graph
    stored = list(graph.initializers.values())
    large = [
        v
        for v in stored
        if v.is_graph_input() or (v.const_value is not None and v.const_value.nbytes > SMALL)
    ]
    declared = len(graph.inputs)
    for value in large:
        graph.initializers.pop(value.name or "")
        if not value.is_graph_input():
            graph.inputs.append(value)
    try:
        return ir.to_proto(model)
    finally:
        while len(graph.inputs) > declared:
            graph.inputs.pop()  # del of a slice would leave the values marked as inputs
        # Where they were: their order is that of parameters in buffers, as in onnxruntime 1.19.2.
        for value in stored if large else ():
            graph.initializers.pop(value.name or "", None)
            graph.initializers.add(value)


def check_structure(model: ir.Model) -> None:
    """Raise a ModelError for a graph that is not well formed."""
    try:
        proto = skeleton(model)
    except Exception as error:  # onnx_ir raises many kinds for what it cannot write down
        raise ModelError(f"the model is not valid ONNX: {root_cause(error)}") from None
    check_proto(proto)


def check_proto(proto: onnx.ModelProto) -> None:
    """Raise a ModelError for a proto that is not well formed; the given skeleton may be changed."""
    _complete(proto.graph)
    for info in (*proto.graph.input, *proto.graph.output):
        if info.type.HasField("tensor_type"):
            info.type.tensor_type.shape.SetInParent()
    try:
        onnx.checker.check_model(proto)
    except Exception as error:  # ValidationError mostly; limits of protobuf have other kinds
        raise ModelError(f"the model is not valid ONNX: {_first_sentence(error)}") from None


def _complete(graph: onnx.GraphProto) -> None:
    """Add what the checker asks for and runtimes do not: a name."""
    graph.name = graph.name or "graph"
    for node in graph.node:
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                if body.node:
                    _complete(body)


def infer_shapes(model: ir.Model) -> None:
    """Infer type and shape of every value, in place; contradictions are errors.

    onnx infers forwards, from inputs to outputs. Some ranks are known only from the operators that
    read a value, or once sizes are folded into constants; where that adds one, inference runs once
    more.
    """
    fold_integers(model.graph, model.opset_imports[""])
    _infer_forwards(model)
    if fold_known_dims(model.graph) and fold_integers(model.graph, model.opset_imports[""]):
        for value in (v for n in model.graph if n.domain == "" for v in n.outputs):
            if value.shape is not None and any("unk__" in str(d) for d in value.shape):
                value.shape = None  # names that were made up would hide those that are found now
        _infer_forwards(model)
    bodies = (*model.graph.subgraphs(), model.graph)
    if any([learn_ranks_from_use(body) for body in bodies]):
        _infer_forwards(model)
    missing = sum(map(_count_unranked, bodies))
    while missing:
        if fold_integers(model.graph, model.opset_imports[""], sizes=True):
            _infer_forwards(model)
        elif any([learn_ranks(b) for b in bodies]) or any(
            [learn_ranks_from_use(b) for b in bodies]
        ):
            _infer_forwards(model)
            if sum(map(_count_unranked, bodies)) >= missing:
                return  # what was learnt contradicts what is declared, and was dropped
        else:
            return
        missing = sum(map(_count_unranked, bodies))


def _count_unranked(graph: ir.Graph) -> int:
    """Count the results of ai.onnx whose ranks are not known."""
    results = (v for n in graph if n.domain == "" for v in n.outputs)
    return sum(v.shape is None and v.dtype is not None for v in results)


def _infer_forwards(model: ir.Model) -> None:
    inferred, is_declared_true = _infer_skeleton(skeleton(model), shape_arithmetic=True)
    _adopt(model.graph, inferred.graph, forget=not is_declared_true)
    for graph in (model.graph, *model.graph.subgraphs()):
        require_moderate_shapes(values_of(graph))


def infer_proto(proto: onnx.ModelProto, *, shape_arithmetic: bool = True) -> onnx.ModelProto:
    """Return a skeleton with the type and shape of every value; contradictions are errors.

    Pass `shape_arithmetic=False` for a graph that computes no shapes: onnx takes each vector for a
    possible shape, at a hundred bytes for each of its elements.
    """
    return _infer_skeleton(proto, shape_arithmetic)[0]


def _infer_skeleton(proto: onnx.ModelProto, shape_arithmetic: bool) -> tuple[onnx.ModelProto, bool]:
    """Return the result, and whether the declared shapes agree with it."""
    attempts = [
        (proto, True),
        # Declared shapes may be wrong, and runtimes only warn: what operators compute counts.
        (without_declared_shapes(proto), True),
        # Shape arithmetic fails where two branches of an If use one name for a shape.
        (proto, False),
    ] if shape_arithmetic else [(proto, False)]  # fmt: skip
    failure: Exception | None = None
    for attempt, data_prop in attempts:
        try:
            inferred = infer_with_loops(attempt, data_prop)
            while _type_scaled_features(inferred.graph):
                inferred = infer_with_loops(inferred, data_prop)
            return inferred, attempt is proto
        except Exception as error:  # InferenceError mostly; not all C++ code raises that
            failure = failure or error
    raise ShapeInferenceError(
        f"the shapes or types of the model contradict each other: {_first_sentence(failure)}"
    ) from None


def _type_scaled_features(graph: onnx.GraphProto) -> bool:
    """Set types that onnx does not infer: of Scaler and Normalizer, with which pipelines begin.

    Both are of ai.onnx.ml, and return floats in the shape of what they read.
    """
    known = {info.name: info for info in (*graph.input, *graph.value_info, *graph.output)}
    learnt = False
    for node in graph.node:
        if node.domain != "ai.onnx.ml" or node.op_type not in ("Scaler", "Normalizer"):
            continue
        source, own = known.get(node.input[0]), known.get(node.output[0])
        is_known = own is not None and own.type.tensor_type.HasField("shape")
        if source is not None and source.type.tensor_type.HasField("shape") and not is_known:
            own = graph.value_info.add(name=node.output[0]) if own is None else own
            own.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
            own.type.tensor_type.shape.CopyFrom(source.type.tensor_type.shape)
            learnt = True
    return learnt


def without_declared_shapes(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Drop declared shapes, in bodies too, except those of operators that onnx cannot infer."""
    bare = onnx.ModelProto()
    bare.CopyFrom(proto)
    _drop_shapes(bare.graph)
    return bare


def _drop_shapes(graph: onnx.GraphProto) -> None:
    own = {name for node in graph.node if node.domain for name in node.output}
    kept = [info for info in graph.value_info if info.name in own]
    del graph.value_info[:]
    graph.value_info.extend(kept)
    for info in graph.output:
        if info.name not in own and info.type.HasField("tensor_type"):
            info.type.tensor_type.ClearField("shape")
    for node in graph.node:
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                if body.node:
                    _drop_shapes(body)


def _adopt(graph: ir.Graph, inferred: onnx.GraphProto, forget: bool) -> None:
    """Take over types and shapes; declared ones stay where none is inferred, unless some lied."""
    found = {info.name: info for info in (*inferred.value_info, *inferred.output)}
    for node, node_proto in zip(graph, inferred.node, strict=True):
        for value in node.outputs:
            if forget and node.domain == "":
                value.shape = None
            if value.name in found:
                _take_type(value, found[value.name].type)
        for attribute_proto in node_proto.attribute:
            if attribute_proto.type == onnx.AttributeProto.GRAPH:
                body = node.attributes[attribute_proto.name].value
                for value, info in zip(body.inputs, attribute_proto.g.input, strict=True):
                    value.shape = None  # a state may have lost the one that was declared
                    _take_type(value, info.type)
                _adopt(body, attribute_proto.g, forget)


def _take_type(value: ir.Value, proto: onnx.TypeProto) -> None:
    value.type = ir.serde.deserialize_type_proto_for_type(proto) or value.type
    shape = ir.serde.deserialize_type_proto_for_shape(proto)
    value.shape = value.shape if shape is None else shape


def root_cause(error: BaseException) -> str:
    """Return the message of the error that started a chain of errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    return _first_sentence(error) or type(error).__name__


def _first_sentence(error: BaseException | None) -> str:
    """Return the part of a C++ message that is about the model, without files and line numbers."""
    if isinstance(error, UnicodeDecodeError):
        return "a name or text in it is not UTF-8: the file is damaged"
    text = re.sub(r"\s+", " ", str(error)).strip()
    text = re.sub(r"\S+\.(cc|h):\d+:?\s*", "", text)
    return text[:600]
