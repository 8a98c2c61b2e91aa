"""Which values depend on the inputs of a model, and which layer made a value.

A *layer* is a product with weights (Conv, MatMul with an initializer, a recurrent layer) or a
normalization, also one that an exporter has written out: x / sqrt(mean(x²)). What comes behind it
up to the next layer, such as views, activations and arithmetic with constants, belongs to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import onnx_ir as ir

from onnxtrain.offline.graph.op_facts import (
    ARITHMETIC,
    CONVOLUTIONS,
    INVERTS,
    JOINS,
    KEEPS_CHANNELS,
    NORMS,
    PRODUCTS,
    RANDOM,
    READS_SHAPE,
    RECURRENT,
    REDUCTIONS,
    REORDERS,
    SHAPE_INPUTS,
    TAKES_PARTS,
)
from onnxtrain.offline.graph.shapes import dims_of, static_dims
from onnxtrain.offline.graph.subgraphs import captured_values, subgraphs_of


@dataclass(frozen=True)
class Layer:
    """The layer behind a value."""

    node: ir.Node
    widths: frozenset[int]  # numbers of channels that a bias or scale of it may have
    is_norm: bool = False
    direct: bool = True  # there are only views in between


class DataFlow:
    """Tells what depends on the inputs of a graph, and finds layers."""

    def __init__(self, graph: ir.Graph) -> None:
        self.bodies: dict[ir.Graph | ir.Function | None, ir.Node] = {}
        self._varying = {v for v in graph.inputs if not v.is_initializer()}
        self._graph = graph
        self._layers: dict[ir.Value, Layer | None] | None = None
        self._found: dict[ir.Value, Layer | None] = {}  # before the widths of groups are added
        self._reductions: dict[tuple[ir.Value, bool, bool], ir.Node | None] = {}
        self._mark(graph)

    def varies(self, value: ir.Value | None) -> bool:
        """Whether a value depends on the inputs, and not only on their shapes."""
        return value in self._varying

    def _mark(self, graph: ir.Graph) -> None:
        for node in graph:
            op = node.op_type if node.domain == "" else ""
            bodies = subgraphs_of(node)
            for body in bodies:
                self.bodies[body] = node
                self._mark_body(node, body)
            if op == "If":
                for body in bodies:
                    pairs = zip(node.outputs, body.outputs, strict=False)
                    self._varying.update(outer for outer, inner in pairs if self.varies(inner))
            elif op in RANDOM or op in ("Loop", "Scan") or self._reads_data(node, op):
                self._varying.update(node.outputs)

    def _mark_body(self, node: ir.Node, body: ir.Graph) -> None:
        """Mark a body; its inputs are data where they come from data, or a step makes them so.

        The number of a step is none, nor is a slice of weights.
        """
        first = 2 if node.op_type == "Loop" else 0  # the number of the step, and the condition
        scanned = node.attributes.get_int("num_scan_inputs", 0)
        count = len(body.inputs) - first - scanned
        after = [*body.outputs[first // 2 :][:count], *[None] * scanned]
        inputs = list(zip(node.inputs[first:], body.inputs[first:], after, strict=False))
        while True:
            self._mark(body)
            found = {
                inner
                for outer, inner, made in inputs
                if not self.varies(inner) and (self.varies(outer) or self.varies(made))
            }
            if not found:
                return
            self._varying.update(found)

    def _reads_data(self, node: ir.Node, op: str) -> bool:
        if op in READS_SHAPE:
            return False
        ignored = (1,) if op == "CastLike" else SHAPE_INPUTS.get(op, ())
        given = (v for i, v in enumerate(node.inputs) if i not in ignored)
        return any(self.varies(v) for v in (*given, *captured_values(node)))

    # ---- layers ----------------------------------------------------------------------------------

    def weight_of(self, node: ir.Node) -> ir.Value | None:
        """Return the operand of a product that does not depend on the inputs, its weight."""
        first = 3 if node.op_type.startswith("QLinear") else 1
        operands = [node.inputs[i] for i in (first, 0) if i < len(node.inputs)]
        return next((v for v in operands if v is not None and not self.varies(v)), None)

    def is_own_layer(self, node: ir.Node) -> bool:
        """Whether an operator of another domain takes weights."""
        return bool(node.domain) and any(v is not None and not self.varies(v) for v in node.inputs)

    def layer_behind(self, value: ir.Value) -> Layer | None:
        """Return the layer that made a value, or None where the value is still that of an input."""
        if self._layers is None:
            # One walk in the order of the nodes: walking back from each value would visit the
            # nodes of a chain again and again.
            self._layers, self._found = {}, {}
            for node in self._graph.all_nodes():
                for made in node.outputs:
                    found = self._found[made] = self._find(made, node)
                    if found is not None and found.is_norm:  # groups have another shape
                        sizes = _static_sizes(made)
                        found = _widened(found, {*sizes[1:2], *sizes[-1:]})
                    self._layers[made] = found
        return self._layers.get(value)

    def _find(self, value: ir.Value, node: ir.Node) -> Layer | None:
        """Return the layer behind a value, where those behind what its node reads are known."""
        op = node.op_type if node.domain == "" else ""
        made = self._as_layer(node, op)
        if made is not None:
            return made
        data = [v for v in node.inputs if v is not None and self.varies(v)]
        if op in KEEPS_CHANNELS and data and data[0] is node.inputs[0]:
            found = self._found.get(data[0])
            if found is not None and op in TAKES_PARTS:
                return _widened(found, _static_sizes(value))
            return found if op in REORDERS else _indirect(found)
        if op in ARITHMETIC and len(data) == 1:
            return _indirect(self._found.get(data[0]))
        return _indirect(self._of_several(op, data))

    def _of_several(self, op: str, data: list[ir.Value]) -> Layer | None:
        """Return the layer behind the operands of a residual connection, a gate or a Concat."""
        if op not in JOINS:
            return None
        assert self._layers is not None
        found = [layer for v in data if (layer := self._layers.get(v)) is not None]
        if not found:
            return None
        widths = set().union(*(layer.widths for layer in found[1:]))
        if op == "Concat":
            widths.add(sum(max(layer.widths, default=0) for layer in found))
        joined = _widened(found[0], widths)
        is_norm = all(layer.is_norm for layer in found)
        return joined if joined.is_norm == is_norm else replace(joined, is_norm=is_norm)

    def _as_layer(self, node: ir.Node, op: str) -> Layer | None:
        x = node.inputs[0] if node.inputs else None
        if op in PRODUCTS:
            weight = self.weight_of(node)
            return None if weight is None else Layer(node, frozenset(_widths(node, weight)))
        if op in RECURRENT:
            return Layer(node, frozenset(_last_size(node.outputs[0])))
        if op in NORMS and x is not None:
            sizes = _static_sizes(x)
            scale = node.inputs[1] if len(node.inputs) > 1 else None
            count = math.prod(static_dims(scale) or (0,)) if scale is not None else 0
            return Layer(node, frozenset({*sizes[1:2], *sizes[-1:], count}), is_norm=True)
        reduction = self._normalized_by(node, op)
        if reduction is not None and reduction.inputs[0] is not None:
            sizes = _static_sizes(reduction.inputs[0])
            widths = {*sizes[1:2], *sizes[-1:], _reduced(reduction)}
            return Layer(node, frozenset(widths), is_norm=True)
        if self.is_own_layer(node):
            return Layer(node, frozenset(_static_sizes(node.outputs[0])[1:]))
        return None

    def _normalized_by(self, node: ir.Node, op: str) -> ir.Node | None:
        """Return the reduction behind x / deviation, x · (1 / deviation), or 1 / deviation."""
        if op in ("Div", "Mul") and all(self.varies(v) for v in node.inputs):
            operands = node.inputs if op == "Mul" else node.inputs[1:]
            found = (self._reduction(v, inverse=op == "Mul") for v in operands)
            return next((reduction for reduction in found if reduction is not None), None)
        is_inverse = op in INVERTS  # TensorFlow multiplies it by the scale first
        return self._reduction(node.outputs[0], inverse=True) if is_inverse else None

    def _reduction(self, value: ir.Value | None, inverse: bool) -> ir.Node | None:
        """Return the reduction that a deviation, or the inverse of one, is the root of."""
        found: ir.Node | None = None
        rooted = False
        passed: list[tuple[ir.Value, bool, bool]] = []
        while value is not None and (node := value.producer()) is not None:
            state = value, inverse, rooted
            if state in self._reductions:
                found = self._reductions[state]
                break
            passed.append(state)
            op = node.op_type if node.domain == "" else ""
            if op in REDUCTIONS:
                found = node if not inverse and (rooted or op == "ReduceL2") else None
                break
            if op == "Reciprocal" or (op == "Div" and not self.varies(node.inputs[0])):
                inverse = not inverse
            elif op == "Pow" and self.varies(node.inputs[0]):
                rooted, inverse = True, False
            elif op == "Sqrt":
                rooted = True
            elif op not in (*REORDERS, *ARITHMETIC, "Clip", "Max"):
                break
            value = next((v for v in node.inputs if self.varies(v)), None)
        self._reductions.update(dict.fromkeys(passed, found))
        return found


_MOST_WIDTHS = 64  # more come from a chain of parts, each of another size


def _widened(layer: Layer, widths: Iterable[int]) -> Layer:
    more = layer.widths.union(widths)
    if len(more) == len(layer.widths) or len(more) > _MOST_WIDTHS:
        return layer
    return replace(layer, widths=more)


def _indirect(layer: Layer | None) -> Layer | None:
    return replace(layer, direct=False) if layer is not None and layer.direct else layer


def _widths(node: ir.Node, weight: ir.Value) -> Iterator[int]:
    dims, op = static_dims(weight), node.op_type
    if op in CONVOLUTIONS:
        yield from _static_sizes(node.outputs[0])[1:2]
        if dims and op != "ConvTranspose":
            yield dims[0]
    elif dims and op == "Einsum":
        yield from (math.prod(dims) // d for d in dims if d)
        yield from dims
    elif dims and op == "Gemm":
        yield dims[0] if node.attributes.get_int("transB", 0) else dims[-1]
    elif dims:
        yield dims[-2] if weight is node.inputs[0] and len(dims) > 1 else dims[-1]


def _static_sizes(value: ir.Value) -> list[int]:
    """Return the sizes of the axes, 0 where one is not known."""
    return [d if isinstance(d, int) else 0 for d in dims_of(value) or ()]


def _last_size(value: ir.Value) -> Iterator[int]:
    for size in _static_sizes(value)[-1:]:
        yield from (size, 2 * size)


def _reduced(node: ir.Node) -> int:
    """Return how many elements a reduction with kept axes takes together."""
    if node.inputs[0] is None:
        return 0
    before, after = _static_sizes(node.inputs[0]), _static_sizes(node.outputs[0])
    if len(before) != len(after):
        return 0
    return math.prod(b for b, a in zip(before, after, strict=True) if b != a)
