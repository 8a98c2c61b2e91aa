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
from typing import Literal

import onnx
import onnx_ir as ir

import onnxtrain.offline.autodiff.rules  # noqa: F401  (registers the rules)
from onnxtrain.errors import NotDifferentiableError, UnknownNameError
from onnxtrain.format.names import ACCUMULATED, BUFFER, LAZY_RESET, RANDOM_SEED, UPDATED
from onnxtrain.offline.autodiff.engine import ActivePath, differentiate
from onnxtrain.offline.autodiff.expand import expand_by_definition
from onnxtrain.offline.frontend.canonical_model import BatchNormMode, prepare
from onnxtrain.offline.graph.emit import stamp, sweep
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import dims_of, is_float
from onnxtrain.offline.optimizers import Optimizer, add_proximal, write_update
from onnxtrain.offline.passes.batch_norm_statistics import join_statistics
from onnxtrain.offline.passes.counter_rng import seed_random_nodes
from onnxtrain.offline.passes.linear_layers import join_linear_layers
from onnxtrain.offline.passes.remat.rewrite import Recomputation
from onnxtrain.offline.passes.webgpu import rewrite_for_webgpu

Target = Literal["cpu", "webgpu"]


@dataclass
class TrainingGraphs:
    """What `build_training_graphs` returns."""

    training: onnx.ModelProto
    evaluation: onnx.ModelProto
    trainable: list[onnx.TensorProto]
    frozen: list[onnx.TensorProto]
    statistics: list[str] = field(default_factory=list)
    step: onnx.ModelProto | None = None
    forward: frozenset[str] = frozenset()  # the values that are not of the gradients
    data: frozenset[str] = frozenset()  # the inputs that are not parameters


