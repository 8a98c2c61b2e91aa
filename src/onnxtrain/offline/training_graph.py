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

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import onnx
import onnx_ir as ir

from onnxtrain.format.names import ACCUMULATED, BUFFER, GRADIENT, LAZY_RESET, RANDOM_SEED
from onnxtrain.offline.frontend.canonical_model import canonical_model
from onnxtrain.offline.frontend.fused import expand_trained
from onnxtrain.offline.frontend.load import ModelLike
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.sweep import sweep
from onnxtrain.offline.loss_gradients import GradientCopy, LossGradients, differentiate_loss
from onnxtrain.offline.loss_model import (
    Tensors,
    choose_outputs,
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
from onnxtrain.offline.passes.batch_norm import (
    set_batch_norm_mode,
)
from onnxtrain.offline.passes.chunked_loss import chunk_losses
from onnxtrain.offline.passes.cuda import rewrite_for_cuda
from onnxtrain.offline.passes.quantize.biases import quantize_biases
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
    own = GradientCopy.of(source, on_gpu=target == "cuda")
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


def _name_gradients(own: GradientCopy, fed: Collection[str]) -> None:
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
    own = GradientCopy.of(source, last=last, on_gpu=target == "cuda")
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
