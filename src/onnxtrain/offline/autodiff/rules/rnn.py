"""What the recurrent layers share, and the rule of RNN; LSTM and GRU have files of their own.

The forward node stays what it is, one fast kernel. It does not give the gates away, but they need
no second pass through time: the state before each step is known from the output Y, so that one
large matrix product gives the gates of all steps at once.

Given the gates, the derivative of a step is linear in the cotangents that arrive. All that depends
on the forward pass alone goes into coefficients, for all steps together: slopes of activations,
peepholes, coupled gates, clipping, the lengths of the sequences. What is left for the sequential
part, a Scan against the direction of the layer, is a few products of coefficients and cotangents
and one matrix product. It emits the cotangents of the gates; those of X, W, R and B follow from
them by matrix products over all steps.

A step beyond the length of its sequence neither changes the state nor shows in Y. In the reverse
direction such steps come first, so that nothing has to be reversed within its length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import Cotangents, optional, required, rule
from onnxtrain.offline.autodiff.rules.recurrence import Direction, Timeline
from onnxtrain.offline.autodiff.rules.rnn_activations import Activation, activations_of
from onnxtrain.offline.autodiff.rules.rnn_kernels import kernel_of
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import UNKNOWN


@rule("RNN")
def rnn(op: Ops, node: ir.Node, *dys: ir.Value | None) -> Cotangents:
    """H = f(a) with a = X·Wᵀ + H₋·Rᵀ + b, so da = f'(a) dH and dH₋ = da·R."""
    return differentiate_layer(op, node, dys, ["Tanh"], _rnn_direction)


def _rnn_direction(op: Ops, run: Direction) -> Contributions:
    (activation,) = run.activations
    h_before = run.h_before()
    pre = run.affine(run.time.x, run.w, h_before, run.r, run.bias)
    slope = run.where_valid(activation.slope(op, pre, run.y), 0.0)

    def step(dh: ir.Value, at: Mapping[str, ir.Value]) -> Sequence[ir.Value]:
        dh = run.arriving(dh, at)
        da = dh * at["slope"]
        return run.leaving(op.MatMul(da, run.r), dh, at), da

    dh, da = run.scan_back(step, [run.dy_h], {"slope": slope})
    return Contributions(da, da, run.outer(da, h_before), dh)


# ---- putting a layer together ------------------------------------------------------------------


@dataclass(frozen=True)
class Contributions:
    """What one direction passes back.

    `d_input` and `d_recurrent` are the cotangents of X·Wᵀ + Wb and of H₋·Rᵀ + Rb in all steps.
    """

    d_input: ir.Value
    d_recurrent: ir.Value
    dr: ir.Value
    d_initial_h: ir.Value
    d_initial_c: ir.Value | None = None
    dp: ir.Value | None = None


def differentiate_layer(
    op: Ops,
    node: ir.Node,
    dys: Sequence[ir.Value | None],
    default_activations: Sequence[str],
    backward: Callable[[Ops, Direction], Contributions],
) -> Cotangents:
    """Write the gradient of a layer; where a native kernel covers it, the kernel can stand in."""
    direction = node.attributes.get_string("direction", "forward")
    reversals = [False, True] if direction == "bidirectional" else [direction == "reverse"]
    activations = activations_of(node, [*default_activations] * len(reversals))
    y = _y_of(op, node)
    write = partial(_write_gradient, op, node, y, dys, reversals, activations, backward)
    kernel = kernel_of(op, node, activations)
    return write() if kernel is None else kernel.differentiate(dys, write)


