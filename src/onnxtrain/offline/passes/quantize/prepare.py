"""Quantization of a canonical model, in the order of events."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import onnx_ir as ir

from onnxtrain.errors import ArgumentError
from onnxtrain.offline.passes.quantize.frozen_scales import fix_scales
from onnxtrain.offline.passes.quantize.insert import Inserted, insert_quantizers
from onnxtrain.offline.passes.quantize.lift import Lifted
from onnxtrain.offline.passes.quantize.observe import observe
from onnxtrain.offline.passes.quantize.places import find_places, unused_patterns
from onnxtrain.offline.passes.quantize.summary import IntegerOperators
from onnxtrain.offline.quantize import Quantize


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
    places = find_places(model, outputs, settings)
    if lifted.ranges and settings.has_integer_activations:
        places.activations = dict(lifted.roots)
    if not places.layers:
        found = IntegerOperators.of(places, settings)
        raise ArgumentError(f"quantize: nothing can be quantized. {found}")
    if unused := unused_patterns(places, settings):
        raise ArgumentError(f"quantize: exclude={unused[0]!r} is the name of no layer")
    roots = list(dict.fromkeys(places.activations.values()))
    known = {v: r for v, r in lifted.ranges.items() if v in roots}
    if calibration is None and len(known) < len(roots):
        raise ArgumentError(
            "quantize: activations need a range to begin with: give calibration=batches of inputs "
            "(a hundred samples will do), or integers for weights alone: quantize='int4-weights'"
        )
    ranges = observe(model, roots, calibration, settings) if calibration is not None else known
    inserted = fix_scales(
        model, insert_quantizers(model, places, ranges, settings, trained), trained
    )
    return inserted, (str(IntegerOperators.of(places, settings)),)
