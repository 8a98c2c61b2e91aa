"""Marks blocks of frozen networks for a kernel that goes over the image by rows.

MobileNet and its relatives consist of inverted residuals: a 1×1 convolution to many channels, a
depthwise convolution of these, and a 1×1 convolution back to few. Where the block is frozen, nobody
reads the many channels again, and yet each operator writes all of them to memory. The kernel keeps
a few rows of them in the cache. The plain nodes stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxtrain.offline.graph.kernels import mark_kernel, place_of
from onnxtrain.offline.graph.shapes import dims_of, integers, static_dims
from onnxtrain.offline.passes.next_nodes import bounds_of, only_reader, other_summand

# Bytes of the wide image of one sample from which on the kernel pays; batches come in all sizes. Of
# MobileNetV2's blocks with 4 images of 224 × 224 pixels, it takes 0.65 to 0.75 of the time of
# onnxruntime's convolutions for 1.8 MB and more, 0.87 for the first one of 1.6 MB, 0.9 to 1.0 for
# 300 to 600 KB, less with more images, and 1.02 for 188 KB.
_LEAST_BYTES = 256 << 10
# The most elements that a window of several taps in front reads: the first layer of a network has
# few channels. Deeper ones were not measured and stay outside.
_MOST_TAPS = 64


def mark_frozen_blocks(graph: ir.Graph) -> None:
    """Mark the blocks of a graph, its subgraphs not included, for which the kernel pays."""
    for node in list(graph):
        depthwise = _convolution(node)
        if depthwise is not None and depthwise.is_depthwise and _is_large(depthwise.x):
            _mark_around(depthwise)


@dataclass(frozen=True)
class _Convolution:
    """A frozen convolution of images, with the normalization and the activation behind it."""

    node: ir.Node
    norm: ir.Node | None
    activation: ir.Node | None
    bounds: tuple[float, float]  # of the activation
    x: ir.Value
    weights: tuple[int, ...]  # their shape
    group: int
    strides: tuple[int, ...]
    pads: tuple[int, ...]

    @property
    def nodes(self) -> list[ir.Node]:
        return [n for n in (self.node, self.norm, self.activation) if n is not None]

    @property
    def y(self) -> ir.Value:
        return self.nodes[-1].outputs[0]

    @property
    def constants(self) -> list[ir.Value]:
        """Weights and bias, and what the normalization reads."""
        layers = [n for n in (self.node, self.norm) if n is not None]
        return [v for layer in layers for v in layer.inputs[1:] if v is not None]

    @property
    def has_bias(self) -> bool:
        return len(self.node.inputs) > 2 and self.node.inputs[2] is not None

    @property
    def is_depthwise(self) -> bool:
        return self.group > 1 and self.weights[:2] == (self.group, 1)

    @property
    def is_pointwise(self) -> bool:
        still = set(self.strides) == {1} and set(self.pads) == {0}
        return self.group == 1 and self.weights[2:] == (1, 1) and still


def _mark_around(depthwise: _Convolution) -> None:
    """Mark the block of a depthwise convolution, if a 1×1 convolution alone reads it."""
    reader = only_reader(depthwise.y)
    last = None if reader is None else _convolution(reader)
    if last is None or not last.is_pointwise or last.x is not depthwise.y:
        return
    layers = [*_expansion_of(depthwise), depthwise, last]
    nodes = [node for layer in layers for node in layer.nodes]
    y, residual = last.y, list[ir.Value]()
    add = only_reader(y)
    other = None if add is None else other_summand(add, y)
    if add is not None and other is not None:
        y, nodes, residual = add.outputs[0], [*nodes, add], [other]
    constants = [v for layer in layers for v in layer.constants]
    inputs = [layers[0].x, *constants, *residual]
    if all(v.dtype == ir.DataType.FLOAT for v in (*inputs, y)):
        mark_kernel(
            nodes, "InvertedResidual", inputs, [y],
            has_residual=len(residual), **_attributes(layers),
        )  # fmt: skip


def _attributes(layers: Sequence[_Convolution]) -> dict[str, Any]:
    *first, depthwise, _ = layers
    missing = [0] * (1 - len(first))
    found: dict[str, Any] = {
        "expands": len(first),
        "biases": missing + [int(layer.has_bias) for layer in layers],
        "norms": missing + [int(layer.norm is not None) for layer in layers],
        "strides": depthwise.strides,
        "pads": depthwise.pads,
    }
    for layer in first:
        found |= {"expansion_strides": layer.strides, "expansion_pads": layer.pads}
    for place, layer in enumerate(layers, start=3 - len(layers)):
        limits = zip(("low", "high"), layer.bounds, strict=True)
        found |= {f"{name}_{place}": limit for name, limit in limits if math.isfinite(limit)}
        if layer.norm is not None:
            found[f"epsilon_{place}"] = layer.norm.attributes.get_float("epsilon", 1e-5)
    return found


def _expansion_of(depthwise: _Convolution) -> list[_Convolution]:
    """Return the convolution in front, if nobody else reads it and the kernel is good at it."""
    before = depthwise.x.producer()
    while before is not None and (bounds_of(before) is not None or _is_norm(before)):
        before = None if before.inputs[0] is None else before.inputs[0].producer()
    found = None if before is None else _convolution(before)
    if found is None or found.y is not depthwise.x or only_reader(found.y) is not depthwise.node:
        return []
    small = found.is_pointwise or math.prod(found.weights[1:]) <= _MOST_TAPS
    return [found] if found.group == 1 and small else []


def _convolution(node: ir.Node) -> _Convolution | None:
    """Return a convolution of images whose weights are constants, if the kernel can compute it."""
    if node.op_type != "Conv" or node.domain != "" or place_of(node) is not None:
        return None
    x, w, *bias = node.inputs
    weights = None if w is None else static_dims(w)
    if x is None or weights is None or len(weights) != 4 or not all(map(_is_constant, (w, *bias))):
        return None
    read = node.attributes
    automatic = read.get_string("auto_pad", "NOTSET") or "NOTSET"
    if automatic != "NOTSET" or set(read.get_ints("dilations", ()) or [1]) != {1}:
        return None
    pads = tuple(read.get_ints("pads", ()) or [0, 0, 0, 0])
    if any(pad >= size for pad, size in zip(pads, weights[2:] * 2, strict=True)):
        return None
    reader = only_reader(node.outputs[0])
    norm = reader if reader is not None and _is_norm(reader) else None
    if norm is not None:
        reader = only_reader(norm.outputs[0])
    bounds = None if reader is None else bounds_of(reader)
    return _Convolution(
        node, norm, None if bounds is None else reader, bounds or (-math.inf, math.inf), x, weights,
        read.get_int("group", 1), tuple(read.get_ints("strides", ()) or [1, 1]), pads,
    )  # fmt: skip


def _is_norm(node: ir.Node) -> bool:
    """Whether a node normalizes by constants."""
    return (
        node.op_type == "BatchNormalization" and node.domain == ""
        and node.attributes.get_int("training_mode", 0) == 0
        and len(node.outputs) == 1 and all(map(_is_constant, node.inputs[1:]))
    )  # fmt: skip


def _is_constant(value: ir.Value | None) -> bool:
    """Whether a value is an initializer that no caller can replace, or was left out."""
    return value is None or (value.const_value is not None and not value.is_graph_input())


def _is_large(wide: ir.Value) -> bool:
    """Whether the wide image of one sample is worth it; one of an unknown size is not."""
    dims = dims_of(wide)
    sizes = None if dims is None else integers(dims[1:])
    return sizes is not None and 4 * math.prod(sizes) >= _LEAST_BYTES
