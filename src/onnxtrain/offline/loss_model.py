"""A copy of the canonical model that computes the loss, ready for gradients to be added.

What trains becomes inputs, the running statistics get their updates, and the outputs are those that
were asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.errors import NotDifferentiableError, UnknownNameError
from onnxtrain.offline.frontend.fused import expand_trained
from onnxtrain.offline.graph.shapes import dims_of, is_float
from onnxtrain.offline.passes.batch_norm import BatchNormMode, set_batch_norm_mode
from onnxtrain.offline.passes.layer_norm import join_layer_norms
from onnxtrain.offline.passes.linear_layers import join_linear_layers
from onnxtrain.offline.passes.quantize.nonfinite import keep_nonfinite
from onnxtrain.offline.passes.quantize.ranges import track_ranges

Tensors = dict[str, ir.TensorProtocol]


@dataclass(frozen=True)
class LossModel:
    """A model whose first output is the loss, and whose parameters are inputs."""

    model: ir.Model
    targets: list[ir.Value]  # what trains, in the order of the model
    updates: dict[str, ir.Value]  # by the name of the running statistic
    tensors: Tensors  # of parameters and statistics, in the order of the model
    data: frozenset[str]  # the inputs that are not parameters
    fed: frozenset[str]  # the targets that were inputs before

    @property
    def loss(self) -> ir.Value:
        """The value that training lowers."""
        return self.model.graph.outputs[0]


def loss_model(
    canonical: ir.Model,
    outputs: Sequence[str],
    trainable: Sequence[str],
    frozen: Sequence[str] = (),
    *,
    bn: BatchNormMode | None = None,
) -> LossModel:
    """Copy a canonical model, and turn what trains into inputs; the first output is the loss."""
    model = canonical.clone()
    expand_trained(model, trainable)
    graph = model.graph
    updates = set_batch_norm_mode(model, bn, keep_statistics=True)
    updates |= track_ranges(model)
    join_layer_norms(model, trainable)
    join_linear_layers(model)
    data = frozenset(str(v.name) for v in graph.inputs if v.name not in graph.initializers)
    choose_outputs(graph, outputs)
    keep_nonfinite(model)
    targets = _targets(graph, trainable, updates)
    fed = frozenset(str(v.name) for v in targets if v.is_graph_input())
    stored = {*trainable, *frozen, *updates}
    tensors = {
        name: value.const_value
        for name, value in graph.initializers.items()
        if name in stored and value.const_value is not None
    }
    promote(graph, [*trainable, *updates])
    _require_scalar(graph.outputs[0])
    return LossModel(model, targets, updates, tensors, data, fed)


def _targets(
    graph: ir.Graph, names: Sequence[str], statistics: Mapping[str, ir.Value]
) -> list[ir.Value]:
    inputs = {v.name: v for v in graph.inputs}
    targets = []
    for name in dict.fromkeys(names):
        value = graph.initializers.get(name) or inputs.get(name)
        if value is None:
            raise UnknownNameError(
                f"requires_grad names {name!r}, which is neither an initializer nor an input of "
                "the model"
            )
        if name in statistics:
            raise NotDifferentiableError(
                f"{name!r} is a running statistic of BatchNormalization: it is updated, not trained"
            )
        if not is_float(value):
            raise NotDifferentiableError(
                f"{name!r} is of type {value.dtype}; only floats can be trained"
            )
        targets.append(value)
    order = {v: i for i, v in enumerate((*graph.inputs, *graph.initializers.values()))}
    return sorted(targets, key=lambda v: order[v])


def promote(graph: ir.Graph, names: Sequence[str]) -> None:
    """Turn initializers that training changes into inputs of the graph."""
    wanted = set(names)
    for name in [n for n in graph.initializers if n in wanted]:
        value = graph.initializers.pop(name)
        value.const_value = None
        if not value.is_graph_input():
            graph.inputs.append(value)


def choose_outputs(graph: ir.Graph, names: Sequence[str]) -> None:
    """Let a graph return the values of these names."""
    values = values_by_name(graph)
    unknown = [n for n in names if n not in values]
    if unknown:
        raise UnknownNameError(
            f"the model has no value {', '.join(map(repr, unknown))} to return: choose outputs "
            "among the values of the model"
        )
    graph.outputs.clear()
    graph.outputs.extend(values[n] for n in names)


def values_by_name(graph: ir.Graph) -> dict[str, ir.Value]:
    """Return the values of a graph, without those in bodies."""
    values = {str(v.name): v for v in (*graph.inputs, *graph.initializers.values())}
    values.update((str(v.name), v) for node in graph for v in node.outputs)
    return values


def _require_scalar(loss: ir.Value) -> None:
    dims = dims_of(loss)
    if not is_float(loss):
        raise NotDifferentiableError(f"the loss {loss.name!r} is of type {loss.dtype}, not a float")
    if dims is None or any(d != 1 for d in dims):
        raise NotDifferentiableError(
            f"the loss {loss.name!r} has the shape {loss.shape}; training needs a single number: "
            "reduce it to its mean or sum (reduction='mean')"
        )
