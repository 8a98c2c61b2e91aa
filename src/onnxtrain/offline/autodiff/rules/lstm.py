"""The rule of LSTM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import Cotangents, rule
from onnxtrain.offline.autodiff.rules.recurrence import Direction
from onnxtrain.offline.autodiff.rules.rnn import Contributions, differentiate_layer
from onnxtrain.offline.graph.ops import Ops


@rule("LSTM")
def lstm(op: Ops, node: ir.Node, *dys: ir.Value | None) -> Cotangents:
    """C = f C₋ + i g, H = o h(C), where the gates i, o, f, g are functions of X, H₋ (and C₋, C).

    Backwards, with dH and dC of the state after the step:
    dC += A dH, then dC₋ = F dC, and the cotangents of the gates before their activation are
    dC K_i, dH K_o, dC K_f, dC K_g. The coefficients hold slopes, peepholes and coupling.
    """
    coupled = node.attributes.get_int("input_forget", 0) != 0
    backward = partial(_lstm_direction, coupled=coupled)
    return differentiate_layer(op, node, dys, ["Sigmoid", "Tanh", "Tanh"], backward)


def _lstm_direction(op: Ops, run: Direction, coupled: bool) -> Contributions:
    h_before = run.h_before()
    pre = run.affine(run.time.x, run.w, h_before, run.r, run.bias)
    cell = Cell(op, run, coupled, *run.split(pre, 4))
    c = cell.states()
    c_before = run.before(c, run.initial_c)
    coefficients = cell.coefficients(c_before, c)

    def step(dh: ir.Value, dc: ir.Value, at: Mapping[str, ir.Value]) -> Sequence[ir.Value]:
        dh = run.arriving(dh, at)
        dc = dc + dh * at["a"]
        dgates = op.Concat(dc, dh, dc, dc, axis=1) * at["k"]
        return run.leaving(op.MatMul(dgates, run.r), dh, at), dc * at["f"], dgates

    dh, dc, dgates = run.scan_back(step, [run.dy_h, run.dy_c], coefficients)
    dp = None
    if run.p is not None:
        di, do, df, _ = run.split(dgates, 4)
        dp = op.sum(op.Concat(di * c_before, do * c, df * c_before, axis=2), [0, 1])
    return Contributions(dgates, dgates, run.outer(dgates, h_before), dh, dc, dp)


@dataclass(frozen=True)
class Cell:
    """The gates of all steps, before what the peepholes add and before activation."""

    op: Ops
    run: Direction
    coupled: bool
    pre_i: ir.Value
    pre_o: ir.Value
    pre_f: ir.Value
    pre_g: ir.Value

    def states(self) -> ir.Value:
        """Return C after each step.

        Peepholes make the gates depend on C₋, so that they have to be computed along with it;
        without them, all steps are done beforehand.
        """
        op, run = self.op, self.run
        _, g, _ = run.activations
        sequences = {"g": g(op, self.pre_g)}
        if run.p is None:
            i, forget = self._gates(self.pre_i, self.pre_f, None)
            sequences = {"ig": i * sequences["g"], "f": forget}
        else:
            sequences |= {"pre_i": self.pre_i, "pre_f": self.pre_f}
        if run.time.valid is not None:
            sequences["valid"] = run.time.valid

        def step(c: ir.Value, at: Mapping[str, ir.Value]) -> Sequence[ir.Value]:
            if run.p is None:
                after = at["f"] * c + at["ig"]
            else:
                i, forget = self._gates(at["pre_i"], at["pre_f"], c)
                after = forget * c + i * at["g"]
            if "valid" in at:
                after = op.Where(at["valid"], after, c)
            return after, after

        return run.scan(step, [run.initial_c], sequences)[1]

    def _gates(
        self, pre_i: ir.Value, pre_f: ir.Value, c: ir.Value | None
    ) -> tuple[ir.Value, ir.Value]:
        op, f = self.op, self.run.activations[0]
        p_i, _, p_f = self._peepholes()
        i = f(op, self._peep(pre_i, p_i, c))
        return i, 1.0 - i if self.coupled else f(op, self._peep(pre_f, p_f, c))

    def _peepholes(self) -> Sequence[ir.Value | None]:
        return (None,) * 3 if self.run.p is None else self.run.split(self.run.p, 3)

    def _peep(self, pre: ir.Value, p: ir.Value | None, c: ir.Value | None) -> ir.Value:
        return pre if p is None else pre + p * c

    def coefficients(self, c_before: ir.Value, c: ir.Value) -> dict[str, ir.Value]:
        """Return A, F and K (see the rule) of all steps."""
        op, run = self.op, self.run
        f, g, h = run.activations
        h = replace(h, clip=None)  # onnxruntime clips the arguments of the gates, and not that of h
        p_i, p_o, p_f = self._peepholes()
        pre_i, pre_o = self._peep(self.pre_i, p_i, c_before), self._peep(self.pre_o, p_o, c)
        i, o, candidate, shown = f(op, pre_i), f(op, pre_o), g(op, self.pre_g), h(op, c)
        k_o = shown * f.slope(op, pre_o, o)
        k_g = i * g.slope(op, self.pre_g, candidate)
        if self.coupled:
            forget = 1.0 - i
            k_i = (candidate - c_before) * f.slope(op, pre_i, i)
            k_f = op.zeros_like(k_i)
        else:
            pre_f = self._peep(self.pre_f, p_f, c_before)
            forget = f(op, pre_f)
            k_i = candidate * f.slope(op, pre_i, i)
            k_f = c_before * f.slope(op, pre_f, forget)
        a, passed = o * h.slope(op, c, shown), forget
        if run.p is not None:
            a, passed = a + p_o * k_o, passed + p_i * k_i + p_f * k_f
        return {
            "a": run.where_valid(a, 0.0),
            "f": run.where_valid(passed, 1.0),
            "k": run.where_valid(op.Concat(k_i, k_o, k_f, k_g, axis=2), 0.0),
        }
