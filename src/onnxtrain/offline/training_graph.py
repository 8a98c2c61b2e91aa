"""The graphs of training, made from one canonical model that computes a loss.

All have the same inputs: what the user feeds, then the values that training changes. Parameters
that do not change stay initializers, which lets onnxruntime treat them as constants.

- the *training* graph computes the loss and adds its gradients to buffers,
- the *step* graph computes the loss, the gradients and the updated parameters in one run,
- the *evaluation* graph computes the loss with everything in inference mode.

The model is differentiated once (`differentiate_loss`); the training and the step graph are copies
of the result, each with what comes behind the gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import onnx
import onnx_ir as ir

import onnxtrain.offline.autodiff.rules  # noqa: F401  (registers the rules)
from onnxtrain.errors import ArgumentError, NotDifferentiableError
from onnxtrain.format.names import ACCUMULATED, BUFFER, GRADIENT, LAZY_RESET, RANDOM_SEED
from onnxtrain.offline.autodiff.engine import ActivePath, differentiate
from onnxtrain.offline.autodiff.expand import expand_by_definition
from onnxtrain.offline.frontend.canonical_model import canonical_model
from onnxtrain.offline.frontend.fused import expand_trained
from onnxtrain.offline.frontend.load import ModelLike
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.sweep import sweep
from onnxtrain.offline.loss_model import (
    Tensors,
    choose_outputs,
    loss_model,
    promote,
    values_by_name,
)
from onnxtrain.offline.optimizers import Optimizer, add_proximal, write_optimizer, write_update
from onnxtrain.offline.optimizers.accumulation import accumulate
from onnxtrain.offline.optimizers.finite_guard import (
    check_finite,
    early_check,
    guarded_updates,
    plain_sum,
    update_if,
)
from onnxtrain.offline.optimizers.in_place import after_readers, steady_row
from onnxtrain.offline.optimizers.late_gradients import late_gradients
from onnxtrain.offline.optimizers.mezo import MeZO
from onnxtrain.offline.passes.attention import join_attention
from onnxtrain.offline.passes.batch_norm import (
    BatchNormMode,
    join_statistics,
    set_batch_norm_mode,
)
from onnxtrain.offline.passes.chunked_loss import chunk_losses
from onnxtrain.offline.passes.counter_rng import seed_random_bodies, seed_random_nodes
from onnxtrain.offline.passes.cuda import rewrite_for_cuda
from onnxtrain.offline.passes.formulas import join_formulas
from onnxtrain.offline.passes.late_expansion import expand_late
from onnxtrain.offline.passes.quantize.biases import quantize_biases
from onnxtrain.offline.passes.quantize.gradient import join_quantizers
from onnxtrain.offline.passes.quantized_tables import look_up_integers
from onnxtrain.offline.passes.remat.rewrite import rematerialize
from onnxtrain.offline.passes.sparse.gradient import join_sparse
from onnxtrain.offline.passes.webgpu import rewrite_for_webgpu
from onnxtrain.offline.writer.functions import write_functions
from onnxtrain.offline.writer.opset_stamp import stamp

Target = Literal["cpu", "cuda", "webgpu"]
FOLDED = "folded"  # in the meta of an evaluation graph


@dataclass
class TrainingGraphs:
    """The graphs, and the tensors that the checkpoint holds."""

    training: onnx.ModelProto
    evaluation: onnx.ModelProto
    trainable: Tensors
    frozen: Tensors


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
        made = _Copy.of(self, join=False)
        results = [*made.gradients.values(), *made.updates.values()]
        copies = rematerialize(made.op, results, self.forward, self.data, kept, sizes)
        return replace(self, model=made.model), copies


def build_training_graphs(
    model: ModelLike, outputs: Sequence[str], trainable: Sequence[str], frozen: Sequence[str] = ()
) -> TrainingGraphs:
    """Build the training and the evaluation graph of a model that computes a loss.

    Args:
        model: forward pass and loss; it is not changed.
        outputs: the values to return; the first is the loss.
        trainable: what to differentiate with respect to: initializers, or inputs of the graph.
        frozen: initializers to list beside them; they stay initializers.

    """
    canonical = canonical_model(model, located=True)
    found = differentiate_loss(canonical, outputs, trainable, frozen)
    return TrainingGraphs(
        _proto(training_graph(found)),
        _proto(evaluation_graph(canonical, outputs, found)),
        {n: t for n, t in found.tensors.items() if n in trainable},
        {n: t for n, t in found.tensors.items() if n not in trainable},
    )


def _proto(model: ir.Model) -> onnx.ModelProto:
    write_functions(model, native=False)
    stamp(model)
    return ir.to_proto(model)


# ---- differentiation -----------------------------------------------------------------------------


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


# ---- what comes behind the gradients -------------------------------------------------------------


@dataclass
class _Copy:
    """A copy of a differentiated model, ready for what comes behind the gradients."""

    model: ir.Model
    op: Ops
    gradients: dict[ir.Value, ir.Value]
    updates: dict[ir.Value, ir.Value]  # of running statistics

    @staticmethod
    def of(
        source: LossGradients, *, join: bool = True, last: bool = False, on_gpu: bool = False
    ) -> _Copy:
        """Copy a model, or take it as it is where this is its last use."""
        model = source.model if last else source.model.clone()
        values = values_by_name(model.graph)
        op = Ops(model.graph, model.opset_imports[""])
        op.on_gpu = on_gpu
        gradients = {values[target]: values[name] for target, name in source.gradients.items()}
        made = [values[name] for name in source.updates.values()]
        updates = join_statistics(op, made) if join else made
        statistics = dict(zip((values[name] for name in source.updates), updates, strict=True))
        return _Copy(model, op, gradients, statistics)

    def in_order(self) -> dict[ir.Value, ir.Value]:
        """Return the gradients so that those which are computed first come last.

        onnxruntime begins with what is last in the file. A gradient that is used up at once takes
        no memory while the others are computed, nor does what it is computed from.
        """
        place = {node: i for i, node in enumerate(self.model.graph)}
        when = {p: place.get(g.producer(), -1) for p, g in self.gradients.items()}  # type: ignore[arg-type]
        return {p: self.gradients[p] for p in sorted(when, key=lambda p: -when[p])}


def training_graph(
    source: LossGradients,
    target: Target = "cpu",
    optimizer: Optimizer | None = None,
    *,
    early: bool = False,
) -> ir.Model:
    """Return the graph that adds the gradients to buffers, or overwrites them on lazy reset.

    Nothing changes if the loss or a gradient is not finite, by the check of the optimizer, which
    need not repeat it. With `early`, gradients do not wait for each other: one is added if the loss
    and the gradients so far are finite.
    """
    own = _Copy.of(source, on_gpu=target == "cuda")
    early &= target == "cpu"
    op, graph = own.op, own.model.graph
    op.scope = "accumulation"
    bounded = {}
    if target == "cpu" and not early and (optimizer is None or optimizer.reads_one_gradient):
        gradients, written = own.in_order(), [*own.gradients, *own.updates]
        bounded = {p: g.factors for p, g in late_gradients(graph, gradients, written).items()}
    if target == "cpu":
        _name_gradients(own, source.fed)
    buffers = {
        v: op.type_as(ir.Value(name=op.names.fresh(f"{v.name}{BUFFER}")), v) for v in own.gradients
    }
    reset = ir.Value(name=LAZY_RESET)
    reset.dtype, reset.shape = ir.DataType.BOOL, ir.Shape([1])
    graph.inputs.extend([*buffers.values(), reset])
    loss, statistics = graph.outputs[0], list(own.updates.values())
    order, targets = own.in_order(), list(own.gradients)
    sum_of = plain_sum if optimizer is None or optimizer.reads_sums else optimizer.sum_of
    check = check_finite(
        op, order, targets, loss, statistics,
        sum_of=sum_of, early=early, factors=bounded, are_computed=True,
    )  # fmt: skip
    gradients = dict(own.gradients)

    def write(*parameters: ir.Value) -> list[ir.Value]:
        pairs = [(buffers[v], op.reshape_like(gradients[v], v)) for v in parameters]
        made = accumulate(op, reset, pairs, branches=target == "cpu" and not early)
        for v, total in zip(parameters, made, strict=True):
            total.name = f"{v.name}{ACCUMULATED}"
            op.type_as(total, v)
        return made

    def write_all() -> list[ir.Value]:
        return [*write(*own.gradients), *statistics]

    if target == "webgpu":
        made = write_all()
    elif target == "cuda":
        passed = after_readers(op, graph, check.passed, list(own.updates))
        olds = [*buffers.values(), *own.updates]
        made = guarded_updates(op, passed, dict(zip(olds, write_all(), strict=True)))
    elif early:
        statistics_passed = early_check(op, check)
        passed = after_readers(op, graph, statistics_passed, list(own.updates), [check.sums])
        kept = update_if(op, passed, list(own.updates), lambda: statistics) if statistics else []
        totals = {
            v: update_if(op, early_check(op, check, v), [buffers[v]], partial(write, v))[0]
            for v in order
        }
        made = [*(totals[v] for v in own.gradients), *kept]
    else:
        passed = after_readers(op, graph, check.passed, list(own.updates))
        gradients = {v: steady_row(op, gradient) for v, gradient in gradients.items()}
        made = update_if(op, passed, [*buffers.values(), *own.updates], write_all)
    graph.outputs.extend([*made, *check.outputs(op)])
    return _complete(own.model, target)


def _name_gradients(own: _Copy, fed: Collection[str]) -> None:
    """Call the gradient of a parameter `<p>_grad`, so that a runtime can ask for it.

    It is a value of its own, made by a node, whose memory a runtime may choose.
    """
    op = own.op
    for v, gradient in own.gradients.items():
        name = f"{v.name}{GRADIENT}"
        if v.name in fed or op.names.fresh(name) != name:
            continue
        producer = gradient.producer()
        shared = sum(gradient is other for other in own.gradients.values()) > 1
        if producer is None or gradient.is_graph_output() or shared:
            own.gradients[v] = gradient = op.type_as(op.Identity(gradient), v)
        gradient.name = name


def step_graph(
    source: LossGradients,
    optimizer: Optimizer,
    target: Target = "cpu",
    *,
    proximal: bool = False,
    early: bool = False,
    last: bool = False,
) -> ir.Model:
    """Return the graph that computes the updated parameters from the gradients.

    With `early`, updates do not wait for all gradients, as a memory budget asks for. Where this is
    the last use of the gradients, their model becomes that graph.
    """
    own = _Copy.of(source, last=last, on_gpu=target == "cuda")
    early &= target != "cuda"
    op, graph = own.op, own.model.graph
    own.gradients = {v: g for v, g in own.gradients.items() if v.name not in source.fed}
    if source.slope and isinstance(optimizer, MeZO) and target == "cpu" and not proximal:
        slope = values_by_name(graph)[source.slope]
        graph.outputs.extend(
            optimizer.write_step(op, graph, list(own.gradients), slope, own.updates)
        )
        return _complete(own.model, target)
    gradients = own.in_order()
    if proximal:
        gradients = add_proximal(op, gradients)
    parameters, statistics = list(own.gradients), list(own.updates.values())
    late = None
    if target == "cpu" and not early and optimizer.reads_one_gradient:
        late = late_gradients(graph, gradients, [*parameters, *own.updates])
    check = optimizer.check(
        op, gradients, parameters, graph.outputs[0], statistics, early=early, late=late
    )
    updated = write_update(
        op, graph, optimizer, parameters, gradients, late=late,
        check=check, statistics=own.updates, chunked=target == "cpu", in_place=target != "webgpu",
        early=early,
    )  # fmt: skip
    graph.outputs.extend([*updated, *check.outputs(op)])
    return _complete(own.model, target)


def evaluation_graph(
    canonical: ir.Model,
    outputs: Sequence[str],
    source: LossGradients,
    target: Target = "cpu",
    *,
    folded: Sequence[str] = (),
) -> ir.Model:
    """Return the graph that computes the loss alone, with everything in inference mode.

    What is `folded` depends on parameters alone, and is constant in models for inference.
    """
    model = canonical.clone()
    expand_trained(model, source.gradients)
    set_batch_norm_mode(model, "frozen")
    choose_outputs(model.graph, outputs)
    for node in model.graph.all_nodes():
        if node.op_type == "Dropout" and node.domain == "" and len(node.inputs) > 2:
            node.replace_input_with(2, None)
    chunk_losses(Ops(model.graph, model.opset_imports[""]), model.graph, (), gradient=False)
    model.meta[FOLDED] = (*folded, *quantize_biases(model))
    promote(model.graph, [*source.gradients, *source.updates])
    return _complete(model, target)


def optimizer_graph(
    optimizer: Optimizer,
    trainable: Tensors,
    training: ir.Model,
    target: Target = "cpu",
    *,
    proximal: bool = False,
) -> ir.Model:
    """Return the optimizer as a graph of its own, of the versions of the training graph."""
    opset = training.opset_imports[""]
    graph = ir.Graph([], [], nodes=[], opset_imports={"": opset}, name="graph")
    op = Ops(graph, opset)
    op.on_gpu = target == "cuda"
    write_optimizer(
        op,
        optimizer,
        [(name, tensor.dtype, tensor.shape.numpy()) for name, tensor in trainable.items()],
        f"onnx::{type(optimizer).__name__.lower()}.updated_flag::1",
        chunked=target == "cpu",
        proximal=proximal,
        in_place=target != "webgpu",
        may_be_checked=True,
    )
    model = ir.Model(graph, ir_version=training.ir_version, producer_name="onnxtrain")
    if target != "cpu":
        stamp(_complete(model, target))
        model.ir_version = training.ir_version
    return model


def _complete(model: ir.Model, target: Target) -> ir.Model:
    """Rewrite a graph for its target, sweep it, and put the input of the seed behind the others."""
    if target == "webgpu":
        write_functions(model, native=False)
        rewrite_for_webgpu(model)
    if target == "cuda":
        rewrite_for_cuda(model)
    graph = model.graph
    sweep(graph)
    seed = next((v for v in graph.inputs if v.name == RANDOM_SEED), None)
    if seed is not None:
        graph.inputs.remove(seed)
        graph.inputs.append(seed)
    return model
