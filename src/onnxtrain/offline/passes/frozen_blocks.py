"""Marks blocks of frozen networks for a kernel that goes over the image by rows.

MobileNet and its relatives consist of inverted residuals: a 1×1 convolution to many channels, a
depthwise convolution of these, and a 1×1 convolution back to few. Where the block is frozen, nobody
reads the many channels again, and yet each operator writes all of them to memory. The kernel keeps
a few rows of them in the cache. The plain nodes stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.offline.graph.kernels import Attribute, mark_kernel, place_of
from onnxtrain.offline.graph.shapes import constant_array, dims_of, integers, same_dims, static_dims

# Bytes of the wide image for which the kernel was faster than onnxruntime's convolutions: those of
# one sample, since batches come in all sizes.
_LEAST_BYTES = 256 << 10
# Depth of a convolution of several taps in front: those of a few input channels. onnxruntime is
# faster at deeper ones.
_MOST_TAPS = 64


def mark_frozen_blocks(graph: ir.Graph) -> None:
    """Mark the blocks of a graph, its subgraphs not included, for which the kernel pays."""
    for node in list(graph):
        depthwise = _convolution(node)
        if depthwise is not None and depthwise.is_depthwise and _is_large(depthwise.x):
            _mark_around(depthwise)


@dataclass(frozen=True)
class _Convolution:
    """A frozen convolution of images, and the activation that alone reads it."""

    node: ir.Node
    activation: ir.Node | None
    bounds: tuple[float, float]  # of the activation
    x: ir.Value
    weights: tuple[int, ...]  # their shape
    group: int
    strides: tuple[int, ...]
    pads: tuple[int, ...]

    @property
    def nodes(self) -> list[ir.Node]:
        return [self.node] if self.activation is None else [self.node, self.activation]

    @property
    def y(self) -> ir.Value:
        return self.nodes[-1].outputs[0]

    @property
    def constants(self) -> list[ir.Value]:
        """Weights and bias."""
        return [v for v in self.node.inputs[1:] if v is not None]

    @property
    def is_depthwise(self) -> bool:
        return self.group > 1 and self.weights[:2] == (self.group, 1)

    @property
    def is_pointwise(self) -> bool:
        still = set(self.strides) == {1} and set(self.pads) == {0}
        return self.group == 1 and self.weights[2:] == (1, 1) and still


def _mark_around(depthwise: _Convolution) -> None:
    """Mark the block of a depthwise convolution, if a 1×1 convolution alone reads it."""
    reader = _only_reader(depthwise.y)
    last = None if reader is None else _convolution(reader)
    if last is None or not last.is_pointwise or last.x is not depthwise.y:
        return
    layers = [*_expansion_of(depthwise), depthwise, last]
    nodes = [node for layer in layers for node in layer.nodes]
    y, residual = last.y, list[ir.Value]()
    for add, other in _sum_behind(y):
        y, nodes = add.outputs[0], [*nodes, add]
        residual.append(other)
    constants = [v for layer in layers for v in layer.constants]
    inputs = [layers[0].x, *constants, *residual]
    if all(v.dtype == ir.DataType.FLOAT for v in (*inputs, y)):
        mark_kernel(
            nodes, "InvertedResidual", inputs, [y],
            has_residual=len(residual), **_attributes(layers),
        )  # fmt: skip


def _attributes(layers: Sequence[_Convolution]) -> dict[str, Attribute]:
    expands = len(layers) == 3
    *first, depthwise, _ = layers
    found: dict[str, Attribute] = {
        "expands": int(expands),
        "biases": [0] * (not expands) + [len(layer.constants) - 1 for layer in layers],
        "strides": depthwise.strides,
        "pads": depthwise.pads,
    }
    for layer in first:
        found |= {"expansion_strides": layer.strides, "expansion_pads": layer.pads}
    for place, layer in enumerate(layers, start=3 - len(layers)):
        limits = zip(("low", "high"), layer.bounds, strict=True)
        found |= {f"{name}_{place}": limit for name, limit in limits if math.isfinite(limit)}
    return found


def _expansion_of(depthwise: _Convolution) -> list[_Convolution]:
    """Return the convolution in front, if nobody else reads it and the kernel is good at it."""
    producer = depthwise.x.producer()
    if producer is None:
        return []
    before = producer
    if _bounds(producer) is not None and producer.inputs[0] is not None:
        before = producer.inputs[0].producer() or producer
    found = _convolution(before)
    if found is None or found.y is not depthwise.x or _only_reader(found.y) is not depthwise.node:
        return []
    small = found.is_pointwise or math.prod(found.weights[1:]) <= _MOST_TAPS
    return [found] if found.group == 1 and small else []


def _sum_behind(y: ir.Value) -> Iterator[tuple[ir.Node, ir.Value]]:
    """Yield the node that adds something of the same shape to a value, and what it adds."""
    node = _only_reader(y)
    if node is None or node.op_type != "Add" or node.domain != "":
        return
    a, b = node.inputs
    other = b if a is y else a
    dims = None if other is None else dims_of(other)
    if other is not None and other is not y and dims is not None and same_dims(dims, dims_of(y)):
        yield node, other


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
    reader = _only_reader(node.outputs[0])
    bounds = None if reader is None else _bounds(reader)
    return _Convolution(
        node, None if bounds is None else reader, bounds or (-math.inf, math.inf), x, weights,
        read.get_int("group", 1),
        tuple(read.get_ints("strides", ()) or [1, 1]),
        tuple(read.get_ints("pads", ()) or [0, 0, 0, 0]),
    )  # fmt: skip


def _is_constant(value: ir.Value | None) -> bool:
    """Whether a value is an initializer that no caller can replace, or was left out."""
    return value is None or (value.const_value is not None and not value.is_graph_input())


def _is_large(wide: ir.Value) -> bool:
    """Whether the wide image of one sample is worth it; one of an unknown size is not."""
    dims = dims_of(wide)
    sizes = None if dims is None else integers(dims[1:])
    return sizes is not None and 4 * math.prod(sizes) >= _LEAST_BYTES


def _only_reader(value: ir.Value) -> ir.Node | None:
    """Return the node of the same graph that reads a value, if there is one alone, in no group."""
    readers = {node for node, _ in value.uses()}
    if len(readers) != 1 or value.is_graph_output():
        return None
    (reader,) = readers
    producer = value.producer()
    beside = producer is not None and reader.graph is producer.graph
    return reader if beside and place_of(reader) is None else None


def _bounds(node: ir.Node) -> tuple[float, float] | None:
    """Return the bounds of a node that keeps values between two numbers."""
    if node.domain != "" or node.op_type not in ("Relu", "Clip"):
        return None
    if node.op_type == "Relu":
        return 0.0, math.inf
    limits = [-math.inf, math.inf]
    for place, value in enumerate(node.inputs[1:]):
        if value is None:
            continue
        known = constant_array(value)
        if known is None or known.size != 1:
            return None
        limits[place] = float(known.reshape(()))
    return limits[0], limits[1]
