"""Quantization of a canonical model, in the order of events."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import onnx_ir as ir

from onnxtrain.errors import ArgumentError
from onnxtrain.offline.passes.quantize.forms import note_on_turned
from onnxtrain.offline.passes.quantize.frozen_scales import fix_scales
from onnxtrain.offline.passes.quantize.insert import Inserted, insert_quantizers
from onnxtrain.offline.passes.quantize.lift import Lifted, given_scales
from onnxtrain.offline.passes.quantize.observe import observe
from onnxtrain.offline.passes.quantize.patches import sample_inputs
from onnxtrain.offline.passes.quantize.places import Places
from onnxtrain.offline.passes.quantize.stages import choose_places
from onnxtrain.offline.passes.quantize.summary import IntegerOperators
from onnxtrain.offline.quantize import Quantize

_EXPANDED = (
    "onnxruntime expands 4-bit weights of Conv in each run, unless the session option "
    "'session.disable_quant_qdq' is '1': then it does so once, when the exported model is loaded."
)


def quantize_model(
    model: ir.Model,
    outputs: Collection[str],
    settings: Quantize,
    calibration: Iterable[Any] | None,
    lifted: Lifted,
    trained: Collection[str],
) -> tuple[Inserted, tuple[str, ...]]:
    """Quantize the part of a model that makes its outputs, in place; return that, and notes.

    What was quantized before (`lifted`) is so again, in the same places. What is not `trained` has
    scales that are not learned either.
    """
    places = choose_places(model, outputs, settings, lifted, trained)
    if not places.layers:
        raise ArgumentError(_why_nothing(places, settings))
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
    samples = None
    if calibration is not None and settings.weights == "int4" and settings.scales != "average":
        samples = sample_inputs(model, places.layers, calibration)
    inserted = insert_quantizers(model, places, ranges, settings, trained, given, samples)
    inserted = fix_scales(model, inserted, trained)
    notes = [str(IntegerOperators.of(places, settings))]
    if settings.weights == "int4" and any(layer.node.op_type == "Conv" for layer in places.layers):
        notes.append(_EXPANDED)
    notes += note_on_turned(model.graph)
    if known and calibration is not None:
        notes.append("The ranges of activations are those of the given model, not of calibration.")
    return inserted, tuple(notes)


def _why_nothing(places: Places, settings: Quantize) -> str:
    if not places.floats:
        return (
            "quantize: the model has no layer that multiplies (Conv, Gemm, MatMul), so nothing of "
            "it can be quantized"
        )
    return f"quantize: nothing can be quantized. {IntegerOperators.of(places, settings)}"
