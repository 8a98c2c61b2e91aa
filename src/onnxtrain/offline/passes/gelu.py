"""Gelu as exporters write it: five nodes, x/2 (1 + erf(x/√2)), that get one gradient.

onnxruntime fuses the five into one kernel, if nothing else reads what lies between them. So the
last of them gets a gradient rule of its own, which reads x alone: nothing between has to be kept,
and the forward pass goes over memory once instead of five times.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import Cotangents, Rule
from onnxtrain.offline.autodiff.rules.activation import gelu_cotangent
from onnxtrain.offline.graph.kernels import mark_kernel
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import constant_array, is_half
from onnxtrain.offline.graph.subgraphs import maker_read_once


def join_gelu(products: Iterable[ir.Node], wanted: Collection[ir.Value]) -> dict[ir.Node, Rule]:
    """Order the nodes of each Gelu for fusion, in place, and return the rule of its last node.

    `wanted` are the values that are differentiated, or with respect to which: where one of them
    lies between the five nodes, or is one of their numbers, each node keeps its own gradient.
    """
    search = _Search(wanted)
    found = {node: search.argument_of_gelu(node) for node in products}
    return {node: _rule(x) for node, x in found.items() if x is not None}


def _rule(x: ir.Value) -> Rule:
    def gradient(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
        mark_kernel(_nodes_from(x, node), "Gelu", [x], [node.outputs[0]])
        return {x: gelu_cotangent(op, x, dy)}

    stops = frozenset({0, 1})  # the gradient goes past the factors, to x
    return Rule(gradient, "Mul", "", 1, False, stops, "Gelu", reaches=lambda _: (x,))


def _nodes_from(x: ir.Value, last: ir.Node) -> list[ir.Node]:
    """Return the nodes between x and the last one, in the order of their values."""
    found: dict[ir.Node, None] = {}
    for value in last.inputs:
        producer = None if value is None or value is x else value.producer()
        if producer is not None and constant_array(value) is None:
            found.update(dict.fromkeys(_nodes_from(x, producer)))
    return [*found, last]


@dataclass(frozen=True)
class _Search:
    wanted: Collection[ir.Value]

    def argument_of_gelu(self, last: ir.Node) -> ir.Value | None:
        """Return x if a Mul is the last node of a Gelu, whatever the order of the factors.

        Not if something between has another reader, or is wanted: then it is computed anyway.
        """
        factors = list(self._factors(last))
        halves = [f for f in factors if self._is_number(f, 0.5)]
        sums = [(f, x) for f in factors if (x := self._argument_of_sum(f)) is not None]
        if len(factors) != 3 or len(halves) != 1 or len(sums) != 1:
            return None
        (summed, x), half = sums[0], halves[0]
        if [f for f in factors if f not in (summed, half)] != [x]:
            return None
        _order_for_fusion(last, x, summed, half)
        return x

    def _factors(self, product: ir.Node, depth: int = 0) -> Iterator[ir.Value]:
        for value in product.inputs:
            assert value is not None
            inner = self._between(value, "Mul")
            if inner is not None and depth < 2:
                yield from self._factors(inner, depth + 1)
            else:
                yield value

    def _argument_of_sum(self, value: ir.Value) -> ir.Value | None:
        """Return x of 1 + erf(x/√2)."""
        for erf in self._other_operand(self._between(value, "Add"), 1.0):
            node = self._between(erf, "Erf")
            scaled = None if node is None else node.inputs[0]
            if scaled is None:
                continue
            divided = self._between(scaled, "Div")
            if divided is not None and self._is_number(divided.inputs[1], math.sqrt(2.0)):
                return divided.inputs[0]
            product = self._between(scaled, "Mul")
            return next(self._other_operand(product, math.sqrt(0.5)), None)
        return None

    def _other_operand(self, node: ir.Node | None, number: float) -> Iterator[ir.Value]:
        """Yield the operand beside a number."""
        if node is not None:
            first, second = node.inputs
            for value, other in ((first, second), (second, first)):
                if value is not None and self._is_number(other, number):
                    yield value

    def _between(self, value: ir.Value, op_type: str) -> ir.Node | None:
        """Return the node of a kind that makes a value, if the value is read once and unwanted."""
        return maker_read_once(value, op_type) if value not in self.wanted else None

    def _is_number(self, value: ir.Value | None, number: float) -> bool:
        array = None if value is None or value in self.wanted else constant_array(value)
        if value is None or array is None or array.size != 1:
            return False
        return math.isclose(array.item(), number, rel_tol=1e-3 if is_half(value) else 1e-6)


def _order_for_fusion(last: ir.Node, x: ir.Value, summed: ir.Value, half: ir.Value) -> None:
    """Write x (sum / 2) as (x sum) / 2, which is the same number and what onnxruntime looks for."""
    for inner in last.inputs:
        producer = None if inner is None else inner.producer()
        if producer is not None and {*producer.inputs} == {summed, half}:
            for node, operands in ((producer, (x, summed)), (last, (inner, half))):
                for index, operand in enumerate(operands):
                    node.replace_input_with(index, operand)
            return