def build_training_graphs(
    model: onnx.ModelProto | str | os.PathLike[str],
    outputs: Sequence[str],
    trainable: Sequence[str],
    frozen: Sequence[str] = (),
    *,
    bn: BatchNormMode | None = None,
    optimizer: Optimizer | None = None,
    recompute: Recomputation | None = None,
    lean: bool = False,
    target: Target = "cpu",
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
        recompute: what of the forward pass is not kept, but computed again; nothing by default.
        lean: whether gradients are written so that they take little memory, if more time.
        target: what the graphs are to run on. Those for "webgpu" have operators that it covers,
            and do not let the memory of a parameter take its update.
        proximal: whether the step has the proximal term of federated learning.

    """
    parts = _Parts(
        model, list(outputs), list(trainable), list(frozen), bn, recompute, lean, target, proximal
    )
    training, statistics, tensors = parts.training()
    return TrainingGraphs(
        training=training,
        evaluation=parts.evaluation(statistics),
        trainable=[tensors[n] for n in tensors if n in set(trainable)],
        frozen=[tensors[n] for n in tensors if n not in set(trainable)],
        statistics=statistics,
        step=None if optimizer is None else parts.step(optimizer),
        forward=frozenset(parts.forward),
        data=frozenset({*parts.data, RANDOM_SEED}),
    )


@dataclass(frozen=True)
class _Parts:
    model: onnx.ModelProto | str | os.PathLike[str]
    outputs: list[str]
    wanted: list[str]
    frozen: list[str]
    bn: BatchNormMode | None
    recompute: Recomputation | None
    lean: bool
    target: Target
    proximal: bool
    forward: set[str] = field(default_factory=set)
    data: set[str] = field(default_factory=set)

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
        join_statistics(op, graph)
        updates = graph.outputs[len(self.outputs) :]
        del graph.outputs[len(self.outputs) :]
        buffer_of = dict(zip(targets, buffers, strict=True))
        totals = {}
        for target, gradient in _first_ones_last(graph, gradients).items():
            total = op.Where(overwrite, gradient, op.Add(buffer_of[target], gradient))
            total.name = f"{target.name}{ACCUMULATED}"
            totals[target] = op.type_as(total, target)
        graph.outputs.extend(totals[target] for target in targets)
        graph.outputs.extend(updates)
        seed_random_nodes(op, graph)
        _seed_last(graph)
        return self._finish(made), statistics, tensors

    def step(self, optimizer: Optimizer) -> onnx.ModelProto:
        """Loss, and what the optimizer makes of the gradients, in one graph."""
        made, targets, statistics = self._differentiable()
        graph = made.graph
        # An input may have a gradient, but no optimizer changes it.
        targets = [value for value in targets if not value.is_graph_input()]
        _promote(graph, [*self.wanted, *statistics])
        op, gradients = self._gradients(made, targets)
        join_statistics(op, graph)
        updates = graph.outputs[len(self.outputs) :]
        del graph.outputs[len(self.outputs) :]
        ordered, in_place = _first_ones_last(graph, gradients), self.target == "cpu"
        if self.proximal:
            ordered = add_proximal(op, graph, ordered)
        graph.outputs.extend(
            write_update(
                op, graph, optimizer, targets, ordered, chunked=in_place, in_place=in_place
            )
        )
        graph.outputs.extend(updates)
        seed_random_nodes(op, graph)
        _seed_last(graph)
        return self._finish(made)

    def evaluation(self, statistics: Sequence[str]) -> onnx.ModelProto:
        """The loss alone, with everything in inference mode."""
        made = prepare(self.model, "frozen")
        _choose_outputs(made.graph, self.outputs)
        _stop_dropout(made.graph)
        _promote(made.graph, [*self.wanted, *statistics])
        return self._finish(made)

    def _finish(self, made: ir.Model) -> onnx.ModelProto:
        if self.target == "webgpu":
            rewrite_for_webgpu(made)
        return finished(made)

    def _differentiable(self) -> tuple[ir.Model, list[ir.Value], list[str]]:
        made = prepare(self.model, self.bn, keep_statistics=True)
        join_linear_layers(made)
        graph = made.graph
        self.data.update(str(v.name) for v in graph.inputs if v.name not in graph.initializers)
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
        op.lean = self.lean
        self.forward.update(v.name for node in graph for v in node.outputs if v.name)
        seed = op.full_like(loss, 1.0)
        found = differentiate(op, list(graph), {loss: seed}, targets, finite_seeds=True)
        with op.arithmetic():
            gradients = {
                v: op.zeros_like(v) if (gradient := found[v]) is None else gradient for v in targets
            }
        if self.recompute is not None:
            seed_random_nodes(op, graph)  # a copy of what draws has to draw the same
            data = {*self.data, RANDOM_SEED}
            op = self.recompute.write(op, graph, gradients, self.forward, data)
        return op, gradients


def _first_ones_last(
    graph: ir.Graph, gradients: dict[ir.Value, ir.Value]
) -> dict[ir.Value, ir.Value]:
    """Sort gradients so that those which are computed first come last.

    onnxruntime begins with what is last in the file. A gradient that is used up at once takes no
    memory while the others are computed, nor does what it is computed from.
    """
    place = {node: i for i, node in enumerate(graph)}
    when = {p: place.get(g.producer(), -1) for p, g in gradients.items()}  # type: ignore[arg-type]
    return {p: gradients[p] for p in sorted(gradients, key=lambda p: -when[p])}


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


def _seed_last(graph: ir.Graph) -> None:
    """Keep the place of the seed behind all other inputs, whenever it was written."""
    seed = next((v for v in graph.inputs if v.name == RANDOM_SEED), None)
    if seed is not None:
        graph.inputs.remove(seed)
        graph.inputs.append(seed)


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


def finished(made: ir.Model) -> onnx.ModelProto:
    """Return a model without what nobody needs, stamped with the lowest versions."""
    sweep(made.graph)
    stamp(made)
    proto: onnx.ModelProto = ir.to_proto(made)
    return proto
