"""Which cotangents are finite as long as the forward pass is.

A mask can be applied with Where or as a factor. The product takes half the time in onnxruntime, but
0 · ∞ is NaN, and some gradients are infinite where the function is finite: that of √relu(x) at
x = 0 must be 0, not NaN.

So a rule may multiply only where the cotangent comes through operators that cannot make an infinite
number out of finite ones. Beyond a product with weights, an infinite number has already spoilt all
gradients.
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

    `nodes` are the active ones, in topological order, `edges` the values that each passes a
    gradient to, and `unsure` the outputs whose seed may be infinite.
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
