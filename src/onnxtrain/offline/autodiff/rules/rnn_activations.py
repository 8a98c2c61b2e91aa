"""The activation functions that recurrent layers may name, with their slopes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.errors import NotDifferentiableError
from onnxtrain.offline.graph.ops import Ops

Apply = Callable[[Ops, ir.Value, float, float], ir.Value]
Slope = Callable[[Ops, ir.Value, ir.Value, float, float], ir.Value]


@dataclass(frozen=True)
class Activation:
    """One activation of a node, with its numbers and the clipping of its argument."""

    name: str
    alpha: float
    beta: float
    clip: float | None

    def __call__(self, op: Ops, x: ir.Value) -> ir.Value:
        """Apply the function."""
        return _APPLY[self.name](op, self._clipped(op, x), self.alpha, self.beta)

    def slope(self, op: Ops, x: ir.Value, y: ir.Value) -> ir.Value:
        """Return the derivative at x, where the function takes the value y.

        As with the operator Clip, it is that of the function on the bounds and 0 beyond them.
        """
        clipped = self._clipped(op, x)
        slope = _SLOPE[self.name](op, clipped, y, self.alpha, self.beta)
        if self.clip is None:
            return slope
        return op.Where(op.LessOrEqual(op.Abs(x), self.clip), slope, 0.0)

    def _clipped(self, op: Ops, x: ir.Value) -> ir.Value:
        return x if self.clip is None else op.Clip(x, -self.clip, self.clip)


def activations_of(node: ir.Node, defaults: Sequence[str]) -> list[Activation]:
    """Read the activations of a node, all directions in a row.

    `activation_alpha` and `activation_beta` hold numbers for those functions alone that take one,
    in the order of the functions.
    """
    names = list(node.attributes.get_strings("activations", ())) or list(defaults)
    where = f"{node.op_type} (node {node.name!r})"
    if len(names) != len(defaults):
        raise NotDifferentiableError(
            f"{where} names {len(names)} activations; it has {len(defaults)}"
        )
    alphas = iter(node.attributes.get_floats("activation_alpha", ()))
    betas = iter(node.attributes.get_floats("activation_beta", ()))
    result = []
    for name in names:
        if name not in _APPLY:
            raise NotDifferentiableError(
                f"{where} uses the activation {name!r}; known are {', '.join(_APPLY)}"
            )
        alpha = next(alphas, _ALPHAS[name]) if name in _ALPHAS else 0.0
        beta = next(betas, _BETAS[name]) if name in _BETAS else 0.0
        if alpha is None or beta is None:
            raise NotDifferentiableError(
                f"{where} uses the activation {name!r} without stating activation_alpha and "
                "activation_beta: runtimes disagree on what they are then, so state them"
            )
        result.append(Activation(name, alpha, beta, node.attributes.get_float("clip", None)))
    return result


def _square(op: Ops, x: ir.Value) -> ir.Value:
    return op.Mul(x, x)


def _step(op: Ops, condition: ir.Value, like: ir.Value, yes: float, no: float) -> ir.Value:
    return op.Where(condition, op.const(yes, like.dtype), op.const(no, like.dtype))


# None: a number without a default that runtimes agree on.
_ALPHAS: dict[str, float | None] = {
    "Affine": None,
    "LeakyRelu": 0.01,
    "ThresholdedRelu": None,
    "ScaledTanh": None,
    "HardSigmoid": 0.2,
    "Elu": 1.0,
}
_BETAS: dict[str, float | None] = {"Affine": None, "ScaledTanh": None, "HardSigmoid": 0.5}

_APPLY: dict[str, Apply] = {
    "Sigmoid": lambda op, x, a, b: op.Sigmoid(x),
    "Tanh": lambda op, x, a, b: op.Tanh(x),
    "Relu": lambda op, x, a, b: op.Relu(x),
    "Affine": lambda op, x, a, b: op.Add(op.Mul(x, a), b),
    "LeakyRelu": lambda op, x, a, b: op.LeakyRelu(x, alpha=a),
    "ThresholdedRelu": lambda op, x, a, b: op.Where(op.GreaterOrEqual(x, a), x, 0.0),
    "ScaledTanh": lambda op, x, a, b: op.Mul(op.Tanh(op.Mul(x, b)), a),
    "HardSigmoid": lambda op, x, a, b: op.Clip(op.Add(op.Mul(x, a), b), 0.0, 1.0),
    "Elu": lambda op, x, a, b: op.call("Elu", x, alpha=a, like=x)[0],
    "Softsign": lambda op, x, a, b: op.call("Softsign", x, like=x)[0],
    "Softplus": lambda op, x, a, b: op.call("Softplus", x, like=x)[0],
}

_SLOPE: dict[str, Slope] = {
    "Sigmoid": lambda op, x, y, a, b: op.Sub(y, _square(op, y)),
    "Tanh": lambda op, x, y, a, b: op.Sub(1.0, _square(op, y)),
    "Relu": lambda op, x, y, a, b: _step(op, op.Greater(y, 0.0), x, 1.0, 0.0),
    "Affine": lambda op, x, y, a, b: op.full_like(x, a),
    "LeakyRelu": lambda op, x, y, a, b: _step(op, op.GreaterOrEqual(x, 0.0), x, 1.0, a),
    "ThresholdedRelu": lambda op, x, y, a, b: _step(op, op.GreaterOrEqual(x, a), x, 1.0, 0.0),
    "ScaledTanh": lambda op, x, y, a, b: op.Mul(
        op.Sub(1.0, _square(op, op.Tanh(op.Mul(x, b)))), a * b
    ),
    "HardSigmoid": lambda op, x, y, a, b: _step(
        op, op.And(op.Greater(y, 0.0), op.Less(y, 1.0)), x, a, 0.0
    ),
    "Elu": lambda op, x, y, a, b: op.Where(op.GreaterOrEqual(x, 0.0), 1.0, op.Add(y, a)),
    "Softsign": lambda op, x, y, a, b: _square(op, op.Sub(1.0, op.Abs(y))),
    "Softplus": lambda op, x, y, a, b: op.Sigmoid(x),
}
