"""The last passes over a graph that native kernels run in: more and larger groups, and rounding."""

from __future__ import annotations

from typing import Literal

import onnx_ir as ir

from onnxtrain.offline.graph.kernels import add_kernel_attributes
from onnxtrain.offline.passes.kernel_fusion import join_kernels
from onnxtrain.offline.passes.linear_layers import mark_products, mark_quantized_products

Precision = Literal["float32", "bf16"]

_PRODUCTS = frozenset(  # kernels with bf16
    {"Conv", "ConvGradInput", "ConvGradWeight", "BatchNormConvGradWeight", "MatMul"}
    | {"Attention", "AttentionOrZero", "AttentionGrad"}
)


def fit_to_kernels(graph: ir.Graph, precision: Precision = "float32") -> None:
    """Mark products as groups, join groups with what stands next to them, and say what they round.

    With the precision "bf16", kernels round what they multiply to bfloat16 where the processor has
    instructions for it; the plain nodes do not.
    """
    if precision == "bf16":
        mark_products(graph)
    mark_quantized_products(graph)
    join_kernels(graph)
    if precision == "bf16":
        add_kernel_attributes(graph.all_nodes(), _PRODUCTS, bf16=1)
