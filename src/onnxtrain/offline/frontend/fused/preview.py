"""Operators of the standard's other domains, as the standard describes them.

The preview domains hold FlexAttention and the optimizers that ONNX once proposed; no runtime has
kernels for the latter, so their definition is also what makes them run.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.offline.autodiff.definitions import definition
from onnxtrain.offline.autodiff.heads import mix, scores
from onnxtrain.offline.autodiff.registry import zero_gradient
from onnxtrain.offline.graph.copy_graph import copy_graph
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import working_type

_TRAINING = "ai.onnx.preview.training"

zero_gradient(
    "Binarizer", "TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor",
    domain="ai.onnx.ml", reason="piecewise constant",
)  # fmt: skip


@definition("ArrayFeatureExtractor", domain="ai.onnx.ml", ranks=(0,))
def array_feature_extractor(op: Ops, node: ir.Node, x: ir.Value, indices: ir.Value) -> ir.Value:
    """Gather along the last axis; a vector counts as a row."""
    rows = op.unsqueeze(x, [0]) if op.rank(x) == 1 else x
    return op.Gather(rows, op.Reshape(indices, [-1]), axis=op.rank(rows) - 1)


@definition("FlexAttention", domain="ai.onnx.preview", ranks=(0, 1, 2))
def flex_attention(op: Ops, node: ir.Node, q: ir.Value, k: ir.Value, v: ir.Value) -> ir.Value:
    """Attention with a graph of the caller behind the scores, and one behind the probabilities."""
    given = node.attributes.get_int("softmax_precision")
    precision = working_type(q) if given is None else ir.DataType(given)
    changed = _apply(op, node, "score_mod", op.cast(scores(op, node, q, k), precision))
    probabilities = _apply(op, node, "prob_mod", op.Softmax(changed, axis=-1))
    return mix(op, op.cast(probabilities, q.dtype), v)


def _apply(op: Ops, node: ir.Node, name: str, value: ir.Value) -> ir.Value:
    """Write the graph in an attribute, if there is one, with a value as its input."""
    if name not in node.attributes:
        return value
    graph = node.attributes[name].as_graph()
    tensors = [(v, v.const_value) for v in graph.initializers.values()]
    copies = {v: op.const(tensor.numpy()) for v, tensor in tensors if tensor is not None}
    copies[graph.inputs[0]] = value
    copy_graph(graph, op.target, copies, op.names)
    return op.type_as(copies[graph.outputs[0]], value)


def _by_tensor(tensors: Sequence[ir.Value], kinds: int) -> list[tuple[ir.Value, ...]]:
    """Turn x₁ x₂ … g₁ g₂ … into (x₁, g₁ …), (x₂, g₂ …) and so on."""
    count = len(tensors) // kinds
    return list(zip(*(tensors[i * count : (i + 1) * count] for i in range(kinds)), strict=True))


def _regularized(op: Ops, node: ir.Node, x: ir.Value, g: ir.Value) -> ir.Value:
    return op.Add(x * node.attributes.get_float("norm_coefficient", 0.0), g)


@definition("Adagrad", domain=_TRAINING)
def adagrad(
    op: Ops, node: ir.Node, rate: ir.Value, step: ir.Value, *tensors: ir.Value
) -> Sequence[ir.Value]:
    """x - r g / (√h + ε), where h sums the squares of g."""
    decay = node.attributes.get_float("decay_factor", 0.0)
    epsilon = node.attributes.get_float("epsilon", 1e-6)
    rate = rate / (op.Cast(step, to=rate.dtype) * decay + 1.0)
    results = []
    for x, g, h in _by_tensor(tensors, 3):
        g = _regularized(op, node, x, g)
        h = h + g * g
        results.append((x - rate * g / (op.Sqrt(h) + epsilon), h))
    return [value for kind in zip(*results, strict=True) for value in kind]


@definition("Adam", domain=_TRAINING)
def adam(
    op: Ops, node: ir.Node, rate: ir.Value, step: ir.Value, *tensors: ir.Value
) -> Sequence[ir.Value]:
    """x - r v / (√h + ε), with averages v of g and h of its squares."""
    read = node.attributes.get_float
    alpha, beta, epsilon = read("alpha", 0.9), read("beta", 0.999), read("epsilon", 1e-6)
    time = op.Cast(step, to=rate.dtype)
    powers = [op.Pow(op.const(base, rate.dtype), time) for base in (alpha, beta)]
    first = op.Equal(time, 0.0)
    unbiased = rate * op.Sqrt(1.0 - powers[1]) / op.Where(first, 1.0, 1.0 - powers[0])
    rate = op.Where(first, rate, unbiased)
    results = []
    for x, g, v, h in _by_tensor(tensors, 4):
        g = _regularized(op, node, x, g)
        v = v * alpha + g * (1.0 - alpha)
        h = h * beta + g * g * (1.0 - beta)
        moved = x - rate * v / (op.Sqrt(h) + epsilon)
        results.append((moved * (1.0 - read("norm_coefficient_post", 0.0)), v, h))
    return [value for kind in zip(*results, strict=True) for value in kind]


@definition("Momentum", domain=_TRAINING)
def momentum(
    op: Ops, node: ir.Node, rate: ir.Value, step: ir.Value, *tensors: ir.Value
) -> Sequence[ir.Value]:
    """x - r v with v = α v + β g, or Nesterov's x - r (g + α v)."""
    alpha, beta = (node.attributes.get_float(name, 0.0) for name in ("alpha", "beta"))
    started = op.Greater(step, op.const(0, step.dtype))
    share = op.Where(started, op.const(beta, rate.dtype), op.const(1.0, rate.dtype))
    nesterov = node.attributes.get_string("mode") == "nesterov"
    results = []
    for x, g, v in _by_tensor(tensors, 3):
        g = _regularized(op, node, x, g)
        v = v * alpha + share * g
        results.append((x - rate * (g + v * alpha if nesterov else v), v))
    return [value for kind in zip(*results, strict=True) for value in kind]
