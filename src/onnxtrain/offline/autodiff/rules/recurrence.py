"""One direction of a recurrent layer: its weights, its states, and Scans along or against it.

Sequences are of shape (T, B, width), states of shape (B, H), whatever the layout of the node is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.autodiff.definitions import split
from onnxtrain.offline.autodiff.rules.rnn_activations import Activation
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import UNKNOWN, Dim, dims_of
from onnxtrain.offline.graph.sizes import arange

Step = Callable[..., Sequence[ir.Value]]


class Timeline:
    """The input over time, and which steps belong to which sequence of the batch.

    Without lengths, `valid` and what follows from it is None: every step counts.
    """

    def __init__(self, op: Ops, x: ir.Value, lengths: ir.Value | None) -> None:
        self.steps, self.batch, _ = op.dims(x)
        self.x = x
        self.valid: ir.Value | None = None
        if lengths is None:
            return
        length = op.cast(lengths, ir.DataType.INT64)
        now = op.unsqueeze(arange(op, op.dim(x, 0)), [1, 2])
        each = op.unsqueeze(length, [0, 2])
        self.valid = self._mark(op, op.Less(now, each))
        self.last = self._mark(op, op.Equal(now, each - 1))
        self.not_empty = op.Greater(op.unsqueeze(length, [1]), 0)
        self.idle = op.Cast(op.Not(self.valid), to=x.dtype)
        self.x = op.Where(self.valid, x, 0.0)  # beyond its length a sequence may even hold nan

    def _mark(self, op: Ops, flags: ir.Value) -> ir.Value:
        return op.with_dims(flags, (self.steps, self.batch, 1))


@dataclass(frozen=True)
class Direction:
    """One direction of a layer, with what it was given and what comes back to its outputs."""

    op: Ops
    time: Timeline
    reverse: bool
    hidden: Dim
    activations: Sequence[Activation]
    w: ir.Value
    r: ir.Value
    b: ir.Value | None
    p: ir.Value | None
    initial_h: ir.Value | None
    initial_c: ir.Value | None
    y: ir.Value
    dy: ir.Value | None
    dy_h: ir.Value | None
    dy_c: ir.Value | None

    # ---- weights and gates ---------------------------------------------------------------------

    @cached_property
    def biases(self) -> tuple[ir.Value | None, ir.Value | None]:
        """The two halves of B: Wb and Rb."""
        if self.b is None:
            return None, None
        wb, rb = self.split(self.b, 2)
        return wb, rb

    @property
    def bias(self) -> ir.Value | None:
        """The sum Wb + Rb."""
        wb, rb = self.biases
        return None if wb is None else self.op.Add(wb, rb)

    def split(self, value: ir.Value, parts: int, axis: int = -1) -> tuple[ir.Value, ...]:
        """Cut an axis into equal parts."""
        return split(self.op, value, parts, axis)

    def affine(
        self, x: ir.Value, w: ir.Value, h: ir.Value, r: ir.Value, b: ir.Value | None
    ) -> ir.Value:
        """Return x·wᵀ + h·rᵀ + b for all steps, as one matrix product."""
        op = self.op
        both = op.Concat(self._flat(x), self._flat(h), axis=1)
        return self.linear(both, op.Concat(w, r, axis=1), b)

    def linear(self, x: ir.Value, w: ir.Value, b: ir.Value | None) -> ir.Value:
        """Return x·wᵀ + b for all steps."""
        op = self.op
        product = op.Gemm(self._flat(x), w, *([] if b is None else [b]), transB=1)
        shape = op.dims_vector(op.dim(self.time.x, 0), op.dim(self.time.x, 1), -1)
        dims = (self.time.steps, self.time.batch, op.dims(w)[0])
        return op.with_dims(op.reshape(product, shape), dims)

    def outer(self, d: ir.Value, x: ir.Value) -> ir.Value:
        """Return the sum over all steps of dᵀ·x: the gradient of the w in x·wᵀ."""
        op = self.op
        product = op.Gemm(self._flat(d), self._flat(x), transA=1)
        return op.with_dims(product, (op.dims(d)[-1], op.dims(x)[-1]))

    def _flat(self, x: ir.Value) -> ir.Value:
        op = self.op
        if op.rank(x) == 2:
            return x
        flat = op.reshape(x, op.dims_vector(-1, op.dim(x, -1)))
        return op.with_dims(flat, (UNKNOWN, op.dims(x)[-1]))

    # ---- states --------------------------------------------------------------------------------

    def zeros(self) -> ir.Value:
        """Return a state of zeros."""
        op = self.op
        shape = op.dims_vector(op.dim(self.time.x, 1), op.dim(self.r, -1))
        zeros = op.Expand(op.const(0.0, self.time.x.dtype), shape)
        return op.with_dims(zeros, (self.time.batch, self.hidden))

    def before(self, states: ir.Value, first: ir.Value | None) -> ir.Value:
        """Return the state before each step, given those after each step and the initial one."""
        op = self.op
        lead = op.unsqueeze(self.zeros() if first is None else first, [0])
        if self.reverse:
            shifted = op.Concat(op.slice(states, 0, 1, _END), lead, axis=0)
        else:
            shifted = op.Concat(lead, op.slice(states, 0, 0, -1), axis=0)
        return op.with_dims(shifted, (self.time.steps, self.time.batch, self.hidden))

    def h_before(self) -> ir.Value:
        """Return the hidden state before each step.

        Y is zero beyond the lengths, where a sequence in reverse still has its initial state.
        """
        before = self.before(self.y, self.initial_h)
        if self.reverse and self.time.valid is not None and self.initial_h is not None:
            first = self.op.unsqueeze(self.initial_h, [0])
            return self.op.Where(self.time.last, first, before)
        return before

    def where_valid(self, value: ir.Value, otherwise: float) -> ir.Value:
        """Replace a coefficient in the steps beyond the lengths."""
        valid = self.time.valid
        return value if valid is None else self.op.Where(valid, value, otherwise)

    # ---- Scans ---------------------------------------------------------------------------------

    def scan(
        self,
        step: Step,
        states: Sequence[ir.Value | None],
        sequences: Mapping[str, ir.Value],
        against: bool = False,
    ) -> tuple[ir.Value, ...]:
        """Run `step` along the direction of the layer or against it; a state of None is zero."""
        initial = [self.zeros() if state is None else state for state in states]
        return scan(self.op, step, initial, sequences, self.reverse != against)

    def scan_back(
        self,
        step: Step,
        finals: Sequence[ir.Value | None],
        coefficients: Mapping[str, ir.Value],
        idle: bool = True,
    ) -> tuple[ir.Value, ...]:
        """Run `step` against the direction, from the cotangents of the final states.

        Beside the coefficients, its elements are `dy` where there is one, and `idle` (1 in a step
        beyond the lengths, else 0) where it is asked for and there are lengths.
        """
        op, time = self.op, self.time
        sequences = dict(coefficients)
        if self.dy is not None:
            sequences["dy"] = self.where_valid(self.dy, 0.0)
        if time.valid is not None:
            # The final state of an empty sequence is zero in onnxruntime, not the initial one.
            finals = [None if f is None else op.Where(time.not_empty, f, 0.0) for f in finals]
            if idle:
                sequences["idle"] = time.idle
        return self.scan(step, finals, sequences, against=True)

    def arriving(self, dh: ir.Value, at: Mapping[str, ir.Value]) -> ir.Value:
        """Add what comes from Y to what comes from the later step."""
        return dh + at["dy"] if "dy" in at else dh

    def leaving(self, dh_before: ir.Value, dh: ir.Value, at: Mapping[str, ir.Value]) -> ir.Value:
        """Hand the cotangent of the state through the steps beyond the lengths."""
        return dh_before + dh * at["idle"] if "idle" in at else dh_before


def scan(
    op: Ops,
    step: Step,
    states: Sequence[ir.Value],
    sequences: Mapping[str, ir.Value],
    back: bool,
) -> tuple[ir.Value, ...]:
    """Run `step` over sequences (T, B, …), from the first element or from the last one `back`.

    `step(*states, elements)` gets the elements of the sequences by name, and returns the next
    states followed by what is to be collected into sequences.
    """
    inputs = [("state", v.dtype, _fixed(op.dims(v))) for v in states]
    inputs += [(name, v.dtype, _fixed(op.dims(v)[1:])) for name, v in sequences.items()]

    def write(*values: ir.Value) -> Sequence[ir.Value]:
        elements = dict(zip(sequences, values[len(states) :], strict=True))
        return step(*values[: len(states)], elements)

    body = op.body(inputs, write, name="step")  # type: ignore[arg-type]
    results = op.call(
        "Scan", *states, *sequences.values(), outputs=len(body.outputs), body=body,
        num_scan_inputs=len(sequences),
        scan_input_directions=[1] * len(sequences) if back else None,
        scan_output_directions=[1] * (len(body.outputs) - len(states)) if back else None,
    )  # fmt: skip
    steps, batch = op.dims(next(iter(sequences.values())))[:2]
    for index, (result, inner) in enumerate(zip(results, body.outputs, strict=True)):
        dims = dims_of(inner) or (UNKNOWN,) * op.rank(states[0])
        lead = () if index < len(states) else (steps,)
        result.type = inner.type
        op.with_dims(result, (*lead, batch, *dims[1:]))
    return results


_END = np.iinfo(np.int64).max


def _fixed(dims: Sequence[Dim]) -> list[Dim]:
    """Forget the names of symbolic dimensions: equal sizes may have different ones."""
    return [d if isinstance(d, int) else UNKNOWN for d in dims]
