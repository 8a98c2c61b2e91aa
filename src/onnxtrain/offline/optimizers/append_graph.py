"""Writing into the model of the context with `Ops`, which knows types and shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx
import onnx_ir as ir

from onnxtrain.errors import BlockError
from onnxtrain.offline.blocks.accessor import current
from onnxtrain.offline.blocks.values import type_of
from onnxtrain.offline.graph.emit import FLOOR_OPSET, least_ir_version
from onnxtrain.offline.graph.names import Names
from onnxtrain.offline.graph.ops import Ops


def graft(
    names: Sequence[str], write: Callable[[Ops, Sequence[ir.Value]], list[ir.Value]], scope: str
) -> list[str]:
    """Add what `write` makes of the named values to the model; return the names of its results."""
    model = current().model
    inputs = []
    for name in names:
        type_ = type_of(model, name)
        if type_.WhichOneof("value") != "tensor_type":
            raise BlockError(f"{name!r} is not a tensor: give the names of tensors")
        inputs.append(
            ir.serde.deserialize_value_info_proto(onnx.ValueInfoProto(name=name, type=type_), None)
        )
    op = writer(model, scope)
    results = write(op, inputs)
    append(model, op.target)
    return [str(value.name) for value in results]


def writer(model: onnx.ModelProto, scope: str) -> Ops:
    """Return an Ops with a graph of its own, whose names do not collide with those of the model."""
    graph = ir.Graph([], [], nodes=[], name="grafted", opset_imports={"": FLOOR_OPSET})
    op = Ops(graph, _opset(model), Names(_taken(model.graph)))
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


def _opset(model: onnx.ModelProto) -> int:
    """Return the opset of the model, raised to what is written here while it has no nodes."""
    default = next((o for o in model.opset_import if o.domain in ("", "ai.onnx")), None)
    if default is None:
        default = model.opset_import.add(domain="", version=FLOOR_OPSET)
    if default.version < FLOOR_OPSET:
        if model.graph.node:
            raise BlockError(
                f"the model is of opset {default.version}; optimizers and gradient clipping are "
                f"written for {FLOOR_OPSET} and later: convert the model, or use an empty_base()"
            )
        default.version = FLOOR_OPSET
        model.ir_version = max(model.ir_version, least_ir_version({"": FLOOR_OPSET}))
    return int(default.version)


def _taken(graph: onnx.GraphProto) -> set[str]:
    taken = {info.name for info in graph.input} | {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        taken.update((node.name, *node.output))
    return taken
