"""The graphs of a training step, built from a model that computes a loss.

Three kinds of graphs come from one model, and all have the same inputs: what the user feeds, then
the values that training changes. Parameters that do not change stay initializers, which is what
lets onnxruntime treat them as constants.

- the *training* graph computes the loss and adds its gradients to buffers,
- the *evaluation* graph computes the loss with everything in inference mode,
- the *step* graph computes the loss, the gradients and the updated parameters in one run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import onnx
import onnx_ir as ir

import onnxtrain.autodiff.rules  # noqa: F401  (registers the rules)
from onnxtrain.api.graph_names import ACCUMULATED, BUFFER, LAZY_RESET, UPDATED
from onnxtrain.autodiff.emit import stamp, sweep
from onnxtrain.autodiff.engine import ActivePath, differentiate
from onnxtrain.autodiff.expand import expand_by_definition
from onnxtrain.autodiff.linear import join_linear_layers
from onnxtrain.autodiff.ops import Ops
from onnxtrain.autodiff.prepare import BatchNormMode, prepare
from onnxtrain.autodiff.shapes import dims_of, is_float
from onnxtrain.errors import NotDifferentiableError, UnknownNameError
from onnxtrain.seeded import seed_random_nodes

if TYPE_CHECKING:
    from onnxtrain.onnxblock.optim import Optimizer


@dataclass
class TrainingGraphs:
    """What `build_training_graphs` returns."""

    training: onnx.ModelProto
    evaluation: onnx.ModelProto
    trainable: list[onnx.TensorProto]
    frozen: list[onnx.TensorProto]
    statistics: list[str] = field(default_factory=list)
    step: onnx.ModelProto | None = None


def build_training_graphs(
    model: onnx.ModelProto | str | os.PathLike[str],
    outputs: Sequence[str],
    trainable: Sequence[str],
    frozen: Sequence[str] = (),
    *,
    bn: BatchNormMode | None = None,
    optimizer: Optimizer | None = None,
    proximal: bool = False,
) -> TrainingGraphs:
    """Build the graphs of training from a model that computes a loss.

    Args:
        model: forward pass and loss; it is not changed.
        outputs: the values to give out; the first is the loss.
        trainable: what to differentiate with respect to: initializers, or inputs of the graph.
        frozen: initializers to list beside them; they stay initializers.
        bn: the mode of BatchNormalization; what the model says by default.
        optimizer: where given, the fused step graph is built as well.
        proximal: whether that has the proximal term of federated learning.

    """
    parts = _Parts(model, list(outputs), list(trainable), list(frozen), bn, proximal)
    training, statistics, tensors = parts.training()
    return TrainingGraphs(
        training=training,
        evaluation=parts.evaluation(statistics),
        trainable=[tensors[n] for n in tensors if n in set(trainable)],
        frozen=[tensors[n] for n in tensors if n not in set(trainable)],
        statistics=statistics,
        step=None if optimizer is None else parts.step(optimizer),
    )


@dataclass(frozen=True)
class _Parts:
    model: onnx.ModelProto | str | os.PathLike[str]
    outputs: list[str]
    wanted: list[str]
    frozen: list[str]
    bn: BatchNormMode | None
    proximal: bool = False

    def training(self) -> tuple[onnx.ModelProto, list[str], dict[str, onnx.TensorProto]]:
        """Loss and accumulated gradients, with the roles of the initializers."""
        made, targets, statistics = self._differentiable()
        graph = made.graph
        tensors = _stored(graph, [*self.wanted, *self.frozen, *statistics])
        _promote(graph, [*self.wanted, *statistics])
        op, gradients = self._gradients(made, targets)
        buffers = []
        for target in targets:
            buffer = op.type_as(ir.Value(name=op.names.fresh(f"{target.name}{BUFFER}")), target)
            buffers.append(buffer)
        graph.inputs.extend(buffers)
        reset = ir.Value(name=LAZY_RESET)
        reset.dtype, reset.shape = ir.DataType.BOOL, ir.Shape([1])
        graph.inputs.append(reset)
        op.scope = "accumulation"
        overwrite = op.squeeze(reset, [0])
        updates = graph.outputs[len(self.outputs) :]
        del graph.outputs[len(self.outputs) :]
        for target, buffer in zip(targets, buffers, strict=True):
            gradient = gradients[target]
            total = op.Where(overwrite, gradient, op.Add(buffer, gradient))
            total.name = f"{target.name}{ACCUMULATED}"
            graph.outputs.append(op.type_as(total, target))
        graph.outputs.extend(updates)
        seed_random_nodes(op, graph)
        return _finish(made), statistics, tensors

    def step(self, optimizer: Optimizer) -> onnx.ModelProto:
        """Loss, and what the optimizer makes of the gradients, in one graph."""
        # The optimizers import this file.
        from onnxtrain.onnxblock.optim import add_proximal, order_updates, write_update

        made, targets, statistics = self._differentiable()
        graph = made.graph
        # An input may have a gradient, but no optimizer changes it.
        targets = [value for value in targets if not value.is_graph_input()]
        _promote(graph, [*self.wanted, *statistics])
        op, gradients = self._gradients(made, targets)
        updates = graph.outputs[len(self.outputs) :]
        del graph.outputs[len(self.outputs) :]
        if self.proximal:
            gradients = add_proximal(op, graph, gradients)
        ordered = order_updates(op, graph, gradients)
        graph.outputs.extend(write_update(op, graph, optimizer, targets, ordered, in_pieces=True))
        graph.outputs.extend(updates)
        seed_random_nodes(op, graph)
        return _finish(made)

    def evaluation(self, statistics: Sequence[str]) -> onnx.ModelProto:
        """The loss alone, with everything in inference mode."""
        made = prepare(self.model, "frozen")
        _choose_outputs(made.graph, self.outputs)
        _stop_dropout(made.graph)
        _promote(made.graph, [*self.wanted, *statistics])
        return _finish(made)

    def _differentiable(self) -> tuple[ir.Model, list[ir.Value], list[str]]:
        made = prepare(self.model, self.bn, keep_statistics=True)
        join_linear_layers(made)
        graph = made.graph
        statistics = [v.name[: -len(UPDATED)] for v in graph.outputs
                      if v.name and v.name.endswith(UPDATED)
                      and v.name[: -len(UPDATED)] in graph.initializers]  # fmt: skip
        updates = [v for v in graph.outputs if v.name in {f"{s}{UPDATED}" for s in statistics}]
        _choose_outputs(graph, self.outputs)
        graph.outputs.extend(updates)
        targets = _targets(graph, self.wanted, statistics)
        return made, targets, statistics

    def _gradients(
        self, made: ir.Model, targets: Sequence[ir.Value]
    ) -> tuple[Ops, dict[ir.Value, ir.Value]]:
        graph, loss = made.graph, made.graph.outputs[0]
        _require_scalar(loss)

        def path() -> ActivePath:
            return ActivePath(list(graph), targets, [loss], made.opset_imports[""])

        expand_by_definition(made, path)
        lost = path().lost()
        if lost:
            names = ", ".join(repr(v.name) for v in lost)
            raise NotDifferentiableError(
                f"the loss {loss.name!r} does not depend on {names} in a way that has a gradient: "
                "leave it out of requires_grad, or freeze it"
            )
        op = Ops(graph, made.opset_imports[""])
        seed = op.full_like(loss, 1.0)
        found = differentiate(op, list(graph), {loss: seed}, targets)
        with op.arithmetic():
            return op, {
                v: op.zeros_like(v) if (gradient := found[v]) is None else gradient for v in targets
            }


def _stored(graph: ir.Graph, names: Sequence[str]) -> dict[str, onnx.TensorProto]:
    """Return the tensors of initializers, in the order of the graph."""
    wanted = set(names)
    result = {}
    for name, value in graph.initializers.items():
        if name in wanted and value.const_value is not None:
            proto = ir.to_proto(value.const_value)
            proto.name = name
            result[name] = proto
    return result


def _targets(graph: ir.Graph, names: Sequence[str], statistics: Sequence[str]) -> list[ir.Value]:
    inputs = {v.name: v for v in graph.inputs}
    running = set(statistics)
    targets = []
    for name in dict.fromkeys(names):
        value = graph.initializers.get(name) or inputs.get(name)
        if value is None:
            raise UnknownNameError(
                f"requires_grad names {name!r}, which is neither an initializer nor an input of "
                "the model"
            )
        if name in running:
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


def _promote(graph: ir.Graph, names: Sequence[str]) -> None:
    """Turn initializers that training changes into inputs of the graph."""
    wanted = set(names)
    for name in [n for n in graph.initializers if n in wanted]:
        value = graph.initializers.pop(name)
        value.const_value = None
        if not value.is_graph_input():
            graph.inputs.append(value)


def _choose_outputs(graph: ir.Graph, names: Sequence[str]) -> None:
    values = {v.name: v for v in (*graph.inputs, *graph.initializers.values())}
    values.update((v.name, v) for node in graph for v in node.outputs)
    unknown = [n for n in names if n not in values]
    if unknown:
        raise UnknownNameError(
            f"the model has no value {', '.join(map(repr, unknown))} to give out"
        )
    graph.outputs.clear()
    graph.outputs.extend(values[n] for n in names)


def _stop_dropout(graph: ir.Graph) -> None:
    for node in graph.all_nodes():
        if node.op_type == "Dropout" and node.domain == "" and len(node.inputs) > 2:
            node.replace_input_with(2, None)


def _require_scalar(loss: ir.Value) -> None:
    dims = dims_of(loss)
    if not is_float(loss):
        raise NotDifferentiableError(f"the loss {loss.name!r} is of type {loss.dtype}, not a float")
    if dims is None or any(d != 1 for d in dims):
        raise NotDifferentiableError(
            f"the loss {loss.name!r} has the shape {loss.shape}; training needs a single number: "
            "reduce it to its mean or sum (reduction='mean')"
        )


def _finish(made: ir.Model) -> onnx.ModelProto:
    sweep(made.graph)
    stamp(made)
    proto: onnx.ModelProto = ir.to_proto(made)
    return proto
