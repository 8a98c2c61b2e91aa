"""Linear layers on sequences: one Gemm instead of Transpose, MatMul and Add; and their kernels.

Exporters write a layer on (batch, sequence, features) as a product with the transposed weight, and
add the bias in a pass of its own. On rows of features it is one Gemm, whose gradients are two more
and need no transposed copies. onnxruntime does the same for constant weights, but not for these.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import optional
from onnxtrain.offline.graph.kernels import mark_kernel, place_of
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.quantized_operators import MICROSOFT, is_plain_product
from onnxtrain.offline.graph.shapes import dims_of, integers, is_float, static_dims
from onnxtrain.offline.graph.subgraphs import replace_node


class _Layer(NamedTuple):
    product: ir.Node
    x: ir.Value
    weight: ir.Value  # [in, out], or [out, in] where it is transposed
    bias: ir.Value
    transposed: bool


def join_linear_layers(model: ir.Model) -> None:
    """Replace MatMul and Add by Gemm where they are a linear layer on more than two axes."""
    graph = model.graph
    for addition in [n for n in graph if n.op_type == "Add" and n.domain == ""]:
        layer = _layer_of(addition)
        if layer is not None:
            _replace(Ops(graph, model.opset_imports[""]), addition, layer)


def _layer_of(addition: ir.Node) -> _Layer | None:
    for first, second in (addition.inputs, reversed(addition.inputs)):
        product = None if first is None else first.producer()
        if product is None or second is None or product.op_type != "MatMul" or product.domain:
            continue
        x, w = product.inputs
        if first is None or len(first.uses()) > 1 or first.is_graph_output() or not (x and w):
            continue
        weight, transposed = _weight(w)
        layer = _Layer(product, x, weight, second, transposed)
        if _fits(layer):
            return layer
    return None


def _weight(w: ir.Value) -> tuple[ir.Value, bool]:
    producer = w.producer()
    if producer is not None and producer.op_type == "Transpose" and producer.domain == "":
        source = producer.inputs[0]
        if source is not None and len(static_dims(source) or ()) == 2:
            return source, True
    return w, False


def _fits(layer: _Layer) -> bool:
    weight, bias = static_dims(layer.weight), static_dims(layer.bias)
    if weight is None or bias is None or len(weight) != 2 or not is_float(layer.x):
        return False
    depth, width = reversed(weight) if layer.transposed else weight
    dims = dims_of(layer.x)
    same_type = layer.x.dtype == layer.weight.dtype == layer.bias.dtype
    known = dims is not None and len(dims) > 2 and dims[-1] == depth
    return bool(known and bias == (width,) and same_type and 0 not in weight)


def _replace(op: Ops, addition: ir.Node, layer: _Layer) -> None:
    """Write the layer anew in the place of the addition."""
    x = layer.x
    dims = op.dims(x)
    depth, width = dims[-1], static_dims(layer.bias)
    assert isinstance(depth, int) and width is not None
    last = op.target[-1]
    op.scope = layer.product.name or addition.name or str(addition.outputs[0].name)
    lead = integers(dims[:-1])
    count = ir.SymbolicDim(None) if lead is None else math.prod(lead)
    rows = op.with_dims(op.reshape(x, [-1, depth]), [count, depth])
    made = op.Gemm(rows, layer.weight, layer.bias, transB=int(layer.transposed))
    made.type = x.type
    op.with_dims(made, [count, *width])
    symbolic = [d for d in dims[:-1] if not isinstance(d, int)]
    if len(symbolic) <= 1:
        target = op.int64([d if isinstance(d, int) else -1 for d in dims[:-1]] + list(width))
    else:
        target = op.dims_vector(*(op.dim(x, axis) for axis in range(len(dims) - 1)), *width)
    result = op.Reshape(made, target)
    replace_node(addition, [result], last)


# ---- kernels -------------------------------------------------------------------------------------

_LEAST_SIZE = 32  # of a product's sides: smaller ones gain nothing


def mark_products(graph: ir.Graph) -> None:
    """Mark the products of matrices that no other group has, for a kernel that rounds to bfloat16.

    In float32 they stay as they are: onnxruntime's own product is as fast.
    """
    for node in graph.all_nodes():
        if node.op_type in ("Gemm", "MatMul") and node.domain == "" and place_of(node) is None:
            _mark_product(node)


def _mark_product(node: ir.Node) -> None:
    a, b, *rest = node.inputs
    bias = rest[0] if rest else None
    left, right = (None if v is None else dims_of(v) for v in (a, b))
    if a is None or b is None or left is None or right is None or len(right) != 2:
        return
    factors = {name: node.attributes.get_float(name, 1.0) for name in ("alpha", "beta")}
    transposed = [int(node.attributes.get_int(name, 0) != 0) for name in ("transA", "transB")]
    row = None if bias is None else static_dims(bias)
    columns = right[1 - transposed[1]]
    fits = len(left) == 2 or (len(left) > 2 and node.op_type == "MatMul")
    fits = fits and factors["alpha"] == 1.0 and (bias is None or factors["beta"] == 1.0)
    fits = fits and (bias is None or (row is not None and len(row) == 1 and row[0] == columns))
    if not fits or any(isinstance(d, int) and d < _LEAST_SIZE for d in (*left[-2:], *right)):
        return
    values = [v for v in (a, b, bias) if v is not None]
    mark_kernel(
        [node], "MatMul", values, node.outputs[:1],
        transA=transposed[0], transB=transposed[1], has_bias=int(bias is not None),
    )  # fmt: skip


def mark_quantized_products(graph: ir.Graph) -> None:
    """Mark the products with quantized weights, for a kernel that reads these where they are.

    onnxruntime's own has a copy of them, in an order of its own, beside those that the backward
    pass reads: 103 MB for a language model whose file has 87.
    """
    for node in graph.all_nodes():
        is_product = (node.domain, node.op_type) == (MICROSOFT, "MatMulNBits")
        if is_product and is_plain_product(node) and optional(node, 5) is None:
            read = node.attributes
            mark_kernel(
                [node], "NBitsProduct", [v for v in node.inputs if v is not None], node.outputs,
                N=read["N"].as_int(), K=read["K"].as_int(), block_size=read["block_size"].as_int(),
                bits=read.get_int("bits", 4), accuracy_level=read.get_int("accuracy_level", 0),
            )  # fmt: skip
