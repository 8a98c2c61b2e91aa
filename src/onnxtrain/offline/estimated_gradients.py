"""Gradients, or an estimate of them where the optimizer does without: two forward passes.

The estimate is a model that computes the loss twice, at p + eps·z and at p − eps·z for a random
direction z (`optimizers/mezo.py`). Their difference g is the slope of the loss along z, and g·z
stands for the gradient. What does not depend on the parameters is computed once.

A moved parameter exists only while it is needed: it is made when the other input of its layer is
known, and released behind the layer. So a pass takes the memory of inference and of one layer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import onnx_ir as ir

from onnxtrain.errors import ArgumentError, NotDifferentiableError
from onnxtrain.format.names import RANDOM_SEED
from onnxtrain.offline.graph.copy_graph import copy_node
from onnxtrain.offline.graph.kernels import forget_kernel
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import static_dims, working_type
from onnxtrain.offline.graph.subgraphs import captured_values
from onnxtrain.offline.graph.sweep import sweep
from onnxtrain.offline.loss_gradients import LossGradients, differentiate_loss
from onnxtrain.offline.loss_model import loss_model
from onnxtrain.offline.optimizers import Optimizer
from onnxtrain.offline.optimizers.directions import Directions, number_for
from onnxtrain.offline.optimizers.mezo import MeZO
from onnxtrain.offline.passes.batch_norm import BatchNormMode
from onnxtrain.offline.passes.counter_rng import (
    seed_input,
    seed_random_bodies,
    seed_random_nodes,
)
from onnxtrain.offline.passes.late_expansion import expand_late
from onnxtrain.offline.passes.quantized_tables import look_up_integers

# A moved parameter of fewer elements is made whenever onnxruntime likes to.
_LARGE = 1 << 14


def loss_gradients(
    canonical: ir.Model,
    outputs: Sequence[str],
    trainable: Sequence[str],
    frozen: Sequence[str],
    optimizer: Optimizer | None,
    *,
    bn: BatchNormMode | None = None,
    lean: bool = False,
    on_gpu: bool = False,
) -> LossGradients:
    """Return the model with the gradients that an optimizer needs, exact ones or an estimate."""
    if isinstance(optimizer, MeZO):
        return estimate_gradients(canonical, outputs, trainable, frozen, optimizer, bn=bn)
    return differentiate_loss(
        canonical, outputs, trainable, frozen, bn=bn, lean=lean, on_gpu=on_gpu
    )


def estimate_gradients(
    canonical: ir.Model,
    outputs: Sequence[str],
    trainable: Sequence[str],
    frozen: Sequence[str],
    optimizer: MeZO,
    *,
    bn: BatchNormMode | None = None,
) -> LossGradients:
    """Write two forward passes, and what they say about the gradient of the first output.

    The loss is the mean of both; other outputs and running statistics are those of the first pass.
    """
    start = loss_model(canonical, outputs, trainable, frozen, bn=bn)
    if start.fed:
        raise ArgumentError(
            f"{', '.join(map(repr, sorted(start.fed)))} is an input: MeZO has no gradients for "
            "inputs, it trains parameters"
        )
    graph, targets = start.model.graph, start.targets
    forget_kernel(graph.all_nodes())
    op = Ops(graph, start.model.opset_imports[""])
    seed_random_bodies(op, graph)
    look_up_integers(op, graph)
    seed_random_nodes(op, graph)
    op = Ops(graph, op.opset, op.names)
    directions = Directions(op, seed_input(op, graph), targets, optimizer.distribution)
    epsilon = optimizer.epsilon
    original = list(start.updates.values())
    forth = _Pass(op, directions, targets, graph, epsilon)
    wanted = [*graph.outputs, *original]
    moved = forth.copy(wanted)
    _require_dependence(targets, forth.dependent, start.loss)
    back = _Pass(op, directions, targets, graph, -epsilon).copy([start.loss])
    op.scope = "slope"
    losses = [op.reshape(op.cast(v, working_type(v)), []) for v in (moved[0], back[0])]
    slope = op.Mul(op.Sub(*losses), 0.5 / epsilon)
    mean = op.cast(op.Mul(op.Add(*losses), 0.5), start.loss.dtype)
    results = [op.reshape_like(mean, start.loss), *moved[1:]]
    count = len(graph.outputs)
    for old, new in zip(wanted, results, strict=True):
        if new is not old:
            name, old.name = old.name, op.names.fresh(f"{old.name}_unmoved")
            new.name = name
    graph.outputs.clear()
    graph.outputs.extend(results[:count])
    gradients = {}
    for p in targets:
        op.scope = f"{p.name}_grad"
        (made,), _ = directions.along(p, number_for(op, slope, p), (), lambda z: (z,))
        made = op.cast(op.reshape_like(made, p), p.dtype)
        gradients[str(p.name)] = op.type_as(made, p)
    updates = dict(zip(start.updates, results[count:], strict=True))
    kept = [slope, *gradients.values(), *updates.values()]
    sweep(graph, keep=kept)
    forward = {v.name for node in graph for v in node.outputs if v.name}
    forward |= expand_late(op, graph, forward, kept)
    return LossGradients(
        start.model,
        {name: str(gradient.name) for name, gradient in gradients.items()},
        {name: str(value.name) for name, value in updates.items()},
        start.tensors,
        frozenset(forward),
        frozenset({*start.data, RANDOM_SEED}),
        start.fed,
        str(slope.name),
    )


def _require_dependence(
    targets: Sequence[ir.Value], dependent: Mapping[ir.Value, object], loss: ir.Value
) -> None:
    lost = [repr(p.name) for p in targets if p not in dependent]
    if lost:
        raise NotDifferentiableError(
            f"the loss {loss.name!r} does not depend on {', '.join(lost)}: leave it out of train, "
            "or freeze it"
        )


class _Pass:
    """A forward pass with all parameters moved along their directions, by a number."""

    def __init__(
        self,
        op: Ops,
        directions: Directions,
        parameters: Sequence[ir.Value],
        graph: ir.Graph,
        by: float,
    ) -> None:
        self._op, self._directions, self._by = op, directions, by
        self._parameters = set(parameters)
        self._copies: dict[ir.Value, ir.Value] = {}
        fed = {v for v in graph.inputs if v not in self._parameters}
        # What changes with the parameters, and what changes with the data.
        self._moves = _descendants(graph, self._parameters)
        self._varies = _descendants(graph, fed)
        self._nodes = [n for n in graph if any(v in self._moves for v in n.outputs)]

    @property
    def dependent(self) -> Mapping[ir.Value, ir.Value]:
        """What became of the parameters that were needed, and of the values behind them."""
        return self._copies

    def copy(self, wanted: Sequence[ir.Value]) -> list[ir.Value]:
        """Write the pass; return what became of values."""
        needed = _needed(self._nodes, wanted)
        for node in self._nodes:
            # What is computed from parameters alone waits for the layer that it is used in.
            if node in needed and any(v in self._varies for v in _reads(node)):
                self._copy_node(node, self._other_input(node))
        for value in wanted:
            self._provide(value, None)
        return [self._copies.get(value, value) for value in wanted]

    def _other_input(self, node: ir.Node) -> ir.Value | None:
        """Return what the copy of a node reads beside parameters, if a node computes it."""
        for value in _reads(node):
            now = self._copies.get(value, value)
            is_text = value.dtype == ir.DataType.STRING
            if value in self._varies and now.producer() is not None and not is_text:
                return now
        return None

    def _provide(self, value: ir.Value, behind: ir.Value | None) -> None:
        """Make the copy of a value that depends on parameters."""
        if value not in self._moves or value in self._copies:
            return
        if value in self._parameters:
            self._copies[value] = self._moved(value, behind)
        elif (producer := value.producer()) is not None:
            self._copy_node(producer, behind)

    def _copy_node(self, node: ir.Node, behind: ir.Value | None) -> None:
        for value in _reads(node):
            self._provide(value, behind)
        self._op.target.append(copy_node(node, self._copies, self._op.names))

    def _moved(self, parameter: ir.Value, behind: ir.Value | None) -> ir.Value:
        op = self._op
        op.scope = f"moved/{parameter.name}"
        elements = math.prod(static_dims(parameter) or ())
        by = op.const(self._by, working_type(parameter))
        (made,), _ = self._directions.along(
            parameter,
            by,
            (parameter,),
            lambda z, p: (op.Add(p, op.cast(z, p.dtype)),),
            behind if elements >= _LARGE else None,
        )
        return op.type_as(op.reshape_like(made, parameter), parameter)


def _reads(node: ir.Node) -> list[ir.Value]:
    """Return what a node, or a body of it, reads."""
    return [v for v in (*node.inputs, *captured_values(node)) if v is not None]


def _descendants(graph: ir.Graph, values: Collection[ir.Value]) -> set[ir.Value]:
    """Return values and what is computed from them."""
    found = set(values)
    for node in graph:
        if any(v in found for v in _reads(node)):
            found.update(node.outputs)
    return found


def _needed(nodes: Sequence[ir.Node], wanted: Sequence[ir.Value]) -> set[ir.Node]:
    """Return the nodes that values depend on."""
    values, found = set(wanted), set[ir.Node]()
    for node in reversed(nodes):
        if any(v in values for v in node.outputs):
            found.add(node)
            values.update(_reads(node))
    return found
