"""The last passes over a graph that native kernels run in: more and larger groups, and rounding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import onnx_ir as ir

from onnxtrain.offline.graph.kernels import add_kernel_attributes
from onnxtrain.offline.passes.frozen_blocks import mark_frozen_blocks
from onnxtrain.offline.passes.kernel_fusion import join_kernels
from onnxtrain.offline.passes.linear_layers import mark_products, mark_quantized_products

Precision = Literal["float32", "bf16"]

_PRODUCTS = frozenset(  # kernels with bf16
    {"Conv", "ConvGradInput", "ConvGradWeight", "BatchNormConvGradWeight", "MatMul"}
    | {"Attention", "AttentionOrZero", "AttentionGrad"}
)


def fit_graphs(models: Mapping[str, ir.Model], precision: Precision) -> list[str]:
    """Fit the graphs of a folder to kernels; return the names of those that call them.

    What is exported for inference comes from the evaluation graph, which stays plain.
    """
    called = [name for name in models if name != "eval_model"]
    for name in called:
        fit_to_kernels(models[name].graph, precision)
    return called


def fit_to_kernels(graph: ir.Graph, precision: Precision = "float32") -> None:
    """Mark products as groups, join groups with what stands next to them, and say what they round.

    With the precision "bf16", kernels round what they multiply to bfloat16 where the processor has
    instructions for it; the plain nodes do not.
    """
    if precision == "bf16":
        mark_products(graph)
    mark_quantized_products(graph)
    mark_frozen_blocks(graph)
    join_kernels(graph)
    if precision == "bf16":
        add_kernel_attributes(graph.all_nodes(), _PRODUCTS, bf16=1)
