"""Quantization of a canonical model, in the order of events."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import onnx_ir as ir

from onnxtrain.errors import ArgumentError
from onnxtrain.offline.autodiff.engine import operator_name
from onnxtrain.offline.passes.quantize.insert import Inserted, insert_quantizers
from onnxtrain.offline.passes.quantize.lift import Lifted, given_scales, keep_places
from onnxtrain.offline.passes.quantize.observe import observe
from onnxtrain.offline.passes.quantize.places import Places, find_places
from onnxtrain.offline.quantize import Quantize


def quantize_model(
    model: ir.Model,
    outputs: Collection[str],
    settings: Quantize,
    calibration: Iterable[Any] | None,
    lifted: Lifted,
    trains: Collection[str] = (),
) -> tuple[Inserted, tuple[str, ...]]:
    """Quantize the part of a model that makes its outputs, in place; return that, and notes.

    What was quantized before (`lifted`) is so again, in the same places.
    """
    places = find_places(model, outputs, settings, trains)
    if lifted.ranges and settings.has_integer_activations:
        keep_places(places, lifted)
    if not places.layers:
        raise ArgumentError(_why_nothing(places))
    roots = list(dict.fromkeys(places.activations.values()))
    known = {v: r for v, r in lifted.ranges.items() if v in roots}
    if calibration is None and len(known) < len(roots):
        raise ArgumentError(
            "quantize: activations need a range to begin with: give calibration=batches of inputs "
            "(a hundred samples will do), or integers for weights alone: quantize='int4-weights'"
        )
    unknown, ranges = [root for root in roots if root not in known], dict(known)
    if unknown and calibration is not None:
        ranges |= observe(model, unknown, calibration, settings)
    given = given_scales(places, lifted, settings)
    inserted = insert_quantizers(model, places, ranges, settings, given)
    notes = [describe(places)]
    if known and calibration is not None:
        notes.append("The ranges of activations are those of the given model, not of calibration.")
    return inserted, tuple(notes)


def _why_nothing(places: Places) -> str:
    if not places.floats:
        return (
            "quantize: the model has no layer that multiplies (Conv, Gemm, MatMul), so nothing of "
            "it can be quantized"
        )
    return f"quantize: nothing can be quantized. {describe(places)}"


def describe(places: Places) -> str:
    """Say how many operators will run on integers, which will not, and why."""
    total = len(places.layers) + len(places.floats)
    text = f"{len(places.layers)} of {total} products run on integers"
    if places.others:
        text += f", and {len(places.others)} operators between them"
    reasons: dict[str, list[str]] = {}
    for node, reason in places.floats.items():
        reasons.setdefault(f"{operator_name(node)}: {reason}", []).append(node.name or "")
    for reason, names in reasons.items():
        some = ", ".join(map(repr, names[:3])) + (" ..." if len(names) > 3 else "")
        text += f". In floats: {len(names)} {reason} ({some})"
    return f"{text}."
