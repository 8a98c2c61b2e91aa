"""Rules for Fourier transforms.

The transform is linear, so its gradient is the adjoint. For the plain transform of length L that is
the other direction of the same transform: L times the inverse of the forward one, and 1/L times the
forward of the inverse one. Complex numbers are pairs in the last axis.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import Cotangents, optional, required, rule
from onnxtrain.offline.autodiff.rules.scatter_helpers import pad, scatter
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import UNKNOWN, constant_array
from onnxtrain.offline.graph.sizes import arange


@rule("DFT", stops=(1, 2), notes="one-sided and inverse, padded or cut by dft_length")
def dft(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """The adjoint transform, cut or padded to the length of the input.

    Where only run time tells the axis, each axis that it may be is a branch.
    """
    (x,) = required(node)
    axis = _dft_axis(op, node, x)
    if axis is not None:
        return (_dft_along(op, node, dy, axis),)
    given = op.Mod(op.cast(node.inputs[2], ir.DataType.INT64), op.int64(op.rank(x)))  # type: ignore[arg-type]

    def choose(number: int) -> ir.Value:
        if number == op.rank(x) - 2:  # the last axis has the parts of complex numbers
            return _dft_along(op, node, dy, number)
        here = op.Equal(op.Reshape(given, op.int64([])), op.int64(number))
        then = op.body([], lambda: [_dft_along(op, node, dy, number)], "this_axis")
        later = op.body([], lambda: [choose(number + 1)], "later_axis")
        return op.call("If", here, like=x, then_branch=then, else_branch=later)[0]

    return (choose(0),)


def _dft_along(op: Ops, node: ir.Node, dy: ir.Value, axis: int) -> ir.Value:
    (x,) = required(node)
    inverse = node.attributes.get_int("inverse", 0)
    onesided = node.attributes.get_int("onesided", 0)
    if inverse and onesided:
        spectrum = _adjoint_of_real_inverse(op, dy, axis)
        return _fit(op, spectrum, x, axis)
    given = optional(node, 1)
    length = op.dim(x, axis) if given is None else _as_int64_vector(op, given)
    if onesided:
        dy = pad(op, dy, {axis: (0, op.Sub(length, op.dim(dy, axis)))})
    scale = op.Cast(length, to=dy.dtype)
    transformed = _transform(op, dy, axis, inverse=1 - inverse)
    whole = transformed / scale if inverse else transformed * scale
    return _real_if(op, _fit(op, whole, x, axis), x)


def _adjoint_of_real_inverse(op: Ops, dy: ir.Value, axis: int) -> ir.Value:
    """Bins between the ends stand for themselves and their mirror image, so they count twice."""
    length = op.dim(dy, axis)
    whole = _transform(op, dy, axis, inverse=0) / op.Cast(length, to=dy.dtype)
    bins = op.Add(op.Div(length, [2]), [1])
    half = op.slice(whole, axis, 0, bins)
    index = arange(op, bins)
    middle = op.And(op.Greater(index, op.int64(0)), op.Less(op.Mul(index, op.int64(2)), length))
    weight = op.Where(middle, op.const(2.0, dy.dtype), op.const(1.0, dy.dtype))
    weight.shape = ir.Shape([None])
    return op.Mul(half, op.unsqueeze(weight, list(range(1, op.rank(dy) - axis))))


@rule("STFT", stops=(1, 3))
def stft(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """Each frame gets the adjoint transform of its spectrum; frames that overlap are added."""
    signal, step = required(node, 2)
    window, given = optional(node, 2), optional(node, 3)
    if given is not None:
        length = _as_int64_vector(op, given)
    else:
        length = op.dim(signal, 1) if window is None else op.dim(window, 0)
    if node.attributes.get_int("onesided", 1):
        dy = pad(op, dy, {2: (0, op.Sub(length, op.dim(dy, 2)))})
    frames = _transform(op, dy, 2, inverse=1) * op.Cast(length, to=dy.dtype)
    frames.shape = ir.Shape([*op.dims(dy)[:2], None, 2])
    frames = _real_if(op, frames, signal)
    # The position in the signal of every element of every frame, flattened.
    starts = op.Mul(arange(op, op.dim(dy, 1)), _as_int64_vector(op, step))
    grid = op.Add(op.unsqueeze(starts, [1]), arange(op, length))
    places = op.with_dims(op.Reshape(grid, [-1]), [UNKNOWN])
    weighted = frames if window is None else frames * op.unsqueeze(window, [1])
    flat = op.reshape(weighted, op.dims_vector(op.dim(signal, 0), -1, op.dim(signal, 2)))
    index = op.Expand(op.unsqueeze(places, [0, 2]), op.Shape(flat))
    dsignal = scatter(op, op.zeros_like(signal), index, flat, axis=1)
    if window is None:
        return (dsignal,)
    picked = op.reshape(op.Gather(signal, places, axis=1), op.Shape(frames))
    dwindow = op.ReduceSum(frames * picked, [0, 1, 3], keepdims=0)
    return dsignal, None, op.type_as(dwindow, window)


def _dft_axis(op: Ops, node: ir.Node, x: ir.Value) -> int | None:
    """Return the axis, or None where it is known at run time only."""
    if op.opset < 20:
        return int(node.attributes.get_int("axis", 1)) % op.rank(x)
    given = optional(node, 2)
    if given is None:
        return op.rank(x) - 2
    known = constant_array(given)
    return None if known is None else int(known.reshape(())) % op.rank(x)


def _as_int64_vector(op: Ops, value: ir.Value) -> ir.Value:
    return op.Reshape(op.cast(value, ir.DataType.INT64), [1])


def _transform(op: Ops, x: ir.Value, axis: int, inverse: int) -> ir.Value:
    if op.opset < 20:
        result = op.DFT(x, axis=axis, inverse=inverse)
    else:
        result = op.DFT(x, None, op.int64(axis), inverse=inverse)
    return op.with_dims(result, [*op.dims(x)[:-1], 2])


def _fit(op: Ops, value: ir.Value, like: ir.Value, axis: int) -> ir.Value:
    """Cut or pad with zeros along an axis, to the size of another value."""
    missing = op.Max(op.Sub(op.dim(like, axis), op.Shape(value, start=axis, end=axis + 1)), [0])
    padded = pad(op, value, {axis: (0, missing)})
    fitted = op.slice(padded, axis, 0, op.dim(like, axis))
    dims = list(op.dims(padded))
    dims[axis] = op.dims(like)[axis]
    return op.with_dims(fitted, dims)


def _real_if(op: Ops, value: ir.Value, like: ir.Value) -> ir.Value:
    """Keep as many parts (real, or real and imaginary) as the other value has."""
    last = op.dims(like)[-1]
    if last == 2:
        return value
    fitted = op.slice(value, -1, 0, op.dim(like, -1))
    return op.with_dims(fitted, [*op.dims(value)[:-1], last])
