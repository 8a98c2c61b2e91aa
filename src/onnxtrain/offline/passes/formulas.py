"""Formulas that exporters write as several nodes, and that get one gradient each."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import Rule
from onnxtrain.offline.passes.gelu import join_gelu
from onnxtrain.offline.passes.rms_norm import join_rms_norm
from onnxtrain.offline.passes.rotary import join_rotary
from onnxtrain.offline.passes.swish import join_swish


def join_formulas(graph: ir.Graph, wanted: Iterable[ir.Value]) -> dict[ir.Node, Rule]:
    """Return the rule of the last node of each formula, which is a product or a sum.

    `wanted` are the values that are differentiated, or with respect to which: where one of them
    lies inside of a formula, each node keeps its own gradient.
    """
    values = frozenset(wanted)
    plain = [node for node in graph if node.domain == ""]
    products = [node for node in plain if node.op_type == "Mul"]
    found = join_rotary((node for node in plain if node.op_type == "Add"), values)
    for join in (join_gelu, join_swish, join_rms_norm):
        found |= join(products, values)
    return found
