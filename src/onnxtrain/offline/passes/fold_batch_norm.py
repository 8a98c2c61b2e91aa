"""BatchNormalization folded into the layer before it, as deployed models have it.

With stored statistics, y = (Wx + b − mean)·γ/σ + β is a layer of its own: W·γ/σ and
(b − mean)·γ/σ + β.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.graph.initializers import initializer, remove_node
from onnxtrain.offline.graph.names import Names, label_of
from onnxtrain.offline.graph.shapes import constant_array

Array = np.ndarray[Any, Any]


def fold_batch_norm(model: ir.Model) -> tuple[str, ...]:
    """Fold each BatchNormalization that follows a layer with weights of its own.

    Return a note on those that stay, with the reason.
    """
    graph, names = model.graph, Names.of(model.graph)
    left = dict[str, list[str]]()
    for node in list(graph):
        if node.op_type == "BatchNormalization" and node.domain == "":
            reason = _why_not(node)
            if reason:
                left.setdefault(reason, []).append(label_of(node))
            else:
                _fold(graph, node, names)
    return tuple(
        f"{len(nodes)} BatchNormalization stay: {reason} ({', '.join(map(repr, nodes[:3]))}"
        f"{' ...' if len(nodes) > 3 else ''})."
        for reason, nodes in left.items()
    )


def _why_not(norm: ir.Node) -> str:
    """Say why a BatchNormalization cannot be folded, or nothing."""
    x = norm.inputs[0]
    layer = None if x is None else x.producer()
    if x is None or layer is None:
        return "they read an input of the model"
    axis = _channel_axis(layer)
    if axis is None:
        return f"they are behind {layer.op_type}"
    if len(x.uses()) != 1 or x.is_graph_output():
        return "something else reads what they normalize"
    if any(output.uses() or output.is_graph_output() for output in norm.outputs[1:]):
        return "their statistics are outputs"
    tensors = [v for v in layer.inputs[1:3] if v is not None]
    if not all(map(_is_own, tensors)):
        return "the weights before them are computed, or belong to several layers"
    numbers = [constant_array(v) for v in (*tensors, *norm.inputs[1:5])]
    if any(n is None for n in numbers):
        return "their numbers, or the weights before them, are inputs of the model"
    sizes = [n.shape for n in (*numbers[1 : len(tensors)], *numbers[-4:]) if n is not None]
    return "" if len(set(sizes)) == 1 else "the bias before them is no vector of channels"


def _fold(graph: ir.Graph, norm: ir.Node, names: Names) -> None:
    x = norm.inputs[0]
    layer = None if x is None else x.producer()
    assert x is not None and layer is not None
    axis, weight = _channel_axis(layer), layer.inputs[1]
    bias = layer.inputs[2] if len(layer.inputs) > 2 else None
    w, b = constant_array(weight), constant_array(bias)
    assert axis is not None and weight is not None and w is not None
    numbers = [constant_array(v) for v in norm.inputs[1:5]]
    scale, offset, mean, variance = (n.astype(np.float64) for n in numbers if n is not None)
    epsilon = norm.attributes.get_float("epsilon", 1e-5)
    factor = scale / np.sqrt(variance + epsilon)
    groups = layer.attributes.get_int("group", 1) if layer.op_type == "ConvTranspose" else 1
    new_weight = _scaled(w.astype(np.float64), factor, axis, groups)
    new_bias = offset + ((0.0 if b is None else b.astype(np.float64)) - mean) * factor
    layer.resize_inputs(3)
    named = bias or norm.inputs[2]
    assert named is not None
    output = norm.outputs[0]
    name, output.name = output.name, names.fresh(f"{output.name}_before")
    ir.convenience.replace_all_uses_with(output, x, replace_graph_outputs=True)
    remove_node(graph, norm)
    x.name = name
    _replace(graph, layer, 1, weight, new_weight.astype(w.dtype), names)
    _replace(graph, layer, 2, named, new_bias.astype(w.dtype), names)


def _channel_axis(layer: ir.Node) -> int | None:
    """Return the axis of the weight along which outputs lie."""
    if layer.domain != "":
        return None
    if layer.op_type == "Conv":
        return 0
    if layer.op_type == "ConvTranspose":
        return 1
    read = layer.attributes
    is_plain = read.get_float("alpha", 1.0) == 1.0 and read.get_float("beta", 1.0) == 1.0
    if layer.op_type == "Gemm" and is_plain:
        return 0 if read.get_int("transB", 0) else 1
    return None


def _is_own(value: ir.Value | None) -> bool:
    """Whether a tensor belongs to one layer alone."""
    return value is not None and value.is_initializer() and len(value.uses()) == 1


def _scaled(weight: Array, factor: Array, axis: int, groups: int) -> Array:
    if groups > 1:  # ConvTranspose: rows of a group lead to the outputs of that group
        rows = weight.shape[0] // groups
        per_row = np.repeat(factor.reshape(groups, -1), rows, axis=0)
        return np.asarray(weight * per_row.reshape(*per_row.shape, *[1] * (weight.ndim - 2)))
    shape = [1] * weight.ndim
    shape[axis] = -1
    return np.asarray(weight * factor.reshape(shape))


def _replace(
    graph: ir.Graph, layer: ir.Node, index: int, named: ir.Value, array: Array, names: Names
) -> None:
    """Give a layer a tensor of its own, with the name of another if nothing else reads that."""
    name = str(named.name)
    if layer.inputs[index] is not None:
        layer.replace_input_with(index, None)
    if name in graph.initializers:
        if named.uses():
            name = names.fresh(name)
        else:
            del graph.initializers[name]
    made = initializer(name, ir.Tensor(array, name=name))
    made.metadata_props.update(named.metadata_props)
    graph.register_initializer(made)
    layer.replace_input_with(index, made)
