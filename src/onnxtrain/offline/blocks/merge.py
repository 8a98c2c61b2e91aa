"""Adding the nodes of one model to another."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import version_converter

from onnxtrain.errors import BlockError
from onnxtrain.offline.blocks.accessor import ModelAccessor
from onnxtrain.offline.blocks.values import all_graphs, defined_names, rename
from onnxtrain.offline.graph.infer import root_cause


def merge(accessor: ModelAccessor, added: onnx.ModelProto, inputs: Mapping[str, str]) -> list[str]:
    """Add nodes, constants and functions of a model; return the new names of its outputs.

    `inputs` maps inputs of the model to values of the base model. Other names change only if the
    base model has them already.
    """
    base = accessor.model
    added = _of_the_opset_of(base, added)
    _add_imports(base, added)
    _add_functions(base, added)
    taken = set(defined_names(base.graph))
    renamed = dict(inputs)
    for name in (name for each in all_graphs(added.graph) for name in defined_names(each)):
        if name and name not in renamed:
            renamed[name] = accessor.fresh_name(name) if name in taken else name
    graph = onnx.GraphProto()
    graph.CopyFrom(added.graph)
    for each in all_graphs(graph):
        rename(each, renamed)
    node_names = {node.name for node in base.graph.node}
    for node in graph.node:
        if node.name in node_names:
            node.name = accessor.fresh_name(node.name)
    base.graph.node.extend(graph.node)
    base.graph.initializer.extend(graph.initializer)
    base.graph.value_info.extend(graph.value_info)
    return [info.name for info in graph.output]


def _of_the_opset_of(base: onnx.ModelProto, added: onnx.ModelProto) -> onnx.ModelProto:
    wanted, given = _opset(base), _opset(added)
    if wanted == given or given is None or wanted is None:
        return added
    if all(_since(op, wanted) == _since(op, given) for op in _operators(added)):
        return added  # the same operators under another number
    try:
        return version_converter.convert_version(added, wanted)
    except Exception as error:  # the converter raises RuntimeError, and others by accident
        raise BlockError(
            f"the loss model has opset {given} and cannot be converted to opset {wanted} of the "
            f"model: {root_cause(error)}. Export the loss model with opset {wanted}"
        ) from None


def _opset(model: onnx.ModelProto) -> int | None:
    return next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), None)


def _since(op_type: str, opset: int) -> int | None:
    try:
        return onnx.defs.get_schema(op_type, opset, "").since_version
    except onnx.defs.SchemaError:
        return None


def _operators(model: onnx.ModelProto) -> set[str]:
    nodes = [n for graph in all_graphs(model.graph) for n in graph.node]
    nodes += [n for function in model.functions for n in function.node]
    return {node.op_type for node in nodes if node.domain in ("", "ai.onnx")}


def _add_imports(base: onnx.ModelProto, added: onnx.ModelProto) -> None:
    versions = {opset.domain: opset.version for opset in base.opset_import}
    for opset in added.opset_import:
        if opset.domain in ("", "ai.onnx"):
            continue
        if versions.setdefault(opset.domain, opset.version) != opset.version:
            raise BlockError(
                f"the loss model imports version {opset.version} of the operators "
                f"{opset.domain!r}, the model version {versions[opset.domain]}"
            )
    known = {opset.domain for opset in base.opset_import}
    base.opset_import.extend(o for o in added.opset_import if o.domain not in known | {"ai.onnx"})


def _add_functions(base: onnx.ModelProto, added: onnx.ModelProto) -> None:
    known = {(f.domain, f.name, f.overload): f for f in base.functions}
    for function in added.functions:
        same = known.get((function.domain, function.name, function.overload))
        if same is None:
            base.functions.append(function)
        elif same != function:
            raise BlockError(
                f"the model and the loss model both define the function "
                f"{function.domain}.{function.name}, differently"
            )
