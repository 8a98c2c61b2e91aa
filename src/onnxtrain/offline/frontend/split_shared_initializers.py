"""Parameters that an exporter merged because they were equal get their own initializers again.

torch's exporters store equal tensors once. In a fresh network the scales of all normalization
layers are equal (ones), and so are their biases (zeros): forty layers would train one weight. The
two exporters leave different traces, and both are read here. Weights that the network itself
shares, such as an embedding that is also the output layer, stay shared.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.graph.initializers import initializer, replace_by_initializer
from onnxtrain.offline.graph.modules import dynamo_module_of, is_generated, siblings
from onnxtrain.offline.graph.names import Names
from onnxtrain.offline.graph.shapes import is_float

_LARGEST_SHARED = 1024  # elements; the exporter leaves larger tensors alone


def split_shared_initializers(graph: ir.Graph) -> None:
    """Give each parameter its own initializer where the exporter shared equal ones."""
    _split_identities(graph)
    _split_modules(graph)


def _split_identities(graph: ir.Graph) -> None:
    """The torchscript exporter writes the others as Identity nodes that have their names."""
    for node in list(graph):
        if node.op_type != "Identity" or node.domain != "" or node.outputs[0].is_graph_output():
            continue
        source = node.inputs[0]
        if source is not None and source.is_initializer() and not source.is_graph_input():
            assert source.const_value is not None
            replace_by_initializer(graph, node, source.const_value)


def _split_modules(graph: ir.Graph) -> None:
    """The dynamo exporter notes the module of each node: `layers.0.norm1` uses `norm.weight`.

    Equal parameters that are not one repeated number are the same parameter, except in copies of a
    layer, with which lists such as `nn.TransformerEncoder` are filled.
    """
    names, copied = Names.of(graph), set[frozenset[str]]()
    for name, value in _small_floats(graph):
        readers = [(*use, dynamo_module_of(use[0])) for use in value.uses()]
        uses = [(*reader, _owner(name, reader[2])) for reader in readers]
        others = {user: owner for _, _, user, owner in uses if user and owner and user != owner}
        if is_generated(name) or not others:
            continue
        pairs = {siblings(owner, user) for user, owner in others.items()}
        in_list = frozenset() not in pairs
        if in_list and all(_place(owner) > _place(user) for user, owner in others.items()):
            continue  # torch names what the layers of a list share after the last of them
        if not _is_one_number_repeated(value):
            if not in_list or any(_place(o) > _place(user) for user, o in others.items()):
                continue
            copied |= pairs  # the exporter keeps the first of those that were only equal
        for node, index, user, owner in uses:
            if user in others:
                _give_own(graph, value, node, index, f"{user}{name.removeprefix(owner)}")
    for name, value in _small_floats(graph) if copied else ():
        readers = [(*use, dynamo_module_of(use[0])) for use in value.uses()]
        for node, index, user in readers if is_generated(name) else ():
            if siblings(readers[0][2] or "", user or "") in copied:
                _give_own(graph, value, node, index, names.fresh(name))


def _small_floats(graph: ir.Graph) -> list[tuple[str, ir.Value]]:
    """Return the initializers that the exporter may have merged."""
    return [
        (name, value)
        for name, value in graph.initializers.items()
        if is_float(value) and not value.is_graph_input() and _is_small(value.const_value)
    ]


def _is_small(tensor: ir.TensorProtocol | None) -> bool:
    return tensor is not None and 1 < tensor.size <= _LARGEST_SHARED


def _owner(name: str, user: str | None) -> str:
    """Return the module of a parameter, or the parent of it that corresponds to a user.

    A module may use the parameters of one inside it, as attention does with `out_proj.weight`.
    """
    module = name.rpartition(".")[0]
    parent = ".".join(module.split(".")[: (user or "").count(".") + 1])
    return parent if user and (parent == user or siblings(parent, user)) else module


def _give_own(graph: ir.Graph, value: ir.Value, node: ir.Node, index: int, name: str) -> None:
    """Let a node read an initializer of its module's own."""
    if name not in graph.initializers:
        assert value.const_value is not None
        graph.register_initializer(initializer(name, value.const_value))
    node.replace_input_with(index, graph.initializers[name])


def _place(path: str) -> list[tuple[int, str]]:
    """Return a key that orders the layers of a list."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in path.split(".")]


def _is_one_number_repeated(value: ir.Value) -> bool:
    assert value.const_value is not None
    numbers = value.const_value.numpy().reshape(-1)
    return bool(np.all(numbers == numbers[0]))
