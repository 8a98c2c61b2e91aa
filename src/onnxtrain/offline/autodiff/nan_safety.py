"""Which cotangents are finite as long as training is.

A mask can select with Where or be multiplied with. Multiplying takes half of the time in
onnxruntime, but 0 · ∞ is not a number, and there are gradients that are infinite at a point where
the function itself is not: that of √relu(x) at x = 0 must be 0, not NaN.

So a rule may multiply only where the cotangent that it masks comes through operators that cannot
make an infinite number out of finite ones. Behind a product with weights, an infinite number has
spoilt all gradients anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from onnxtrain.offline.graph.op_facts import BOUNDED_GRADIENT, LINEAR


def finite_cotangents(
    nodes: Sequence[ir.Node],
    edges: Mapping[ir.Node, Sequence[ir.Value]],
    unsure: Iterable[ir.Value],
) -> set[ir.Value]:
    """Return the values whose cotangents are finite if all forward values are.

    `nodes` are those that gradients pass, in topological order, `edges` the values that each passes
    a gradient to, and `unsure` the values whose own seed may be anything.
    """
    doubtful = set(unsure)
    met: set[ir.Value] = set()
    for node in reversed(nodes):
        met.update(node.outputs, edges[node])
        if not _keeps_finite(node, doubtful):
            doubtful.update(edges[node])
    return met - doubtful


def _keeps_finite(node: ir.Node, doubtful: set[ir.Value]) -> bool:
    if node.domain != "":
        return False
    if node.op_type in LINEAR:  # its gradient mixes all elements: an infinity reaches every weight
        return True
    return node.op_type in BOUNDED_GRADIENT and not any(v in doubtful for v in node.outputs)
