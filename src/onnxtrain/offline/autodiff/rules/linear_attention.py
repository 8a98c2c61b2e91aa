"""The rule of LinearAttention: attention with a matrix as its state instead of a cache of keys.

For each head, with the decay exp(g), and with the beta of the delta rules,

    R = exp(g) S₋,    u = beta (v - Rᵀ k),    S = R + k uᵀ,    o = scale qᵀ S

(without decay R = S₋, without beta u = v). The states are computed once more, along the sequence;
a second Scan runs against it with the cotangent of the state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import Cotangents, optional, required, rule
from onnxtrain.offline.autodiff.rules.recurrence import scan
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import UNKNOWN, Dim

Elements = Mapping[str, ir.Value]


@rule("LinearAttention", since=27)
def linear_attention(
    op: Ops, node: ir.Node, do: ir.Value | None, d_present: ir.Value | None = None
) -> Cotangents:
    """Walk the recurrence back; see the head of this file."""
    query, key, value = required(node, 3)
    past, decay, beta = (optional(node, i) for i in (3, 4, 5))
    layer = _Layer(op, node, query, value)
    along: dict[str, ir.Value] = {
        "k": layer.by_step(key, layer.groups, column=True),
        "v": layer.by_step(value, layer.groups, row=True),
    }
    if decay is not None:
        along["e"] = op.Exp(layer.by_step(decay, layer.groups, column=True))
    if beta is not None:
        along["beta"] = layer.by_step(beta, -1, row=True)

    def forward(state: ir.Value, at: Elements) -> Sequence[ir.Value]:
        kept, u, _ = _write(op, state, at)
        state = op.Add(kept, op.MatMul(at["k"], u))
        return state, op.Identity(state)

    first = layer.first_state(past)
    _, states = scan(op, forward, [first], along, back=False)
    before = op.Concat(op.unsqueeze(first, [0]), op.slice(states, 0, 0, -1), axis=0)
    before = op.type_as(before, states)
    q = layer.by_step(query, layer.heads)
    d_last = op.zeros_like(first) if d_present is None else op.cast(d_present, first.dtype)
    backward = {**along, "before": before}
    if do is not None:
        backward["q"], backward["do"] = q, layer.by_step(do, layer.heads)
    results = scan(op, _backward(op, layer.scale), [d_last], backward, back=True)
    d_first, collected = results[0], dict(zip(along, results[1:], strict=True))
    dq = None
    if do is not None:
        dq = op.MatMul(backward["do"], op.transpose(states, [0, 1, 2, 4, 3])) * layer.scale
        dq = layer.back(dq, query)
    return (
        dq,
        layer.back(collected["k"], key),
        layer.back(collected["v"], value),
        None if past is None else op.cast(d_first, past.dtype),
        None if decay is None else layer.back(collected["e"], decay),
        None if beta is None else layer.back(collected["beta"], beta),
    )


def _write(op: Ops, before: ir.Value, at: Elements) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return R, u and v - Rᵀ k of one step."""
    kept = op.Mul(before, at["e"]) if "e" in at else before
    if "beta" not in at:
        return kept, at["v"], at["v"]
    error = op.Sub(at["v"], op.MatMul(op.swap_last(at["k"]), kept))
    return kept, op.Mul(error, at["beta"]), error


def _backward(op: Ops, scale: ir.Value) -> Callable[[ir.Value, Elements], Sequence[ir.Value]]:
    """Return the step against the sequence: the cotangent of S in, that of S₋ out.

    It also returns those of k and v, and of g and beta where they are.
    """

    def step(ds: ir.Value, at: Elements) -> Sequence[ir.Value]:
        if "do" in at:
            ds = op.Add(ds, op.MatMul(op.swap_last(at["q"]), op.Mul(at["do"], scale)))
        kept, u, error = _write(op, at["before"], at)
        dk = op.MatMul(ds, op.swap_last(u))
        du = op.MatMul(op.swap_last(at["k"]), ds)
        dv, dr, more = du, ds, []
        if "beta" in at:
            dv = op.Mul(du, at["beta"])
            more = [op.Mul(du, error)]
            dk = op.Sub(dk, op.MatMul(kept, op.swap_last(dv)))
            dr = op.Sub(ds, op.MatMul(at["k"], dv))
        if "e" not in at:
            return dr, dk, dv, *more
        dg = op.ReduceSum(op.Mul(dr, kept), [3], keepdims=1)
        return op.Mul(dr, at["e"]), dk, dv, dg, *more

    return step


class _Layer:
    """Sizes of one node, and the way from (batch, length, width) to steps and back."""

    def __init__(self, op: Ops, node: ir.Node, query: ir.Value, value: ir.Value) -> None:
        self.op = op
        self.heads = node.attributes.get_int("q_num_heads")
        self.groups = node.attributes.get_int("kv_num_heads")
        self.query, self.value = query, value
        self.size = self._share(op.dims(query)[2], self.heads)
        self.width = self._share(op.dims(value)[2], self.groups)
        self.scale = self._scale(node)

    @staticmethod
    def _share(dim: Dim, count: int) -> Dim:
        return dim // count if isinstance(dim, int) else UNKNOWN

    def _scale(self, node: ir.Node) -> ir.Value:
        op, given = self.op, node.attributes.get_float("scale", 0.0)
        if given:
            return op.const(given, ir.DataType.FLOAT)
        if isinstance(self.size, int):
            return op.const(1.0 / math.sqrt(self.size), ir.DataType.FLOAT)
        size = op.Cast(self._size(self.query, self.heads), to=ir.DataType.FLOAT)
        return op.Reciprocal(op.Sqrt(size))

    def _size(self, x: ir.Value, heads: int) -> ir.Value:
        return self.op.Div(self.op.dim(x, 2), self.op.int64(heads))

    def by_step(self, x: ir.Value, heads: int, column: bool = False, row: bool = False) -> ir.Value:
        """Return (length, batch, heads of keys, …) as float32.

        What follows is a column or a row for each head; for queries a matrix, with one row for each
        head that shares a head of keys. `heads` -1 stands for one number for each head.
        """
        op = self.op
        wide = op.cast(x, ir.DataType.FLOAT)
        if heads == -1:
            shape: list[int] = [0, 0, -1, 1, 1]
        elif column:
            shape = [0, 0, heads, -1, 1]
        elif row:
            shape = [0, 0, heads, 1, -1]
        else:
            shape = [0, 0, self.groups, heads // self.groups, -1]
        return op.transpose(op.Reshape(wide, shape), [1, 0, 2, 3, 4])

    def back(self, dx: ir.Value, like: ir.Value) -> ir.Value:
        """Bring a cotangent of steps to the shape of the input, summing what was broadcast."""
        op, whole = self.op, self.op.transpose(dx, [1, 0, 2, 3, 4])
        # A decay or a beta may be one number for each head, or for all of them.
        rows = op.Reshape(whole, op.dims_vector(0, 0, op.dim(like, 2), -1))
        return op.cast(op.shape_as(op.ReduceSum(rows, [3], keepdims=0), like), like.dtype)

    def first_state(self, past: ir.Value | None) -> ir.Value:
        """Return the state before the first step."""
        op = self.op
        dims = (op.dims(self.query)[0], self.groups, self.size, self.width)
        if past is not None:
            return op.with_dims(op.cast(past, ir.DataType.FLOAT), dims)
        shape = op.dims_vector(
            op.dim(self.query, 0), self.groups, self._size(self.query, self.heads),
            self._size(self.value, self.groups),
        )  # fmt: skip
        return op.with_dims(op.Expand(op.const(0.0, ir.DataType.FLOAT), shape), dims)
