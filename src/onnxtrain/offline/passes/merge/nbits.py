"""The weights of com.microsoft's MatMulNBits: blocks of integers of 4 or 8 bits, in bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from onnxtrain.offline.passes.lora.graph_index import attribute
from onnxtrain.offline.passes.merge.requantize import Grid
from onnxtrain.offline.passes.merge.tensors import Tensors

Array = npt.NDArray[Any]
_WEIGHTS, _SCALES, _ZEROS, _BIAS = 1, 2, 3, 5


def expand_nbits(
    node: onnx.NodeProto, tensors: Tensors
) -> tuple[Array, Grid, Callable[[Array], Array]]:
    """Return the weights `[N, K]`, how they are quantized, and what puts such into blocks."""
    rows, columns, bits, block = _sizes(node)
    count = -(-columns // block)
    integers = _unpacked(tensors.array(node.input[_WEIGHTS]).reshape(rows, count, -1), bits)
    scale = tensors.array(node.input[_SCALES]).reshape(rows, count, 1)
    zero, is_float = np.full((1, 1, 1), 1 << (bits - 1), np.float32), False
    has_zeros = len(node.input) > _ZEROS and bool(node.input[_ZEROS])
    if has_zeros:
        given = tensors.array(node.input[_ZEROS])
        is_float = given.dtype != np.uint8
        packed = given.reshape(rows, -1)
        zero = (packed if is_float else _unpacked(packed, bits))[:, :count].astype(np.float32)
        zero = zero.reshape(rows, count, 1)
    grid = Grid(scale, zero, 0, (1 << bits) - 1, not has_zeros, is_float)
    weights = grid.values(integers).reshape(rows, -1)[:, :columns]

    def blocked(weights: Array) -> Array:
        padded = np.pad(weights, ((0, 0), (0, count * block - columns)))
        return padded.reshape(rows, count, block)

    return weights, grid, blocked


def put_nbits(
    node: onnx.NodeProto, integers: Array, scales: Array, zeros: Array, tensors: Tensors
) -> None:
    """Store weights that were quantized again in the places and types of the old ones."""
    rows, _, bits, _ = _sizes(node)
    for place, value in ((_WEIGHTS, integers), (_SCALES, scales), (_ZEROS, zeros)):
        if place == _ZEROS and (len(node.input) <= _ZEROS or not node.input[_ZEROS]):
            continue
        old = tensors.array(node.input[place])
        new = value
        if place == _WEIGHTS:
            new = _packed(value.astype(np.uint8), bits)
        elif place == _ZEROS and old.dtype == np.uint8:
            new = _packed(value.astype(np.uint8).reshape(rows, -1), bits)
        tensors.put(node.input[place], new.astype(old.dtype).reshape(old.shape), [node], place)


def write_float_product(
    node: onnx.NodeProto, weights: Array, tensors: Tensors, behind: dict[str, list[onnx.NodeProto]]
) -> None:
    """Make a plain MatMul of a node, with its bias added behind it."""
    dtype = tensors.array(node.input[_SCALES]).dtype
    bias = node.input[_BIAS] if len(node.input) > _BIAS else ""
    old = node.input[_WEIGHTS]
    tensors.put(old, weights.astype(dtype), [node], _WEIGHTS)
    x, product = node.input[0], node.input[_WEIGHTS]
    del node.input[:]
    del node.attribute[:]
    node.op_type, node.domain = "MatMul", ""
    node.input.extend([x, product])
    if bias:
        result = node.output[0]
        node.output[0] = tensors.names.fresh(f"{result}.product")
        behind[node.output[0]] = [helper.make_node("Add", [node.output[0], bias], [result])]


def _sizes(node: onnx.NodeProto) -> tuple[int, int, int, int]:
    return (
        attribute(node, "N", 0), attribute(node, "K", 0), attribute(node, "bits", 4),
        attribute(node, "block_size", 32),
    )  # fmt: skip


def _unpacked(data: Array, bits: int) -> Array:
    """Return the integers in bytes, the first in the lowest bits, along the last axis."""
    if bits == 8:
        return data
    each = 8 // bits
    parts = [(data >> (bits * i)) & ((1 << bits) - 1) for i in range(each)]
    return np.stack(parts, -1).reshape(*data.shape[:-1], -1)


def _packed(integers: Array, bits: int) -> Array:
    if bits == 8:
        return integers
    each = 8 // bits
    length = integers.shape[-1]
    padded = np.pad(integers, [(0, 0)] * (integers.ndim - 1) + [(0, -length % each)])
    parts = padded.reshape(*integers.shape[:-1], -1, each)
    made = np.zeros(parts.shape[:-1], np.uint8)
    for i in range(each):
        made |= parts[..., i] << np.uint8(bits * i)
    return made
