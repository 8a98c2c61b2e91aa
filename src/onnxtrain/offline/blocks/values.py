"""What is known of the values of a model: whether they exist, their types, that all is well.

Weights are left out of whatever is computed here, so neither their size nor where they are stored
matters.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator
from itertools import chain

import onnx
from onnx import helper

from onnxtrain.offline.graph.infer import SMALL

_OWN = ("", "ai.onnx")
_INITIALIZERS_ALONE_SINCE = 4  # IR version
_SMALL_COUNT = SMALL // 8  # numbers; shape arithmetic reads int64


def given_type(graph: onnx.GraphProto, name: str) -> onnx.TypeProto | None:
    """Return the type of an input that declares it, or of an initializer; else None."""
    fed: Iterable[onnx.TypeProto] = (i.type for i in graph.input if i.name == name)
    stored = (_info(name, t).type for t in graph.initializer if t.name == name)
    return next((t for t in (*fed, *stored) if _is_complete(t)), None)


def declared_type(graph: onnx.GraphProto, name: str) -> onnx.TypeProto | None:
    """Return the whole type that the model declares for an output or another value, or None."""
    infos: Iterable[onnx.ValueInfoProto] = chain(graph.output, graph.value_info)
    return next((i.type for i in infos if i.name == name and _is_complete(i.type)), None)


def known_type(model: onnx.ModelProto, name: str) -> onnx.TypeProto | None:
    """Return the type that the model states for a value, None where it states none."""
    graph = model.graph
    infos: Iterable[onnx.ValueInfoProto] = chain(graph.output, graph.input, graph.value_info)
    for info in infos:
        if info.name == name and info.type.WhichOneof("value"):
            return info.type
    return next((_info(name, t).type for t in graph.initializer if t.name == name), None)


def skeleton(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy in which large and external constants are inputs without data."""
    graph = model.graph
    copied = onnx.ModelProto(
        ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions
    )
    target = copied.graph
    target.name = graph.name or "graph"
    target.input.extend(graph.input)
    target.output.extend(graph.output)
    target.value_info.extend(graph.value_info)
    target.sparse_initializer.extend(graph.sparse_initializer)
    inputs = {info.name for info in graph.input}
    for tensor in graph.initializer:
        if not _is_left_out(tensor):
            target.initializer.append(tensor)
        elif tensor.name not in inputs:
            target.input.append(_info(tensor.name, tensor))
    for node in graph.node:
        constant = _constant_of(node)
        if constant is not None and _is_left_out(constant):
            target.input.append(_info(node.output[0], constant))
        else:
            target.node.append(node)
    declared_again = {info.name for info in target.input} - inputs
    kept = [info for info in target.value_info if info.name not in declared_again]
    del target.value_info[:]
    target.value_info.extend(kept)
    return copied


def drop_default_inputs(model: onnx.ModelProto) -> None:
    """Let initializers that are inputs as well be initializers alone.

    Models of the first IR versions list every weight as an input, and some exporters do so still.
    A weight is trained, not fed.
    """
    graph = model.graph
    stored = {tensor.name for tensor in graph.initializer}
    fed = [info for info in graph.input if info.name not in stored]
    if len(fed) < len(graph.input):
        del graph.input[:]
        graph.input.extend(fed)
    model.ir_version = max(model.ir_version, _INITIALIZERS_ALONE_SINCE)


def forget_traced_sizes(model: onnx.ModelProto) -> None:
    """Forget the sizes that outputs are declared with, if inputs vary in size.

    Exporters that trace write the sizes of the example where they lose track of a symbol. Labels
    would be declared with them, and then nothing but that example could be fed. Shape inference
    finds again what is true.
    """
    graph = model.graph
    dims = [dim for info in graph.input for dim in info.type.tensor_type.shape.dim]
    if all(dim.HasField("dim_value") for dim in dims):
        return
    inferable = {name for node in graph.node if node.domain in _OWN for name in node.output}
    for info in graph.output:
        if info.name in inferable:
            for dim in info.type.tensor_type.shape.dim:
                if dim.HasField("dim_value"):
                    dim.Clear()


def is_large(tensor: onnx.TensorProto) -> bool:
    """Tell whether a tensor is too large to say something of shapes."""
    return bool(math.prod(tensor.dims) > _SMALL_COUNT)


def _is_left_out(tensor: onnx.TensorProto) -> bool:
    return is_large(tensor) or bool(tensor.data_location == onnx.TensorProto.EXTERNAL)


def _constant_of(node: onnx.NodeProto) -> onnx.TensorProto | None:
    if node.op_type != "Constant" or node.domain not in ("", "ai.onnx"):
        return None
    return next((a.t for a in node.attribute if a.name == "value"), None)


def _info(name: str, tensor: onnx.TensorProto) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims))


def all_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph and the graphs in its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from all_graphs(attribute.g)
            elif attribute.type == onnx.AttributeProto.GRAPHS:
                for body in attribute.graphs:
                    yield from all_graphs(body)


def defined_names(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield the names of inputs, initializers and outputs of nodes."""
    yield from (info.name for info in graph.input)
    yield from (tensor.name for tensor in graph.initializer)
    for node in graph.node:
        yield from node.output


def _is_complete(type_: onnx.TypeProto) -> bool:
    if type_.WhichOneof("value") != "tensor_type":
        return type_.WhichOneof("value") is not None
    return bool(type_.tensor_type.elem_type) and type_.tensor_type.HasField("shape")


def unknown(model: onnx.ModelProto, name: str) -> str:
    """Say that a name is unknown, or its type."""
    if name in defined_names(model.graph):
        return (
            f"the type of {name!r} is not known: it does not follow from the node that computes "
            "it. Declare it in the value_info of the graph"
        )
    similar = difflib.get_close_matches(name, set(defined_names(model.graph)), n=3)
    hint = f"; did you mean {' or '.join(map(repr, similar))}?" if similar else ""
    outputs = ", ".join(repr(info.name) for info in model.graph.output)
    return f"the model has no value {name!r}{hint or '.'} Its outputs are {outputs or 'none'}"
