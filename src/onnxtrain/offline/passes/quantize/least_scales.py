"""The least scale that the weights of an output may have, so that its bias fits into 32 bits.

A bias has the scale of the product: input times weight. Where the weights of a channel are nearly
zero, as those of dead channels are, so would be their scale, and the bias would overflow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.graph.shapes import constant_array
from onnxtrain.offline.passes.quantize.places import Places, bias_of

Array = np.ndarray[Any, Any]
_LARGEST_BIAS = 2.0**28  # of 2³¹: training may change bias and range


def least_scales(
    places: Places, ranges: Mapping[ir.Value, tuple[float, float]]
) -> dict[ir.Value, Array]:
    """Return the least scales of weights that have a bias beside them, one for each output."""
    found = dict[ir.Value, Array]()
    for layer in places.layers:
        bias = constant_array(bias_of(layer.node))
        root = places.activations.get(layer.data[0]) if layer.data else None
        if layer.weight is None or bias is None or root is None:
            continue
        low, high = ranges[root]
        step = max(high, 0.0) - min(low, 0.0)
        least = np.abs(bias) * 255 / (max(step, 1e-12) * _LARGEST_BIAS)
        found[layer.weight] = np.maximum(least, found.get(layer.weight, 0.0)).astype(np.float32)
    return found
