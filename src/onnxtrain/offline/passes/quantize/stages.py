"""What comes before integers are written: floats, forms that have kernels, and places."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from onnxtrain.offline.passes.fold_batch_norm import fold_batch_norm
from onnxtrain.offline.passes.quantize.forms import store_turned_weights, write_integer_forms
from onnxtrain.offline.passes.quantize.lift import Lifted, keep_places, lift
from onnxtrain.offline.passes.quantize.places import Places, find_places
from onnxtrain.offline.quantize import Quantize


def make_ready(model: ir.Model, settings: Quantize) -> tuple[Lifted, tuple[str, ...]]:
    """Bring a canonical model into the form that is quantized, in place; return notes on it too.

    One that has integer activations already keeps its form, and its places.
    """
    lifted = lift(model)
    if lifted.ranges and settings.has_integer_activations:
        return lifted, ()
    notes = fold_batch_norm(model)
    store_turned_weights(model.graph)
    if settings.has_integer_activations:
        write_integer_forms(model)
    return lifted, notes


def choose_places(
    model: ir.Model,
    outputs: Collection[str],
    settings: Quantize,
    lifted: Lifted,
    trains: Collection[str] = (),
) -> Places:
    """Find what to quantize in a model that was made ready: where it was, if it was."""
    places = find_places(model, outputs, settings, trains)
    if lifted.ranges and settings.has_integer_activations:
        keep_places(places, lifted)
    return places
