"""What a choice of what trains takes: parameters, and the memory of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from onnxtrain.errors import OnnxTrainError
from onnxtrain.offline.autodiff.engine import ActivePath, differentiate
from onnxtrain.offline.autodiff.expand import expand_by_definition
from onnxtrain.offline.blocks.values import locate
from onnxtrain.offline.forward_model import ForwardModel, forward_model
from onnxtrain.offline.frontend.canonical_model import canonical_model
from onnxtrain.offline.frontend.load import ModelLike
from onnxtrain.offline.graph.infer import skeleton
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.sweep import sweep
from onnxtrain.offline.memory import Activations, estimate
from onnxtrain.offline.passes.batch_norm import (
    BatchNormMode,
    choose_batch_norm_mode,
    set_batch_norm_mode,
)
from onnxtrain.offline.passes.formulas import join_formulas
from onnxtrain.offline.passes.sparse.gradient import join_sparse
from onnxtrain.offline.passes.tie_weights import find_tied, tie_trained
from onnxtrain.offline.patterns import choose
from onnxtrain.offline.selection import output_named, survey
from onnxtrain.offline.sparse import Sparse
from onnxtrain.offline.train_words import Item, Train, items_of

USUAL: tuple[Train, ...] = ("*", "lora", "bias", "norm", "last:3", "head")
_ADAMW = 3  # a parameter, and two moments of it


@dataclass(frozen=True)
class Choice:
    """What trains, and what that takes; `problem` says why it cannot train."""

    train: str
    tensors: int = 0
    parameters: int = 0
    parameter_bytes: int = 0  # with AdamW's moments
    activations: Activations | None = None
    problem: str = ""


def weigh(
    model: ModelLike,
    of: str | None,
    train: Train,
    *,
    bn: BatchNormMode | None = None,
    tie_weights: bool = True,
    sizes: Mapping[str, int] | None = None,
) -> Choice:
    """Tell what it takes to train what `train` says."""
    text = " + ".join(map(_text, items_of(train) or ()))
    try:
        forward = forward_model(model, of, train, None, None, False)
        canonical = canonical_model(_located(forward), located=True)
        found = survey(canonical, output_named(canonical.graph, of))
        tied = find_tied(found) if tie_weights else ()
        trains, _ = choose(found, forward.train, None, tied)
        mode, _ = choose_batch_norm_mode(canonical, bn or "auto", found.weight_forms(), trains)
        trains, _ = tie_trained(canonical, trains, tied)
    except OnnxTrainError as error:
        return Choice(text, problem=str(error))
    weights = [canonical.graph.initializers[n] for n in trains if n in canonical.graph.initializers]
    tensors = [v.const_value for v in weights if v.const_value is not None]
    return Choice(
        text,
        len(tensors),
        sum(tensor.size for tensor in tensors),
        sum(tensor.nbytes for tensor in tensors) * _ADAMW,
        step_memory(canonical, of, weights, mode, sizes),
    )


def _text(item: Item) -> str:
    if isinstance(item, str):
        return item
    if isinstance(item, Sparse):
        return f"sparse:{item.memory}"
    return f"lora:rank={item.rank},layers={'|'.join(item.patterns)}"


def _located(forward: ForwardModel) -> onnx.ModelProto:
    """Return the model with the full paths of the files that its tensors are in."""
    if forward.path is None:
        return forward.proto
    made = onnx.ModelProto()
    made.CopyFrom(forward.proto)
    locate(made, forward.path)
    return made


def step_memory(
    model: ir.Model,
    of: str | None,
    weights: Sequence[ir.Value],
    bn: BatchNormMode | None,
    sizes: Mapping[str, int] | None,
) -> Activations:
    """Differentiate a canonical model, which is changed, and estimate what the result takes."""
    set_batch_norm_mode(model, bn)
    graph, opset = model.graph, model.opset_imports[""]
    output = output_named(graph, of)
    expand_by_definition(model, lambda: ActivePath(list(graph), weights, [output], opset))
    op = Ops(graph, opset)
    with op.arithmetic():
        seed = op.zeros_like(output)
    rules = {**join_formulas(graph, [*weights, output]), **join_sparse(op, graph, weights)}
    gradients = differentiate(op, list(graph), {output: seed}, weights, rules=rules)
    graph.outputs.clear()
    graph.outputs.extend(value for value in gradients.values() if value is not None)
    sweep(graph)
    return estimate(skeleton(model), sizes)
