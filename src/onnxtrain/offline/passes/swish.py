"""SiLU as exporters write it: x · sigmoid(x), two nodes that get one gradient.

The nodes of the gradient are those that the two would have by themselves, in the same order. As
one group, a native kernel can stand in for them that reads x alone: then the sigmoid is not kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import Cotangents, Rule
from onnxtrain.offline.graph.kernels import mark_kernel
from onnxtrain.offline.graph.ops import Ops


def join_swish(products: Iterable[ir.Node], wanted: Collection[ir.Value]) -> dict[ir.Node, Rule]:
    """Return a rule for each Mul that is the last node of a SiLU.

    `wanted` are the values that are differentiated, or with respect to which.
    """
    found = {product: _sigmoid_of(product, wanted) for product in products}
    return {product: _rule(node) for product, node in found.items() if node is not None}


def _sigmoid_of(product: ir.Node, wanted: Collection[ir.Value]) -> ir.Node | None:
    """Return the Sigmoid of a product x · sigmoid(x), if nobody else reads x or the sigmoid."""
    a, b = product.inputs
    for x, s in ((a, b), (b, a)):
        node = None if s is None else s.producer()
        if x is None or s is None or node is None or (node.domain, node.op_type) != ("", "Sigmoid"):
            continue
        alone = len(s.uses()) == 1 and len(x.uses()) == 2
        inner = not (s.is_graph_output() or x.is_graph_output() or s in wanted)
        if node.inputs[0] is x and alone and inner:
            return node
    return None


def _rule(sigmoid: ir.Node) -> Rule:
    (x,), (s,) = sigmoid.inputs, sigmoid.outputs
    assert x is not None

    def gradient(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
        def write() -> list[ir.Value]:
            """Write what the rules of both nodes would, and add it up."""
            factors = [dy * v for v in reversed(node.inputs)]
            to_x, to_s = factors if node.inputs[0] is x else factors[::-1]
            return [op.add_all([to_x, to_s * s * (1.0 - s)])]

        mark_kernel([sigmoid, node], "Swish", [x], [node.outputs[0], s], saved=[s], alpha=1.0)
        (dx,) = op.kernel("SwishGrad", [dy, x, s], write, saved=[s], alpha=1.0)
        return {x: op.keep_zeros(dx, dy)}

    stops = frozenset({0, 1})  # the gradient goes past the factors, to x
    return Rule(gradient, "Mul", "", 1, False, stops, "SiLU", reaches=lambda _: (x,))
