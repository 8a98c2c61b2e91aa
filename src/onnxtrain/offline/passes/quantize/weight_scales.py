"""The scales of weights that calibration gives: of least error, or for the largest element.

The error is that of the weights or, where samples of the data are known, of what a layer puts out.
The two differ: weights that are clipped all move towards 0, and what that takes from each product
adds up where the data are positive, as they are behind a Relu.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxtrain.offline.graph.shapes import constant_array
from onnxtrain.offline.passes.quantize.places import QuantizedLayer, bias_of
from onnxtrain.offline.quantize import Quantize

Array = np.ndarray[Any, Any]
_FACTORS = np.linspace(0.4, 1.0, 25)  # parts of the largest element that are tried


def weight_scales(layer: QuantizedLayer, settings: Quantize, samples: Array | None = None) -> Array:
    """Return a scale for each output, or for each block of inputs and each output: two axes."""
    rows, data = _in_parts(layer, settings, samples)
    if data is not None and bias_of(layer.node) is not None:
        data = data - data.mean(1, keepdims=True)  # `output_shifts` are taken from the bias
    scales = best_scales(rows, settings, data)
    return scales if is_blocked(layer, settings) else scales.reshape(-1)


def output_shifts(
    layer: QuantizedLayer, settings: Quantize, samples: Array, scales: Array
) -> Array:
    """Return what rounding the weights adds to each output, on average over the samples."""
    rows, data = _in_parts(layer, settings, samples)
    assert data is not None
    scale = scales.reshape(*rows.shape[:2], 1)
    shifts = ((_rounded(rows, scale, settings) - rows) @ data.mean(1)[..., None])[..., 0]
    return np.asarray(shifts.sum(0) if is_blocked(layer, settings) else shifts.reshape(-1))


def is_blocked(layer: QuantizedLayer, settings: Quantize) -> bool:
    """Tell whether an output has a scale for each block of inputs."""
    return settings.weights == "int4" and layer.node.op_type != "Conv"


def best_scales(rows: Array, settings: Quantize, data: Array | None = None) -> Array:
    """Return the scale of each row, the last axis: that of least squared error if learned.

    With data, rows are [parts, outputs, inputs], and data [parts, samples, inputs].
    """
    largest = np.abs(rows).max(-1, initial=0.0)
    full = largest / settings.largest
    if settings.weights == "int8" and settings.method == "minmax":
        return np.asarray(full)
    best, least = full, np.full(full.shape, np.inf)
    for factor in _FACTORS:
        scale = np.maximum(full * factor, 1e-12)[..., None]
        change = _rounded(rows, scale, settings) - rows
        if data is not None:
            change = change @ data.swapaxes(1, 2)  # of the outputs
        error = np.square(change).sum(-1)
        best = np.where(error < least, scale[..., 0], best)
        least = np.minimum(least, error)
    return np.asarray(best)


def _rounded(rows: Array, scale: Array, settings: Quantize) -> Array:
    levels = np.clip(np.rint(rows / scale), -settings.largest - 1, settings.largest)
    return np.asarray(levels * scale)


def _in_parts(
    layer: QuantizedLayer, settings: Quantize, samples: Array | None
) -> tuple[Array, Array | None]:
    """Return weights, [parts, outputs, inputs], and samples, [parts, samples, inputs].

    Parts are blocks of inputs that all outputs have, or the groups of a convolution.
    """
    assert layer.weight is not None
    weight = constant_array(layer.weight)
    assert weight is not None
    rows = np.moveaxis(weight, layer.axis, 0)
    if is_blocked(layer, settings):
        data = None if samples is None else _blocks(samples, settings.block)
        return _blocks(rows, settings.block), data
    parts = layer.node.attributes.get_int("group", 1)
    rows = rows.reshape(parts, len(rows) // parts, -1)
    if samples is None:
        return rows, None
    return rows, samples.reshape(len(samples), parts, -1).swapaxes(0, 1)


def _blocks(rows: Array, size: int) -> Array:
    """Cut rows into blocks, [blocks, rows, inputs]; what is missing in the last one is 0."""
    missing = -rows.shape[-1] % size
    padded = np.pad(rows, [(0, 0), (0, missing)])
    return padded.reshape(len(rows), -1, size).swapaxes(0, 1)
