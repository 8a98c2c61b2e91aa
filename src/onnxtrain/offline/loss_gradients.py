"""A model differentiated once: the gradients that all graphs of training are copies of."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

import onnxtrain.offline.autodiff.rules  # noqa: F401  (registers the rules)
from onnxtrain.errors import ArgumentError, NotDifferentiableError
from onnxtrain.format.names import RANDOM_SEED
from onnxtrain.offline.autodiff.engine import ActivePath, differentiate
from onnxtrain.offline.autodiff.expand import expand_by_definition
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.sweep import sweep
from onnxtrain.offline.loss_model import (
    Tensors,
    loss_model,
    values_by_name,
)
from onnxtrain.offline.passes.attention import join_attention
from onnxtrain.offline.passes.batch_norm import (
    BatchNormMode,
    join_statistics,
)
from onnxtrain.offline.passes.chunked_loss import chunk_losses
from onnxtrain.offline.passes.counter_rng import seed_random_bodies, seed_random_nodes
from onnxtrain.offline.passes.formulas import join_formulas
from onnxtrain.offline.passes.late_expansion import expand_late
from onnxtrain.offline.passes.quantize.gradient import join_quantizers
from onnxtrain.offline.passes.quantized_tables import look_up_integers
from onnxtrain.offline.passes.remat.rewrite import rematerialize
from onnxtrain.offline.passes.sparse.gradient import join_sparse


@dataclass(frozen=True)
class LossGradients:
    """A model that computes a loss and its gradients; values go by their names."""

    model: ir.Model  # its outputs are those that were asked for
    gradients: dict[str, str]  # by the name of the target
    updates: dict[str, str]  # by the name of the running statistic
    tensors: Tensors  # of parameters and statistics, in the order of the model
    forward: frozenset[str]  # the values of the forward pass
    data: frozenset[str]  # the inputs that are not parameters
    fed: frozenset[str]  # the targets that are inputs: they have gradients, but no updates
    slope: str | None = None  # of an estimate: how the loss changes along a random direction

    @property
    def described(self) -> str:
        """The graph that says how much memory a step takes: estimates need not exist as a whole."""
        return "training_model" if self.slope is None else "step_model"

    def rematerialized(
        self, kept: Collection[str], sizes: Mapping[str, int]
    ) -> tuple[LossGradients, dict[str, str]]:
        """Return a copy whose backward pass computes again what is not kept, and what it copies."""
        if self.slope is not None:
            raise ArgumentError(
                "memory_budget is smaller than what MeZO takes, which keeps nothing of the forward "
                "pass that could be computed again: leave memory_budget out"
            )
        made = GradientCopy.of(self, join=False)
        results = [*made.gradients.values(), *made.updates.values()]
        copies = rematerialize(made.op, results, self.forward, self.data, kept, sizes)
        return replace(self, model=made.model), copies


@dataclass
class GradientCopy:
    """A copy of a differentiated model, ready for what comes behind the gradients."""

    model: ir.Model
    op: Ops
    gradients: dict[ir.Value, ir.Value]
    updates: dict[ir.Value, ir.Value]  # of running statistics

    @staticmethod
    def of(
        source: LossGradients, *, join: bool = True, last: bool = False, on_gpu: bool = False
    ) -> GradientCopy:
        """Copy a model, or take it as it is where this is its last use."""
        model = source.model if last else source.model.clone()
        values = values_by_name(model.graph)
        op = Ops(model.graph, model.opset_imports[""])
        op.on_gpu = on_gpu
        gradients = {values[target]: values[name] for target, name in source.gradients.items()}
        made = [values[name] for name in source.updates.values()]
        updates = join_statistics(op, made) if join else made
        statistics = dict(zip((values[name] for name in source.updates), updates, strict=True))
        return GradientCopy(model, op, gradients, statistics)

    def in_order(self) -> dict[ir.Value, ir.Value]:
        """Return the gradients so that those which are computed first come last.

        onnxruntime begins with what is last in the file. A gradient that is used up at once takes
        no memory while the others are computed, nor does what it is computed from.
        """
        place = {node: i for i, node in enumerate(self.model.graph)}
        when = {p: place.get(g.producer(), -1) for p, g in self.gradients.items()}  # type: ignore[arg-type]
        return {p: self.gradients[p] for p in sorted(when, key=lambda p: -when[p])}


def differentiate_loss(
    canonical: ir.Model,
    outputs: Sequence[str],
    trainable: Sequence[str],
    frozen: Sequence[str] = (),
    *,
    bn: BatchNormMode | None = None,
    lean: bool = False,
    on_gpu: bool = False,
) -> LossGradients:
    """Differentiate the first output with respect to what trains, in a copy of the model.

    `lean` prefers gradients that take little memory, if more time; `on_gpu` those of few nodes.
    """
    start = loss_model(canonical, outputs, trainable, frozen, bn=bn)
    model, targets, updates = start.model, start.targets, start.updates
    graph, loss = model.graph, start.loss
    _require_gradient(model, targets, loss)
    op = Ops(graph, model.opset_imports[""])
    op.lean, op.on_gpu = lean, on_gpu
    seed_random_bodies(op, graph)
    look_up_integers(op, graph)
    losses = chunk_losses(op, graph, targets, gradient=True)
    quantizers = join_quantizers(op, graph, targets)
    forward = {v.name for node in graph for v in node.outputs if v.name}
    seed = op.full_like(loss, 1.0)
    rules = {
        **join_formulas(graph, [*targets, loss]),
        **join_attention(op, graph, [loss], targets),
        **join_sparse(op, graph, targets),
        **quantizers,
        **losses,
    }
    nodes = list(graph)
    found = differentiate(op, nodes, {loss: seed}, targets, rules=rules, finite_seeds=True)
    with op.arithmetic():
        gradients = {v: g if (g := found[v]) is not None else op.zeros_like(v) for v in targets}
    results = [*gradients.values(), *updates.values()]
    sweep(graph, keep=results)
    forward |= expand_late(op, graph, forward, results)
    seed_random_nodes(op, graph)
    return LossGradients(
        model,
        {str(v.name): str(gradient.name) for v, gradient in gradients.items()},
        {name: str(value.name) for name, value in updates.items()},
        start.tensors,
        frozenset(forward),
        frozenset({*start.data, RANDOM_SEED}),
        start.fed,
    )


def _require_gradient(model: ir.Model, targets: Sequence[ir.Value], loss: ir.Value) -> None:
    """Expand operators without a rule, and refuse targets that the loss does not depend on."""

    def path() -> ActivePath:
        return ActivePath(list(model.graph), targets, [loss], model.opset_imports[""])

    expand_by_definition(model, path)
    lost = path().lost()
    if lost:
        names = ", ".join(repr(v.name) for v in lost)
        raise NotDifferentiableError(
            f"the loss {loss.name!r} does not depend on {names} in a way that has a gradient: "
            "leave it out of requires_grad, or freeze it"
        )
