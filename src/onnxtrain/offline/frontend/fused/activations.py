"""Activations that onnxruntime fuses: the family of Gelu, and those attached to other operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.offline.autodiff.definitions import Maybe, NotExpandable, split
from onnxtrain.offline.frontend.fused.domain import fused
from onnxtrain.offline.graph.ops import Ops


@fused("Gelu")
def gelu(op: Ops, node: ir.Node, x: ir.Value) -> ir.Value:
    """x Φ(x) with the error function; ai.onnx has Gelu only from opset 20 on."""
    return op.Mul(x * 0.5, op.Erf(x * math.sqrt(0.5)) + 1.0)


@fused("BiasGelu")
def bias_gelu(op: Ops, node: ir.Node, a: ir.Value, b: ir.Value) -> ir.Value:
    """Gelu of a + b."""
    return gelu(op, node, a + b)


@fused("FastGelu")
def fast_gelu(op: Ops, node: ir.Node, x: ir.Value, bias: Maybe = None) -> ir.Value:
    """Gelu approximated with tanh, after an optional bias."""
    x = x if bias is None else x + bias
    inner = x * (x * x * (0.044715 * math.sqrt(2 / math.pi)) + math.sqrt(2 / math.pi))
    return op.Mul(x * 0.5, op.Tanh(inner) + 1.0)


@fused("QuickGelu")
def quick_gelu(op: Ops, node: ir.Node, x: ir.Value) -> ir.Value:
    """x σ(alpha x)."""
    alpha = node.attributes.get_float("alpha", 1.702)
    return op.Mul(x, op.Sigmoid(x if alpha == 1.0 else x * alpha))


@fused("BiasSplitGelu")
def bias_split_gelu(op: Ops, node: ir.Node, x: ir.Value, bias: ir.Value) -> ir.Value:
    """The left half of x + bias times the Gelu of its right half."""
    left, right = split(op, x + bias, 2, -1)
    return op.Mul(left, gelu(op, node, right))


@fused("ScaledSiLU")
def scaled_silu(op: Ops, node: ir.Node, x: ir.Value, scale: Maybe = None) -> ir.Value:
    """z σ(z) with z = scale x."""
    if scale is not None:
        scale = op.reshape(op.cast(scale, x.dtype), [])
    z = x * (node.attributes.get_float("alpha", 1.0) if scale is None else scale)
    return op.Mul(z, op.Sigmoid(z))


@fused("GatedAdd")
def gated_add(op: Ops, node: ir.Node, x: ir.Value, y: ir.Value, gate: ir.Value) -> ir.Value:
    """x + y gate."""
    return op.Add(x, y * gate)


Activation = Callable[[ir.Value], ir.Value]


def activation(op: Ops, name: str, parameters: Sequence[float]) -> Activation:
    """Return the activation that another operator carries as an attribute.

    `parameters` are in the order of onnxruntime's fused kernels (alpha, beta or min, max); missing
    ones take the defaults of ONNX.
    """
    if name in ("", "Relu", "Tanh", "Sigmoid", "Softplus", "Softsign", "HardSwish"):
        return lambda x: op.call(name, x, like=x)[0] if name else x
    if name == "Clip":
        low, high = parameters
        return lambda x: op.Clip(x, op.const(low, x.dtype), op.const(high, x.dtype))
    if name in _DEFAULTS:
        defaults = _DEFAULTS[name]
        given: dict[str, Any] = {**defaults, **dict(zip(defaults, parameters, strict=False))}
        return lambda x: op.call(name, x, like=x, **given)[0]
    raise NotExpandable(f"activation {name!r}")


_DEFAULTS = {
    "Celu": {"alpha": 1.0},
    "Elu": {"alpha": 1.0},
    "HardSigmoid": {"alpha": 0.2, "beta": 0.5},
    "LeakyRelu": {"alpha": 0.01},
    "Selu": {"alpha": 1.6732632, "gamma": 1.0507010},
    "ThresholdedRelu": {"alpha": 1.0},
}


def prefixed_activation(op: Ops, node: ir.Node) -> Activation:
    """Return the activation of an operator that gives its parameters as `activation_alpha`."""
    name = node.attributes.get_string("activation", "")
    defaults = _DEFAULTS.get(name, {}).items()
    return activation(
        op, name, [node.attributes.get_float(f"activation_{key}", v) for key, v in defaults]
    )
