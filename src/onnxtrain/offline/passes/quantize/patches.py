"""Samples of what layers multiply their weights by, as calibration data make it.

Of all rows of a matrix and all windows of a convolution, some are taken at random. With them, the
error that rounding a weight makes in the result of its layer is known, not only in the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.graph.shapes import constant_array, static_dims
from onnxtrain.offline.passes.quantize.observe import Calibration
from onnxtrain.offline.passes.quantize.places import QuantizedLayer

Array = np.ndarray[Any, Any]
Samples = dict[ir.Node, Array]
_SAMPLES = 2048  # of a layer, from all batches together


def sample_inputs(model: ir.Model, layers: Sequence[QuantizedLayer], data: Any) -> Samples:
    """Return what some elements of the result of each layer are made of: [samples, ...].

    What follows has the form of the weights of one output. A layer that is not as usual has none.
    """
    readers = dict[ir.Value, list[ir.Node]]()
    for layer in layers:
        if layer.weight is not None and _can_sample(layer):
            readers.setdefault(layer.data[0], []).append(layer.node)
    if not readers:
        return {}
    seen = Calibration(model, list(readers), data, is_run_again=True)
    each = -(-_SAMPLES // len(list(seen.batches)))
    found: dict[ir.Node, list[Array]] = {}
    values, rng = list(readers), np.random.default_rng(0)
    for place, array in seen.activations():
        for node in readers[values[place]]:
            found.setdefault(node, []).append(_taken(node, array, each, rng))
    return {node: np.concatenate(parts) for node, parts in found.items()}


def _can_sample(layer: QuantizedLayer) -> bool:
    node = layer.node
    if node.op_type == "Conv":
        return node.attributes.get_string("auto_pad", "NOTSET") == "NOTSET"
    weight = static_dims(layer.weight) if layer.weight is not None else None
    return weight is not None and len(weight) == 2 and not node.attributes.get_int("transA", 0)


def _taken(node: ir.Node, x: Array, count: int, rng: np.random.Generator) -> Array:
    """Return rows of a matrix, or windows of a convolution, [count, channels, *window]."""
    if node.op_type != "Conv":
        rows = x.reshape(-1, x.shape[-1])
        return rows[rng.integers(len(rows), size=count)]
    weight = constant_array(node.inputs[1])
    assert weight is not None
    axes = x.ndim - 2
    strides, dilations, pads = (
        list(node.attributes.get_ints(name, default))
        for name, default in (("strides", [1] * axes), ("dilations", [1] * axes),
                              ("pads", [0] * (2 * axes)))
    )  # fmt: skip
    sides = [(0, 0), (0, 0), *zip(pads[:axes], pads[axes:], strict=True)]
    window = [(k - 1) * d + 1 for k, d in zip(weight.shape[2:], dilations, strict=True)]
    wide = np.lib.stride_tricks.sliding_window_view(
        np.pad(x, sides), window, axis=tuple(range(2, x.ndim))
    )
    steps = tuple(slice(None, None, step) for step in (1, 1, *strides, *dilations))
    windows = wide[steps]
    sizes = (len(x), *windows.shape[2 : x.ndim])
    sample, *place = (rng.integers(size, size=count) for size in sizes)
    return np.asarray(np.moveaxis(windows, 1, x.ndim - 1)[(sample, *place)])
