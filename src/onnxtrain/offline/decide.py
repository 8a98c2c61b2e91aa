"""What of a canonical model trains, what is frozen, and what follows from that."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxtrain.errors import ArgumentError
from onnxtrain.offline.forward_model import ForwardModel
from onnxtrain.offline.inspect_notes import notes_on_integers
from onnxtrain.offline.optimizers import Optimizer, needs_gradient
from onnxtrain.offline.passes.batch_norm import (
    BatchNormChoice,
    BatchNormMode,
    choose_batch_norm_mode,
)
from onnxtrain.offline.passes.quantize.lift import Lifted
from onnxtrain.offline.passes.quantize.prepare import quantize_model
from onnxtrain.offline.passes.quantize.stages import make_ready
from onnxtrain.offline.passes.tie_weights import Tied, find_tied, tie_trained
from onnxtrain.offline.patterns import choose, notes_on_left_out, nothing_trains
from onnxtrain.offline.quantize import Quantize
from onnxtrain.offline.selection import Names, Survey, listed, survey


@dataclass(frozen=True)
class Decision:
    """What trains, by name, and what is stored beside it."""

    found: Survey
    trains: list[str]
    frozen: list[str]
    bn: BatchNormMode | None
    tied: tuple[Tied, ...]
    without_gradient: tuple[str, ...]
    notes: tuple[str, ...]
    folded: tuple[str, ...] = ()  # what an exported model has as constants


def decide(
    canonical: ir.Model,
    loss: str,
    brought: Collection[str],
    forward: ForwardModel,
    freeze: Names | None,
    optimizer: Optimizer | None,
    bn: BatchNormChoice | None,
    tie_weights: bool,
    quantize: Quantize | None = None,
    calibration: Iterable[Any] | None = None,
) -> Decision:
    """Decide what trains, in a canonical model that is changed where the decision asks for it."""
    lifted, norms = Lifted(), tuple[str, ...]()
    if quantize is None and calibration is not None:
        raise ArgumentError("calibration is for quantize: give quantize='int8' too")
    if quantize is not None:
        _require_weights(forward, bn)
        lifted, norms = make_ready(canonical, quantize)
    found = survey(canonical, loss, brought, by_gradient=needs_gradient(optimizer))
    tied = find_tied(found) if tie_weights else ()
    trains, frozen = choose(found, forward.train, listed(freeze), tied)
    if not trains and (optimizer is not None or (forward.train is None and not freeze)):
        raise nothing_trains(found, forward.train, freeze)
    weights, without_gradient = found.weight_forms(), found.without_gradient()
    mode, at_rest = choose_batch_norm_mode(canonical, bn or "auto", weights, trains)
    left_out = notes_on_left_out(found, trains, forward.train, listed(freeze) or ())
    notes, folded = (*left_out, *notes_on_integers(found), *at_rest), tuple[str, ...]()
    trains, tied = tie_trained(canonical, trains, tied)
    if quantize is not None:
        outputs = [value.name for value in forward.proto.graph.output]
        inserted, more = quantize_model(canonical, outputs, quantize, calibration, lifted, trains)
        trains, folded = [*trains, *inserted.trains], inserted.folded
        notes = (*notes, *more, *norms)
    return Decision(found, trains, frozen, mode, tuple(tied), without_gradient, notes, folded)


def _require_weights(forward: ForwardModel, bn: BatchNormChoice | None) -> None:
    """Refuse what cannot train together with quantization."""
    if forward.adapted is not None or forward.is_sparse:
        word = "lora" if forward.adapted is not None else "sparse"
        raise ArgumentError(
            f"train={word!r} and quantize do not go together: factors and channels train beside "
            "weights that stay as they are, also quantized ones. Leave quantize out, or train "
            "weights ('*', 'last:3')"
        )
    if bn == "batch":
        raise ArgumentError(
            "bn='batch' and quantize do not go together: quantize folds BatchNormalization into "
            "the layers before it, with its stored statistics. Leave bn out"
        )
