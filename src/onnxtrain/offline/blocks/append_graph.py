"""The way from names to `Ops` and back: how every block writes into the model of the context.

Blocks are called with names, and the model that they add to is an onnx.ModelProto, which users may
extend by hand. `append_graph` opens the named values, lets a function write with `Ops`, and appends
what it wrote to the model. The rest of the model is neither converted nor copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain.errors import BlockError
from onnxtrain.offline.blocks.accessor import ModelAccessor, current
from onnxtrain.offline.frontend.upgrade import upgraded
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.versions import FLOOR_OPSET, least_ir_version

Write = Callable[..., Sequence[ir.Value]]
_NUMPY_BROADCASTING = 7  # the opset that brought it


def append_graph(
    names: Sequence[str],
    write: Write,
    token: str,
    *,
    typed: bool = True,
    least_opset: int = 1,
) -> list[str]:
    """Append what `write(op, *values)` makes of the named values; return the names of its results.

    Args:
        names: values of the model; an empty name stands for an optional input that is left out.
        write: gets an `Ops` and the values, and returns values that it made.
        token: the results are named `onnx::<token>::<number>`.
        typed: whether `write` needs the types of the values. Without them the values need not be in
            the model yet: a block that calls blocks may add them later.
        least_opset: the oldest opset that `write` knows the operators of. A model of an older one
            is upgraded.

    """
    accessor = current()
    op = writer(accessor, token, least_opset)
    values = [_opened(accessor, name, typed) for name in names]
    results = write(op, *values)
    for result in results:
        result.name = accessor.fresh_name(token)
    append(accessor.model, op.target)
    return [str(result.name) for result in results]


def append_node(
    op_type: str, names: Sequence[str], *, token: str = "", domain: str = "", **attributes: Any
) -> str:
    """Append one node, and return the name of its first output."""
    given = {
        name: ir.serde.deserialize_attribute(onnx.helper.make_attribute(name, value)).value
        for name, value in attributes.items()
        if value is not None
    }

    def write(op: Ops, *values: ir.Value | None) -> Sequence[ir.Value]:
        return op.call(op_type, *values, domain=domain, **given)

    token = token or f"{op_type.lower()}_output"
    return append_graph(names, write, token, typed=False)[0]


def writer(accessor: ModelAccessor, scope: str, least_opset: int = 1) -> Ops:
    """Return an `Ops` with a graph of its own, whose names are new to the model."""
    graph = ir.Graph([], [], nodes=[], name="appended")
    op = Ops(graph, _opset(accessor, least_opset), accessor.names)
    op.scope = scope
    return op


def append(model: onnx.ModelProto, graph: ir.Graph) -> None:
    """Append the inputs, nodes, constants and outputs of a graph to those of the model."""
    proto = ir.to_proto(graph)
    target = model.graph
    target.input.extend(proto.input)
    target.node.extend(proto.node)
    target.initializer.extend(proto.initializer)
    target.value_info.extend(proto.value_info)
    target.output.extend(proto.output)


def _opened(accessor: ModelAccessor, name: str, typed: bool) -> ir.Value | None:
    if not name:
        return None
    if not typed:
        return ir.Value(name=name)
    type_ = accessor.type_of(name)
    if type_.WhichOneof("value") != "tensor_type":
        raise BlockError(f"{name!r} is not a tensor: give the names of tensors")
    info = onnx.ValueInfoProto(name=name, type=type_)
    return ir.serde.deserialize_value_info_proto(info, None)


def _opset(accessor: ModelAccessor, least: int) -> int:
    """Return the opset of the model; upgrade the model if it is older than the least one."""
    model, least = accessor.model, max(least, _NUMPY_BROADCASTING)
    default = next((o for o in model.opset_import if o.domain in ("", "ai.onnx")), None)
    if default is None:
        default = model.opset_import.add(domain="", version=FLOOR_OPSET)
    if default.version < least:
        if model.graph.node:
            model.CopyFrom(upgraded(model))
            return FLOOR_OPSET
        default.version = least
        model.ir_version = max(model.ir_version, least_ir_version({"": least}))
    return int(default.version)
