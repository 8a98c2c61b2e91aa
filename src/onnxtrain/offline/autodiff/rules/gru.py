"""The rule of GRU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import Cotangents, rule
from onnxtrain.offline.autodiff.rules.recurrence import Direction
from onnxtrain.offline.autodiff.rules.rnn import Contributions, differentiate_layer
from onnxtrain.offline.graph.ops import Ops


@rule("GRU")
def gru(op: Ops, node: ir.Node, *dys: ir.Value | None) -> Cotangents:
    """H = (1 - z) n + z H₋, where the gates z, r and the candidate n are functions of X and H₋.

    With `linear_before_reset`, n = g(X·Wᵀ + Wb + r (H₋·Rᵀ + Rb)), and the cotangents of all parts
    are products of dH and coefficients; without it, n = g(X·Wᵀ + (r H₋)·Rᵀ + b), and that of r
    comes through R.
    """
    linear_first = node.attributes.get_int("linear_before_reset", 0) != 0
    backward = _reset_after_product if linear_first else _reset_before_product
    return differentiate_layer(op, node, dys, ["Sigmoid", "Tanh"], backward)


def _reset_after_product(op: Ops, run: Direction) -> Contributions:
    f, g = run.activations
    h_before = run.h_before()
    (w_zr, w_n), (r_zr, r_n) = _two_and_one(run, run.w), _two_and_one(run, run.r)
    (wb_zr, wb_n), (rb_zr, rb_n) = (_biases(run, b) for b in run.biases)
    b_zr = None if wb_zr is None else op.Add(wb_zr, rb_zr)
    pre_z, pre_r = run.split(run.affine(run.time.x, w_zr, h_before, r_zr, b_zr), 2)
    z, r = f(op, pre_z), f(op, pre_r)
    slope_z, slope_r = f.slope(op, pre_z, z), f.slope(op, pre_r, r)
    product = run.linear(h_before, r_n, rb_n)
    pre_n = run.linear(run.time.x, w_n, wb_n) + r * product
    n = g(op, pre_n)
    k_n = (1.0 - z) * g.slope(op, pre_n, n)
    k = op.Concat((h_before - n) * slope_z, k_n * product * slope_r, k_n * r, axis=2)
    coefficients = {
        "z": run.where_valid(z, 1.0),
        "k": run.where_valid(k, 0.0),
        "k_n": run.where_valid(k_n, 0.0),
    }

    def step(dh: ir.Value, at: Mapping[str, ir.Value]) -> Sequence[ir.Value]:
        dh = run.arriving(dh, at)
        dgates = op.Concat(dh, dh, dh, axis=1) * at["k"]
        return op.MatMul(dgates, run.r) + dh * at["z"], dgates, dh * at["k_n"]

    dh, d_recurrent, dn = run.scan_back(step, [run.dy_h], coefficients, idle=False)
    dz, dr, _ = run.split(d_recurrent, 3)
    d_input = op.Concat(dz, dr, dn, axis=2)
    return Contributions(d_input, d_recurrent, run.outer(d_recurrent, h_before), dh)


def _reset_before_product(op: Ops, run: Direction) -> Contributions:
    f, g = run.activations
    h_before = run.h_before()
    (w_zr, w_n), (r_zr, r_n) = _two_and_one(run, run.w), _two_and_one(run, run.r)
    b_zr, b_n = _biases(run, run.bias)
    pre_z, pre_r = run.split(run.affine(run.time.x, w_zr, h_before, r_zr, b_zr), 2)
    z, r = f(op, pre_z), f(op, pre_r)
    slope_z, slope_r = f.slope(op, pre_z, z), f.slope(op, pre_r, r)
    kept = r * h_before
    pre_n = run.affine(run.time.x, w_n, kept, r_n, b_n)
    n = g(op, pre_n)
    coefficients = {
        "z": run.where_valid(z, 1.0),
        "r": r,
        "k_z": run.where_valid((h_before - n) * slope_z, 0.0),
        "k_r": run.where_valid(h_before * slope_r, 0.0),
        "k_n": run.where_valid((1.0 - z) * g.slope(op, pre_n, n), 0.0),
    }

    def step(dh: ir.Value, at: Mapping[str, ir.Value]) -> Sequence[ir.Value]:
        dh = run.arriving(dh, at)
        dn = dh * at["k_n"]
        dkept = op.MatMul(dn, r_n)
        dzr = op.Concat(dh * at["k_z"], dkept * at["k_r"], axis=1)
        return op.Sum(op.MatMul(dzr, r_zr), dkept * at["r"], dh * at["z"]), dzr, dn

    dh, dzr, dn = run.scan_back(step, [run.dy_h], coefficients, idle=False)
    dgates = op.Concat(dzr, dn, axis=2)
    dr = op.Concat(run.outer(dzr, h_before), run.outer(dn, kept), axis=0)
    return Contributions(dgates, dgates, dr, dh)


def _two_and_one(run: Direction, value: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Cut the first axis, of 3 H, into the part of the gates z and r and that of the candidate."""
    z, r, n = run.split(value, 3, axis=0)
    return run.op.Concat(z, r, axis=0), n


def _biases(run: Direction, b: ir.Value | None) -> tuple[ir.Value | None, ir.Value | None]:
    return (None, None) if b is None else _two_and_one(run, b)
