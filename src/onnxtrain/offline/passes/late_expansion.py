"""Quantized weights that the model itself expands to floats, layer by layer instead of all at once.

A model may hold a matrix as integers and expand it with plain nodes: DequantizeLinear, or Cast and
Mul. onnxruntime computes the latter when it loads the graph, to four times the memory, and runs the
former for all layers before the first product, because nothing holds them back. And whatever the
forward pass has expanded stays until the backward pass reads it.

So each node that reads such a matrix together with data gets an expansion of its own, which waits
for that data: the forward product waits for its input, the backward product for the gradient. The
floats are there for one product and freed behind it.

- Where the input and the result of a product are quantized too, and no gradient passes it, the
  nodes stay: onnxruntime joins them to a product of integers. So does a matrix of fewer than 8
  bits, which it joins to MatMulNBits.
- A table of embeddings is not expanded at all: see `quantized_tables.py`.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from onnxtrain.offline.graph.control_dependencies import flag_of, wait_for
from onnxtrain.offline.graph.kernels import place_of
from onnxtrain.offline.graph.op_facts import RANDOM
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.quantized_operators import is_constant, is_large, is_large_integer
from onnxtrain.offline.graph.shapes import is_float, static_dims
from onnxtrain.offline.graph.subgraphs import subgraphs_of
from onnxtrain.offline.graph.sweep import sweep


def expand_late(
    op: Ops, graph: ir.Graph, forward: Collection[str], keep: Collection[ir.Value] = ()
) -> set[str]:
    """Let quantized weights be expanded when they are due; return what is new in the forward pass.

    `forward` are the names of the values of the forward pass; `keep` is not to be swept.
    """
    expansions = _Expansions(graph)
    if not expansions.found:
        return set()
    own = Ops(graph, op.opset, op.names)  # constants that `op` remembers may be swept
    late = _Late(own, graph, expansions)
    written: set[str] = set()
    with own.arithmetic():
        for node in list(graph):
            is_forward = any(v.name in forward for v in node.outputs)
            for index, value in enumerate(node.inputs):
                if value is None or value not in expansions.found or node in expansions.nodes:
                    continue
                if is_forward and _is_joined_by_the_runtime(node, value):
                    late.move_to_front(value)
                else:
                    new = late.expand_for(node, index)
                    written.update(new if is_forward else ())
    sweep(graph, keep)
    return written


class _Expansions:
    """The values of a graph that are computed from constant integers alone, and are large."""

    def __init__(self, graph: ir.Graph) -> None:
        self.nodes: set[ir.Node] = set()  # that compute from constants
        self.from_integers: set[ir.Value] = set()
        self.found: set[ir.Value] = set()
        constant: set[ir.Value] = set()
        for node in graph:
            given = [v for v in node.inputs if v is not None]
            if not given or node.domain or node.op_type in RANDOM or subgraphs_of(node):
                continue
            if not all(v in constant or is_constant(v) for v in given):
                continue
            self.nodes.add(node)
            constant.update(node.outputs)
            if any(v in self.from_integers or is_large_integer(v) for v in given):
                self.from_integers.update(node.outputs)
                self.found.update(v for v in node.outputs if is_float(v) and is_large(v))


def _is_joined_by_the_runtime(node: ir.Node, value: ir.Value) -> bool:
    """Tell whether onnxruntime joins a product and the expansion of its weights to one node."""
    expansion = value.producer()
    assert expansion is not None
    if expansion.op_type != "DequantizeLinear":
        return False
    q, x = expansion.inputs[0], node.inputs[0]
    if q is not None and q.dtype is not None and q.dtype.bitwidth < 8:
        return node.op_type == "MatMul"
    maker = None if x is None else x.producer()
    if maker is None or maker.op_type != "DequantizeLinear" or maker.inputs[0] is None:
        return False
    quantizer = maker.inputs[0].producer()
    if quantizer is None or quantizer.op_type != "QuantizeLinear":
        return False
    # A gradient reads what was quantized, to know what was clipped: the product has to be floats.
    return all(user.op_type == "QuantizeLinear" for user, _ in node.outputs[0].uses())


class _Late:
    """Writes expansions that wait for the data which they are multiplied by."""

    def __init__(self, op: Ops, graph: ir.Graph, expansions: _Expansions) -> None:
        self._op, self._graph, self._expansions = op, graph, expansions
        self._made: dict[tuple[ir.Value, ir.Value], ir.Value] = {}
        self._moved: set[ir.Node] = set()

    def expand_for(self, node: ir.Node, index: int) -> list[str]:
        """Let a node read an expansion of its own; return the names of what is written."""
        value, gate = node.inputs[index], self._gate(node)
        if value is None or gate is None:
            return []
        written: list[ir.Node] = []
        if (value, gate) not in self._made:
            self._op.scope = f"{value.name}/late"
            last = self._graph[-1]
            self._made[value, gate] = self._copy(value, flag_of(self._op, gate))
            while self._graph[-1] is not last:
                written.append(self._graph[-1])
                self._graph.remove(self._graph[-1])
            node.prepend(reversed(written))
        node.replace_input_with(index, self._made[value, gate])
        return [str(v.name) for new in written for v in new.outputs]

    def _gate(self, node: ir.Node) -> ir.Value | None:
        """Return data that a node reads, from outside of the group that a kernel stands in for."""
        group = place_of(node)
        waiting = [node]
        seen = {node}
        while waiting:
            for value in waiting.pop(0).inputs:
                if value is None or is_constant(value):
                    continue
                maker = value.producer()
                if maker in self._expansions.nodes:
                    continue
                own = None if maker is None else place_of(maker)
                if maker is None or group is None or own is None or own[0] is not group[0]:
                    return value
                if maker not in seen:
                    seen.add(maker)
                    waiting.append(maker)
        return None

    def _copy(self, value: ir.Value, flag: ir.Value) -> ir.Value:
        """Write the nodes behind a value again, from integers that wait for a flag."""
        if is_large_integer(value):
            dims = static_dims(value)
            assert dims is not None
            return wait_for(self._op, flag, value, dims)
        node = value.producer()
        if node is None or value not in self._expansions.from_integers:
            return value
        inputs = list(node.inputs)
        if node.op_type == "DequantizeLinear" and inputs[0] is not None and is_constant(inputs[0]):
            # No runtime reshapes integers of 4 bits; the scales wait for them.
            assert inputs[1] is not None
            inputs[1] = wait_for(self._op, flag, inputs[1], static_dims(inputs[1]) or [1])
        else:
            inputs = [None if v is None else self._copy(v, flag) for v in inputs]
        return self._again(node, inputs, value)

    def _again(self, node: ir.Node, inputs: list[ir.Value | None], value: ir.Value) -> ir.Value:
        """Write a node once more, with other inputs."""
        names = self._op.names
        copy = ir.Node(
            node.domain, node.op_type, inputs, list(node.attributes.values()),
            num_outputs=len(node.outputs), name=names.fresh(f"{node.name or node.op_type}_late"),
        )  # fmt: skip
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            new.name = names.fresh(f"{old.name}_late")
            new.type, new.shape = old.type, None if old.shape is None else old.shape.copy()
        self._graph.append(copy)
        return copy.outputs[list(node.outputs).index(value)]

    # ---- what stays ------------------------------------------------------------------------------

    def move_to_front(self, value: ir.Value) -> None:
        """Put an expansion to the front of the file: of what a node needs, that is run last."""
        node = value.producer()
        assert node is not None
        reads_nodes = any(v is not None and v.producer() is not None for v in node.inputs)
        if node not in self._moved and not reads_nodes:
            self._moved.add(node)
            self._graph.remove(node)
            self._graph[0].prepend(node)
