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
    folded_from,
    mangled,
    noted_module,
    parameters_called,
)
from onnxtrain.offline.graph.initializers import initializer, replace_by_initializer

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
        is_from_code = node.metadata_props or (node.name or "").startswith("/")  # a clone
        if is_from_code or source is None or not source.is_initializer():
            continue
        if not source.is_graph_input():
            assert source.const_value is not None
            replace_by_initializer(graph, node, source.const_value)


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
            if own not in graph.initializers:
                assert value.const_value is not None
                graph.register_initializer(initializer(own, value.const_value))
            node.replace_input_with(index, graph.initializers[own])


def _is_one_number_repeated(value: ir.Value) -> bool:
    tensor = value.const_value
    if tensor is None or not 1 < tensor.size <= _LARGEST_SHARED:
        return False
    if not tensor.dtype.is_floating_point():
        return False
    numbers = tensor.numpy().reshape(-1)
    return bool(np.all(numbers == numbers[0]))
