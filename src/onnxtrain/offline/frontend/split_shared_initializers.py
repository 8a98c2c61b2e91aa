"""Parameters that an exporter merged because they were equal get their own initializers again.

torch's exporters store equal tensors once. In a fresh network the scales of all normalization
layers are equal (ones), and so are their biases (zeros): forty layers would train one weight. The
two exporters leave different traces, and both are read here. Weights that the network itself
shares, such as an embedding that is also the output layer, stay shared.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.frontend.torch_notes import (
    dotted,
    folded_from,
    mangled,
    noted_module,
    parameters_called,
    states_called,
)
from onnxtrain.offline.graph.initializers import initializer, replace_by_initializer

_LARGEST_SHARED = 1024  # elements; the exporter leaves larger tensors alone


def split_shared_initializers(graph: ir.Graph) -> None:
    """Give each parameter its own initializer where the exporter shared equal ones."""
    _split_identities(graph)
    _split_calls(graph)
    _split_modules(graph)
    _split_statistics(graph)


def _split_identities(graph: ir.Graph) -> None:
    """The torchscript exporter writes the others as Identity nodes that have their names."""
    for node in list(graph):
        if node.op_type != "Identity" or node.domain != "" or node.outputs[0].is_graph_output():
            continue
        source = node.inputs[0]
        is_from_code = node.metadata_props or (node.name or "").startswith("/")  # a clone
        if is_from_code or source is None or not source.is_initializer():
            continue
        if source.is_graph_input():
            continue
        assert source.const_value is not None
        if len(source.uses()) == 1:  # nothing shares it, and it keeps its name
            ir.convenience.replace_all_uses_with(node.outputs[0], source)
            graph.remove(node, safe=True)
        else:
            replace_by_initializer(graph, node, source.const_value)


def _split_calls(graph: ir.Graph) -> None:
    """The dynamo exporter notes the parameters and buffers of each call, in the order of inputs.

    So two parameters of one module are told apart, and the scale of a fresh BatchNormalization from
    its running variance: both are ones.
    """
    modules = _modules(graph)
    mentioned = {state for node in graph for state in states_called(node)}
    for node in list(graph):
        given = [
            (index, value)
            for index, value in enumerate(node.inputs)
            if value is not None and value.is_initializer()
        ]
        called = states_called(node)
        if len(called) != len(given):
            continue
        names = [mangled(str(value.name)) for _, value in given]
        if any(state in names and name != state for name, state in zip(names, called, strict=True)):
            continue  # in another order
        for (index, value), name, state in zip(given, names, called, strict=True):
            is_another = name != state and name in mentioned  # and not renamed by another tool
            if is_another and _may_be_shared(value) and not folded_from(value):
                _use_own(graph, node, index, dotted(state, modules, str(value.name)))


def _modules(graph: ir.Graph) -> set[str]:
    """Return the modules that names of tensors and notes of nodes tell of."""
    named = {n for name, v in graph.initializers.items() for n in (name, *folded_from(v))}
    return {n.rpartition(".")[0] for n in named} | {noted_module(node) for node in graph}


def _split_statistics(graph: ir.Graph) -> None:
    """A running statistic is never a parameter too, whichever tool has merged equal tensors."""
    for node in list(graph):
        if node.op_type != "BatchNormalization" or node.domain != "" or len(node.inputs) < 5:
            continue
        for index, leaf in ((3, "running_mean"), (4, "running_var")):
            value, scale = node.inputs[index], node.inputs[1]
            if value is None or scale is None or not value.is_initializer():
                continue
            if all(
                (user.op_type, at, user.inputs[1]) == (node.op_type, index, scale)
                for user, at in value.uses()
            ):
                continue
            module = str(scale.name).rpartition(".")[0] or str(scale.name)
            _use_own(graph, node, index, f"{module}.{leaf}")


def _split_modules(graph: ir.Graph) -> None:
    """The dynamo exporter notes the module of each node: `layers.0.norm1` uses `norm.weight`.

    It also notes the parameters of each call. Where it does not say, only tensors of one repeated
    number are split: random parameters are equal only if they are the same parameter.
    """
    for name, value in list(graph.initializers.items()):
        known = next(iter(folded_from(value)), name)
        module, _, leaf = known.rpartition(".")
        users = list(dict.fromkeys(noted_module(node) for node, _ in value.uses()))
        if not module or value.is_graph_input() or len(users) < 2:
            continue
        keeper = module if module in users else users[0]
        if known.startswith(f"{keeper}."):  # the nodes of an attention layer have no finer module
            leaf = known.removeprefix(f"{keeper}.")
        is_one_number = known == name and _is_one_number_repeated(value)
        for node, index in list(value.uses()):
            user = noted_module(node)
            own = f"{user}.{leaf}"
            is_other = is_one_number or mangled(own) in parameters_called(node)
            if user in ("", keeper) or not is_other:
                continue
            _use_own(graph, node, index, own)


def _use_own(graph: ir.Graph, node: ir.Node, index: int, name: str) -> None:
    """Let a node read an initializer of that name, with the values of what it reads now.

    Nothing happens where one of that name has other values: the notes are older than the weights.
    """
    value = node.inputs[index]
    assert value is not None and value.const_value is not None
    if name not in graph.initializers:
        graph.register_initializer(initializer(name, value.const_value))
    own = graph.initializers[name]
    if own.const_value is not None and _are_equal(own.const_value, value.const_value):
        node.replace_input_with(index, own)


def _are_equal(one: ir.TensorProtocol, other: ir.TensorProtocol) -> bool:
    if (one.dtype, tuple(one.shape)) != (other.dtype, tuple(other.shape)):
        return False
    return one is other or one.tobytes() == other.tobytes()


def _may_be_shared(value: ir.Value) -> bool:
    """Tell whether a value is small enough for the exporter to have merged it with others."""
    tensor = value.const_value
    if tensor is None or value.is_graph_input() or tensor.size > _LARGEST_SHARED:
        return False
    return tensor.dtype.is_floating_point()


def _is_one_number_repeated(value: ir.Value) -> bool:
    tensor = value.const_value
    if tensor is None or not 1 < tensor.size <= _LARGEST_SHARED:
        return False
    if not tensor.dtype.is_floating_point():
        return False
    numbers = tensor.numpy().reshape(-1)
    return bool(np.all(numbers == numbers[0]))
