"""Products and convolutions with what onnxruntime fuses into them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.autodiff.definitions import Maybe, NotExpandable
from onnxtrain.offline.frontend.fused.activations import (
    activation,
    fast_gelu,
    prefixed_activation,
)
from onnxtrain.offline.frontend.fused.domain import fused
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import dims_of


@fused("FusedMatMul", "TransposeMatMul", "FusedMatMulActivation", ranks=(0, 1))
def fused_matmul(op: Ops, node: ir.Node, a: ir.Value, b: ir.Value) -> ir.Value:
    """alpha A B with either side transposed, and an optional activation."""
    softmax = node.attributes.get_string("activation", "") == "Softmax"
    act = None if softmax else prefixed_activation(op, node)
    y = op.MatMul(_transposed(op, node, a, "A"), _transposed(op, node, b, "B"))
    alpha = node.attributes.get_float("alpha", 1.0)
    y = y if alpha == 1.0 else y * alpha
    return act(y) if act else op.Softmax(y, axis=node.attributes.get_int("activation_axis", -1))


def _transposed(op: Ops, node: ir.Node, x: ir.Value, side: str) -> ir.Value:
    """Move the first axis behind the batch axes (transBatch), then swap the last two (trans)."""
    axes = list(range(op.rank(x)))
    if len(axes) < 2:
        return x  # onnxruntime transposes no vectors
    if node.attributes.get_int(f"transBatch{side}", 0):
        axes = [*axes[1:-1], axes[0], axes[-1]]
    if node.attributes.get_int(f"trans{side}", 0):
        axes = [*axes[:-2], axes[-1], axes[-2]]
    return op.transpose(x, axes)


@fused("GemmFastGelu")
def gemm_fast_gelu(
    op: Ops, node: ir.Node, x: ir.Value, w: ir.Value, bias: Maybe = None
) -> ir.Value:
    """FastGelu of X W + bias."""
    return fast_gelu(op, node, op.MatMul(x, w), bias)


@fused("FusedGemm", lacking="an activation that onnxruntime's CPU kernel does not have")
def fused_gemm(op: Ops, node: ir.Node, a: ir.Value, b: ir.Value, c: Maybe = None) -> ir.Value:
    """Gemm with an activation."""
    act = prefixed_activation(op, node)
    kept = _attributes(node, "alpha", "beta", "transA", "transB")
    return act(op.Gemm(a, b, *([] if c is None else [c]), **kept))


@fused("FusedConv", lacking="an activation that onnxruntime's CPU kernel does not have")
def fused_conv(
    op: Ops, node: ir.Node, x: ir.Value, w: ir.Value, b: Maybe = None, z: Maybe = None
) -> ir.Value:
    """The activation of Conv(X, W, B) + Z."""
    return _activated(op, node, _conv(op, node, x, w, b), z)


@fused(
    "NhwcConv",
    "NhwcFusedConv",
    ranks=(0,),
    lacking="weights in a layout that the shapes do not tell, or an unknown activation",
)
def nhwc_conv(
    op: Ops, node: ir.Node, x: ir.Value, w: ir.Value, b: Maybe = None, z: Maybe = None
) -> ir.Value:
    """The same with the channels last in X, Z and Y.

    The weights of NhwcConv may be in either layout (the one that onnxruntime's optimizer writes
    depends on its settings); it is expanded where the shapes tell which.
    """
    channels, spatial = op.rank(x) - 1, list(range(1, op.rank(x) - 1))
    if node.op_type == "NhwcConv" and _channels_last(node, x, w):
        w = op.transpose(w, [0, channels, *spatial])
    y = _conv(op, node, op.transpose(x, [0, channels, *spatial]), w, b)
    return _activated(op, node, op.transpose(y, [0, *range(2, channels + 1), 1]), z)


def _channels_last(node: ir.Node, x: ir.Value, w: ir.Value) -> bool:
    dims, channels = dims_of(w), (dims_of(x) or (None,))[-1]
    if dims is None or not isinstance(channels, int):
        raise NotExpandable("weights of unknown layout")
    per_group = channels // node.attributes.get_int("group", 1)
    first, last = dims[1] == per_group, dims[-1] == per_group
    if first == last:
        raise NotExpandable("weights of ambiguous layout")
    return last


def _conv(op: Ops, node: ir.Node, x: ir.Value, w: ir.Value, b: Maybe) -> ir.Value:
    kept = _attributes(node, "auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    return op.call("Conv", x, w, *([] if b is None else [b]), **kept)[0]


def _activated(op: Ops, node: ir.Node, y: ir.Value, z: Maybe) -> ir.Value:
    parameters = node.attributes.get_floats("activation_params", [])
    act = activation(op, node.attributes.get_string("activation", ""), parameters)
    return act(y if z is None else op.Add(y, z))


def _attributes(node: ir.Node, *names: str) -> dict[str, Any]:
    return {n: node.attributes[n].value for n in names if n in node.attributes}


@fused("MatMulNBits", lacking="group indices, prepacked weights, or 3, 5, 6 or 7 bits")
def matmul_n_bits(
    op: Ops,
    node: ir.Node,
    a: ir.Value,
    b: ir.Value,
    scales: ir.Value,
    zero_points: Maybe = None,
    g_idx: Maybe = None,
    bias: Maybe = None,
) -> ir.Value:
    """A Wᵀ + bias with W = (quantized - zero point) scale, unpacked from its bytes.

    The scales stay differentiable; the quantized numbers are integers and do not train.
    """
    bits, block = node.attributes.get_int("bits", 4), node.attributes.get_int("block_size")
    rows, columns = node.attributes.get_int("N"), node.attributes.get_int("K")
    prepacked = node.attributes.get_int("weight_prepacked", 0)
    if g_idx is not None or prepacked or bits not in (2, 4, 8):
        raise NotExpandable("group indices, prepacked weights, or bits other than 2, 4, 8")
    blocks = -(-columns // block)
    numbers = op.cast(_unpack(op, op.reshape(b, [rows, -1]), rows, bits), a.dtype)
    numbers = op.reshape(numbers, [rows, blocks, block])
    zero: ir.Value | float = float(2 ** (bits - 1))
    if zero_points is not None:
        if zero_points.dtype == ir.DataType.UINT8:
            packed = op.reshape(zero_points, [rows, -1])
            zero_points = op.slice(_unpack(op, packed, rows, bits), 1, 0, blocks)
        zero = op.reshape(op.cast(zero_points, a.dtype), [rows, blocks, 1])
    weight = (numbers - zero) * op.reshape(scales, [rows, blocks, 1])
    weight = op.reshape(weight, [rows, blocks * block])
    if blocks * block != columns:
        weight = op.slice(weight, 1, 0, columns)
    y = op.MatMul(a, op.transpose(weight, [1, 0]))
    return y if bias is None else op.Add(y, bias)


def _unpack(op: Ops, packed: ir.Value, rows: int, bits: int) -> ir.Value:
    """Split each byte of a matrix into numbers of fewer bits, the lowest first."""
    if bits == 8:
        return packed
    mask = op.const(np.array(2**bits - 1, np.uint8))
    parts = [packed]
    for shift in range(bits, 8, bits):
        amount = op.const(np.array(shift, np.uint8))
        parts.append(op.call("BitShift", packed, amount, like=packed, direction="RIGHT")[0])
    stacked = op.Concat(*[op.unsqueeze(op.BitwiseAnd(p, mask), [2]) for p in parts], axis=2)
    return op.reshape(stacked, [rows, -1])