def _write_gradient(
    op: Ops,
    node: ir.Node,
    y: ir.Value | None,
    dys: Sequence[ir.Value | None],
    reversals: Sequence[bool],
    activations: Sequence[Activation],
    backward: Callable[[Ops, Direction], Contributions],
) -> Sequence[ir.Value | None]:
    """Write the gradient of each direction and put the parts together."""
    x, w, r, b, lengths, initial_h, initial_c, p = (optional(node, i) for i in range(8))
    dy, dy_h, dy_c = (*dys, None, None)[:3]
    _state_ranks(op, (y, dy), 4)
    _state_ranks(op, (x, w, r, initial_h, initial_c, dy_h, dy_c), 3)
    _state_ranks(op, (b, p), 2)
    batch_first = node.attributes.get_int("layout", 0) == 1
    if batch_first:
        x, initial_h, initial_c, dy_h, dy_c = (
            _transpose(op, v, [1, 0, 2]) for v in (x, initial_h, initial_c, dy_h, dy_c)
        )
        y, dy = (_transpose(op, v, [1, 2, 0, 3]) for v in (y, dy))
    assert x is not None and w is not None and r is not None and y is not None
    hidden = node.attributes.get_int("hidden_size") or op.dims(r)[-1]
    each = len(activations) // len(reversals)
    time = Timeline(op, x, lengths)
    count = len(reversals)

    def pick(value: ir.Value | None, k: int, axis: int = 0) -> ir.Value | None:
        return None if value is None else _pick(op, value, axis, k, count)

    runs = [
        Direction(
            op=op, time=time, reverse=reverse, hidden=hidden,
            activations=activations[k * each : (k + 1) * each],
            w=_pick(op, w, 0, k, count), r=_pick(op, r, 0, k, count), b=pick(b, k), p=pick(p, k),
            initial_h=pick(initial_h, k), initial_c=pick(initial_c, k),
            y=_pick(op, y, 1, k, count), dy=pick(dy, k, axis=1),
            dy_h=pick(dy_h, k), dy_c=pick(dy_c, k),
        )
        for k, reverse in enumerate(reversals)
    ]  # fmt: skip
    parts = [backward(op, run) for run in runs]
    both = list(zip(parts, runs, strict=True))
    dx: ir.Value | None = op.add_all([op.MatMul(part.d_input, run.w) for part, run in both])
    dh = _stack(op, [part.d_initial_h for part in parts])
    dc = _stack(op, [part.d_initial_c for part in parts])
    if batch_first:
        dx, dh, dc = (_transpose(op, v, [1, 0, 2]) for v in (dx, dh, dc))
    dw = _stack(op, [run.outer(part.d_input, time.x) for part, run in both])
    dr = _stack(op, [part.dr for part in parts])
    db = _stack(op, [_bias_gradient(op, part) for part in parts])
    dp = _stack(op, [part.dp for part in parts])
    return (dx, dw, dr, db, None, dh, dc, dp)[: len(node.inputs)]


def _y_of(op: Ops, node: ir.Node) -> ir.Value:
    """Return the output Y; where the model does not use it, the node is made to give it."""
    y = node.outputs[0]
    if not y.name:
        y.name = op.names.fresh(f"{op.scope}/{node.op_type}_Y")
        y.type = required(node)[0].type
    return y


def _state_ranks(op: Ops, values: Sequence[ir.Value | None], rank: int) -> None:
    """Give values of unknown shape the rank that they can only have here."""
    for value in values:
        if value is not None and value.shape is None:
            op.with_dims(value, [UNKNOWN] * rank)


def _pick(op: Ops, value: ir.Value, axis: int, k: int, of: int) -> ir.Value:
    """Return the part of one direction: the k-th of as many."""
    if of == 1:
        return op.squeeze(value, [axis])
    return op.Gather(value, op.int64(k), axis=axis)


def _transpose(op: Ops, value: ir.Value | None, perm: Sequence[int]) -> ir.Value | None:
    return None if value is None else op.transpose(value, perm)


def _stack(op: Ops, parts: Sequence[ir.Value | None]) -> ir.Value | None:
    """Put the parts of the directions side by side along a new first axis."""
    present = [op.unsqueeze(part, [0]) for part in parts if part is not None]
    return op.concat(present, axis=0) if present else None


def _bias_gradient(op: Ops, part: Contributions) -> ir.Value:
    d_input = op.sum(part.d_input, [0, 1])
    same = part.d_recurrent is part.d_input
    return op.Concat(d_input, d_input if same else op.sum(part.d_recurrent, [0, 1]), axis=0)
