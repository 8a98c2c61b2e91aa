"""The loss behind a model: made from what the user gave, and called with the right values."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import onnx

from onnxtrain.errors import ArgumentTypeError, OnnxTrainError, TrainingWarning
from onnxtrain.format.model_metadata import ModelMetadata
from onnxtrain.offline import losses
from onnxtrain.offline.blocks.accessor import base
from onnxtrain.offline.blocks.block import Block, names_of
from onnxtrain.offline.blocks.operators import PassThrough
from onnxtrain.offline.blocks.values import defined_names, locate
from onnxtrain.offline.graph.op_facts import KEEPS_PROBABILITIES
from onnxtrain.offline.losses.loss import with_sample_weights
from onnxtrain.offline.named import make_named
from onnxtrain.offline.selection import list_of_names, listed

Loss = Block | Callable[..., Any] | onnx.ModelProto | str | os.PathLike[str]
# What turns scores into probabilities, where a loss does that itself.
_INSIDE_LOSS = {
    losses.CrossEntropyLoss: "Softmax",
    losses.NextTokenLoss: "Softmax",
    losses.BCEWithLogitsLoss: "Sigmoid",
}
_TO_PROBABILITIES = frozenset(_INSIDE_LOSS.values())
# The same for whoever uses the trained model. The softmax of log-probabilities is probabilities.
_ACTIVATIONS = {
    losses.CrossEntropyLoss: "softmax",
    losses.NextTokenLoss: "softmax",
    losses.NLLLoss: "softmax",
    losses.KLDivLoss: "softmax",
    losses.BCEWithLogitsLoss: "sigmoid",
}


class WithLoss(NamedTuple):
    """A model with its loss, the names of its outputs (the loss first), and what the loss brought.

    `notes` says what was decided in the caller's place, `about` what the loss tells of the value
    that it reads, and of its labels.
    """

    model: onnx.ModelProto
    outputs: list[str]
    brought: frozenset[str]
    notes: tuple[str, ...]
    about: ModelMetadata


def add_loss(
    forward: onnx.ModelProto,
    path: Path | None,
    loss: Loss | None,
    of: str | Iterable[str] | None,
    outputs: str | Iterable[str] | None,
    *,
    sample_weight: bool = False,
) -> WithLoss:
    """Add the loss to a copy of a model.

    Args:
        forward: the model.
        path: where it came from, if its tensors may be in files beside it.
        loss: what `prepare` takes.
        of: the values that the loss is called with; the outputs of the model by default.
        outputs: values to return beside the loss; the outputs of the model by default.
        sample_weight: whether to add an input with a weight for each sample.

    """
    own = [output.name for output in forward.graph.output]
    block = _make_block(loss)
    if sample_weight:
        block = with_sample_weights(block, forward.graph)
    is_built_in = type(block) in losses.BY_NAME.values()
    names, notes = list_of_names(listed(of), "of") or own, tuple[str, ...]()
    if is_built_in and not of and len(own) > 1:
        raise OnnxTrainError(
            f"the model has {len(own)} outputs ({', '.join(map(repr, own))}) and "
            f"{type(block).__name__} takes one: say which with of=... (loss_input_names=[...] in "
            "generate_artifacts)"
        )
    if isinstance(loss, str) and is_built_in:
        given = names
        names, notes = _before_activation(forward, names, block)
        forward = forward if names == given else _with_rank_of(forward, names[0], given[0])
    _warn_of_probabilities(forward, names[0], block)
    try:
        inspect.signature(block.build).bind(*names)
    except TypeError as error:
        raise ArgumentTypeError(
            f"the loss {type(block).__name__} cannot be called with {', '.join(map(repr, names))} "
            f"({error}): say what to call it with in of=[...] (loss_input_names in "
            "generate_artifacts)"
        ) from None
    if of and isinstance(block, losses.ModelLoss):
        block = block.by_position(names)
    with base(forward, path) as accessor:
        returned = names_of(block(*names))
        model = accessor.model
    if path is not None:
        locate(model, path)
    # The scores of a vocabulary are large, and nobody reads those of training.
    usual = [] if isinstance(block, losses.NextTokenLoss) else own
    beside = usual if outputs is None else list_of_names(listed(outputs), "outputs") or []
    if notes and isinstance(block, losses.BCEWithLogitsLoss) and outputs is None:
        beside = [*beside, *names]
    brought = frozenset(defined_names(model.graph)) - frozenset(defined_names(forward.graph))
    activation = _ACTIVATIONS.get(type(block), "identity") if is_built_in else None
    about = ModelMetadata(
        activation={} if activation is None else {names[0]: activation},
        labels=_layout(block) if is_built_in else {},
    )
    return WithLoss(model, list(dict.fromkeys([*returned, *beside])), brought, notes, about)


def _layout(block: Block) -> dict[str, int]:
    """Return what is unusual about the labels of a loss of classes."""
    if not isinstance(block, losses.CrossEntropyLoss | losses.NLLLoss):
        return {}
    layout = {} if block.class_axis == 1 else {"class_axis": int(block.class_axis)}
    if block.ignore_index is not None:
        layout["ignore_index"] = int(block.ignore_index)
    return layout | ({"shift": 1} if isinstance(block, losses.NextTokenLoss) else {})


def _make_block(loss: Loss | None) -> Block:
    if loss is None:
        return PassThrough()
    if isinstance(loss, Block):
        return loss
    if isinstance(loss, onnx.ModelProto | os.PathLike):
        return losses.ModelLoss(loss)
    if isinstance(loss, str):
        if Path(loss).is_file():
            return losses.ModelLoss(loss)
        made: Block = make_named(loss, losses.BY_NAME, "loss")
        return made
    if callable(loss) and not isinstance(loss, type):
        return losses.FunctionLoss(loss)
    raise ArgumentTypeError(
        f"loss is a name ({', '.join(losses.BY_NAME)}), an instance of a loss or onnxblock.Block, "
        f"a function, an ONNX model or the path of one, not {loss!r}"
    )


def _before_activation(
    model: onnx.ModelProto, names: list[str], block: Block
) -> tuple[list[str], tuple[str, ...]]:
    """Skip a final Softmax or Sigmoid that the loss contains itself."""
    maker = _maker(model, names[0])
    if maker is None or not maker.input or maker.op_type != _INSIDE_LOSS.get(type(block)):
        return names, ()
    before = maker.input[0]
    note = (
        f"{names[0]!r} comes out of a {maker.op_type}, which {type(block).__name__} contains: the "
        f"loss is computed from {before!r}."
    )
    return [before, *names[1:]], (note,)


def _with_rank_of(model: onnx.ModelProto, name: str, like: str) -> onnx.ModelProto:
    """Declare as many axes for a value as for another of its shape, if nothing tells its own.

    Sizes are not taken over: those that outputs are declared with are often wrong.
    """
    graph = model.graph
    stated = {info.name: info for info in (*graph.value_info, *graph.output, *graph.input)}
    if name in stated or like not in stated:
        return model
    made = onnx.ModelProto()
    made.CopyFrom(model)
    made.graph.value_info.add().CopyFrom(stated[like])
    made.graph.value_info[-1].name = name
    for dim in made.graph.value_info[-1].type.tensor_type.shape.dim:
        dim.Clear()
    return made


def _warn_of_probabilities(model: onnx.ModelProto, name: str, block: Block) -> None:
    """Warn of a loss that takes scores and is given probabilities, perhaps in another shape."""
    found = _scores_behind(model.graph, name) if type(block) in _INSIDE_LOSS else None
    if found is not None:
        operator, scores = found
        warnings.warn(
            f"{type(block).__name__} takes scores, and {name!r} comes out of a {operator}: "
            f"training would be slow or fail. Compute the loss from {scores!r} (of=..., "
            "or loss_input_names=[...] in generate_artifacts).",
            TrainingWarning,
            stacklevel=5,
        )


def _scores_behind(
    graph: onnx.GraphProto, name: str, around: Mapping[str, onnx.NodeProto] | None = None
) -> tuple[str, str] | None:
    """Return what makes probabilities of which value, if a value is made of such.

    `around` are the makers of the values that a body of an If reads.
    """
    makers = {**(around or {}), **{v: node for node in graph.node for v in node.output}}
    value = _behind(makers, name, KEEPS_PROBABILITIES)
    maker = makers.get(value)
    if maker is None or not maker.input:
        return None
    operator = maker.op_type.removeprefix("QLinear")
    if operator in _TO_PROBABILITIES:
        return operator, maker.input[0]
    if operator == "If":
        place = list(maker.output).index(value)
        outer = {v: node for v, node in makers.items() if node is not maker}
        bodies = [attribute.g for attribute in maker.attribute if attribute.HasField("g")]
        ends = [(body, v.name) for body in bodies for v in body.output[place : place + 1]]
        inner = (_scores_behind(body, end, outer) for body, end in ends)
        return next((found for found in inner if found is not None), None)
    if operator != "Div" or len(maker.input) != 2:
        return None
    powers = _behind(makers, maker.input[0], {"Identity"})
    total = makers.get(_behind(makers, maker.input[1], KEEPS_PROBABILITIES))
    sums = total is not None and total.op_type == "ReduceSum" and list(total.input[:1]) == [powers]
    exp = makers.get(powers)
    is_softmax = sums and exp is not None and exp.op_type == "Exp" and len(exp.input) == 1
    return ("Softmax", exp.input[0]) if is_softmax and exp is not None else None


def _behind(makers: Mapping[str, onnx.NodeProto], name: str, passed: Collection[str]) -> str:
    """Return the value that others only pass on."""
    seen = {name}
    while (maker := makers.get(name)) is not None and maker.op_type in passed and maker.input:
        name = maker.input[0]
        if name in seen:  # a cycle, which is refused later
            break
        seen.add(name)
    return name


def _maker(model: onnx.ModelProto, name: str) -> onnx.NodeProto | None:
    """Return the node that computes a value, before any Identity."""
    makers = {output: node for node in model.graph.node for output in node.output}
    return makers.get(_behind(makers, name, {"Identity"}))
