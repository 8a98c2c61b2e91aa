"""The scales of weights that calibration gives: of least error, or for the largest element."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxtrain.offline.graph.shapes import constant_array
from onnxtrain.offline.passes.quantize.places import QuantizedLayer
from onnxtrain.offline.quantize import Quantize

Array = np.ndarray[Any, Any]
_FACTORS = np.linspace(0.4, 1.0, 25)  # parts of the largest element that are tried


def weight_scales(layer: QuantizedLayer, settings: Quantize) -> Array:
    """Return a scale for each output, or for each block of inputs and each output: two axes."""
    assert layer.weight is not None
    weight = constant_array(layer.weight)
    assert weight is not None
    if settings.weights == "int4" and layer.node.op_type != "Conv":
        rows = np.moveaxis(weight, layer.axis, 0)  # [outputs, inputs]
        missing = -rows.shape[-1] % settings.block
        rows = np.pad(rows, [(0, 0), (0, missing)]).reshape(rows.shape[0], -1, settings.block)
        return np.ascontiguousarray(best_scales(rows, settings).T)
    rows = np.moveaxis(weight, layer.axis, 0).reshape(weight.shape[layer.axis], -1)
    return best_scales(rows, settings)


def best_scales(rows: Array, settings: Quantize) -> Array:
    """Return the scale of each row, the last axis: that of least squared error if learned."""
    largest = np.abs(rows).max(-1, initial=0.0)
    full = largest / settings.largest
    if settings.weights == "int8" and settings.method == "minmax":
        return np.asarray(full)
    best, least = full, np.full(full.shape, np.inf)
    for factor in _FACTORS:
        scale = np.maximum(full * factor, 1e-12)[..., None]
        levels = np.clip(np.rint(rows / scale), -settings.largest - 1, settings.largest)
        error = np.square(levels * scale - rows).sum(-1)
        best = np.where(error < least, scale[..., 0], best)
        least = np.minimum(least, error)
    return np.asarray(best)
