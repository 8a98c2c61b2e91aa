"""The values of an onnx.ModelProto: their names, their types, and the model without its weights."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx import helper

from onnxtrain.errors import ModelError
from onnxtrain.offline.frontend.external_data import settle_tensors
from onnxtrain.offline.frontend.load import STATES_OPSETS
from onnxtrain.offline.graph.infer import SMALL

_OWN = ("", "ai.onnx")
_INITIALIZERS_ALONE_SINCE = 4  # IR version
_SMALL_COUNT = SMALL // 8  # numbers; shape arithmetic reads int64


def known_type(model: onnx.ModelProto, name: str) -> onnx.TypeProto | None:
    """Return the type that the model declares for a value; None where it declares none."""
    graph = model.graph
    infos: Iterable[onnx.ValueInfoProto] = chain(graph.output, graph.input, graph.value_info)
    for info in infos:
        if info.name == name and info.type.WhichOneof("value"):
            return info.type
    return next((_info(name, t).type for t in graph.initializer if t.name == name), None)


def without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy in which large and external constants are inputs without data.

    `skeleton` of `graph/infer.py` does the same on the way from onnx_ir to a proto.
    """
    graph = model.graph
    large = {
        node.output[0]: attribute.t
        for node in graph.node
        if node.op_type == "Constant" and node.domain in _OWN
        for attribute in node.attribute
        if attribute.name == "value" and _is_left_out(attribute.t)
    }
    nodes = [n for n in graph.node if large.keys().isdisjoint(n.output)] if large else graph.node
    large |= {tensor.name: tensor for tensor in graph.initializer if _is_left_out(tensor)}
    inputs = {info.name for info in graph.input}
    bare = onnx.ModelProto(
        ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions
    )
    target = bare.graph
    target.name = graph.name or "graph"
    target.input.extend(graph.input)
    target.input.extend(_info(name, t) for name, t in large.items() if name not in inputs)
    target.output.extend(graph.output)
    target.value_info.extend(info for info in graph.value_info if info.name not in large)
    target.initializer.extend(t for t in graph.initializer if t.name not in large)
    target.sparse_initializer.extend(graph.sparse_initializer)
    target.node.extend(nodes)
    return bare


def drop_default_inputs(model: onnx.ModelProto) -> None:
    """Remove the inputs that are initializers as well.

    Models of the first IR versions list every weight as an input, and some exporters still do. A
    weight is trained, not fed.
    """
    graph = model.graph
    stored = {tensor.name for tensor in graph.initializer}
    fed = [info for info in graph.input if info.name not in stored]
    if len(fed) < len(graph.input):
        del graph.input[:]
        graph.input.extend(fed)
    if not model.opset_import and model.ir_version < STATES_OPSETS:
        model.opset_import.add(version=1)
    model.ir_version = max(model.ir_version, _INITIALIZERS_ALONE_SINCE)


def forget_names(type_: onnx.TypeProto, graph: onnx.GraphProto) -> None:
    """Remove names of dimensions that no input has: inference made them up, or nothing checks them.

    Labels would have them, and then say that a size is equal to another one, or is not.
    """
    names = {dim.dim_param for info in graph.input for dim in info.type.tensor_type.shape.dim}
    for dim in type_.tensor_type.shape.dim:
        if dim.dim_param and dim.dim_param not in names:
            dim.Clear()


def is_large(tensor: onnx.TensorProto) -> bool:
    """Tell whether a tensor is too large to matter to shape inference."""
    return bool(math.prod(tensor.dims) > _SMALL_COUNT)


def _is_left_out(tensor: onnx.TensorProto) -> bool:
    return is_large(tensor) or bool(tensor.data_location == onnx.TensorProto.EXTERNAL)


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


def rename(graph: onnx.GraphProto, renamed: Mapping[str, str]) -> None:
    """Give the values of a graph other names, its subgraphs not included."""
    for value in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
        value.name = renamed.get(value.name, value.name)
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]


def unknown(model: onnx.ModelProto, name: str) -> str:
    """Return the message for a name that is unknown, or whose type is."""
    if name in defined_names(model.graph):
        return (
            f"the type of {name!r} is not known, because shape inference does not know the node "
            "that computes it. Declare it in the value_info of the graph"
        )
    similar = difflib.get_close_matches(name, set(defined_names(model.graph)), n=3)
    hint = f"; did you mean {' or '.join(map(repr, similar))}?" if similar else ""
    outputs = ", ".join(repr(info.name) for info in model.graph.output)
    return f"the model has no value {name!r}{hint or '.'} Its outputs are {outputs or 'none'}"


# ---- tensors in files beside the model -----------------------------------------------------------


def locate(model: onnx.ModelProto, path: str | os.PathLike[str]) -> dict[str, str]:
    """Replace the locations of external tensors by full paths; return the old ones by the new.

    A file that is missing, too short, or outside of the folder of the model is an error.
    """
    if not any(True for _ in _external(model)):
        return {}
    file = Path(path).absolute()
    loaded = ir.from_proto(model)
    for graph in (loaded.graph, *loaded.graph.subgraphs()):
        ir.external_data.set_base_dir(graph, file.parent)
    settle_tensors(loaded, repr(str(path)), "put it beside the model", file)
    settled = {
        name: value.const_value
        for graph in (loaded.graph, *loaded.graph.subgraphs())
        for name, value in graph.initializers.items()
    }
    declared = {}
    for tensor in list(_external(model)):
        found = settled[tensor.name]
        if isinstance(found, ir.ExternalTensor):
            full = os.path.abspath(found.path)
            declared[full] = _entry(tensor).value
            _entry(tensor).value = full
        elif found is not None:  # a small one, which has been read
            tensor.CopyFrom(ir.to_proto(found))
    return declared


def name_as_before(models: Iterable[onnx.ModelProto], declared: Mapping[str, str]) -> None:
    """Undo `locate` in models that were made from that model."""
    for model in models:
        for tensor in _external(model):
            entry = _entry(tensor)
            entry.value = declared.get(entry.value, entry.value)


def _external(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    for graph in all_graphs(model.graph):
        for tensor in graph.initializer:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                yield tensor


def _entry(tensor: onnx.TensorProto) -> onnx.StringStringEntryProto:
    entry: onnx.StringStringEntryProto
    for entry in tensor.external_data:
        if entry.key == "location":
            return entry
    raise ModelError(f"the external tensor {tensor.name!r} does not name its file")
