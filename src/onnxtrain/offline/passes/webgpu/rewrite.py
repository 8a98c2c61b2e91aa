"""Operators without a WebGPU kernel, rewritten with operators that have one.

One pass over each graph: a node that has no kernel and for which there is a rule here is replaced
by what the rule writes. The numbers are those of the operator to the rounding of float32. What has
no rule stays; onnxruntime runs it on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import constant_array, dims_of, static_dims
from onnxtrain.offline.graph.subgraphs import replace_node
from onnxtrain.offline.passes.webgpu.kernels import computes_with_floats, is_covered
from onnxtrain.offline.passes.webgpu.single import without_doubles
from onnxtrain.offline.passes.webgpu.unroll import unroll_scans

_INT32 = ir.DataType.INT32
Rule = Callable[..., Sequence[ir.Value] | None]


def rewrite_for_webgpu(model: ir.Model) -> None:
    """Rewrite a model, in place."""
    graph, opset = model.graph, model.opset_imports[""]
    op = Ops(graph, opset)
    op.scope = "webgpu"
    without_doubles(op, graph)
    unroll_scans(op, graph)
    for node in list(graph):
        rule = _RULES.get(node.op_type)
        if rule is None or node.domain or is_covered(node, opset):
            continue
        if not (computes_with_floats(node) or _makes_floats(node) or node.op_type in _OF_BOOLS):
            continue
        _replace(op, graph, node, rule)


def _makes_floats(node: ir.Node) -> bool:
    dtype = node.outputs[0].dtype
    return dtype is not None and dtype.is_floating_point()


def _replace(op: Ops, graph: ir.Graph, node: ir.Node, rule: Rule) -> None:
    # A writer of its own: what another one remembers may have been written behind this node.
    op = Ops(graph, op.opset, op.names)
    op.scope = f"webgpu/{node.name or node.outputs[0].name}"
    last = graph[-1]
    with op.arithmetic():
        made = rule(op, node, *(v for v in node.inputs if v is not None))
    if made is None:
        return
    # an input or a constant keeps its name
    made = [op.Identity(value) if value.producer() is None else value for value in made]
    replace_node(node, made, last)


# ---- arithmetic ----------------------------------------------------------------------------------


def _sum(op: Ops, node: ir.Node, total: ir.Value, *rest: ir.Value) -> list[ir.Value]:
    for value in rest:
        total = op.Add(total, value)
    return [total]


def _mean(op: Ops, node: ir.Node, *values: ir.Value) -> list[ir.Value]:
    (total,) = _sum(op, node, *values)
    return [op.Mul(total, 1.0 / len(values))]


def _sign(op: Ops, node: ir.Node, x: ir.Value) -> list[ir.Value]:
    one, minus, zero = (op.const(number, x.dtype) for number in (1.0, -1.0, 0.0))
    return [op.Where(op.Greater(x, zero), one, op.Where(op.Less(x, zero), minus, zero))]


def _selu(op: Ops, node: ir.Node, x: ir.Value) -> list[ir.Value]:
    alpha = node.attributes.get_float("alpha", 1.67326319217681884765625)
    gamma = node.attributes.get_float("gamma", 1.05070102214813232421875)
    return [op.Mul(op.Elu(x, alpha=alpha), gamma)]


def _round(op: Ops, node: ir.Node, x: ir.Value) -> list[ir.Value]:
    """Halves go to the even neighbour: an odd result of a tie is one too much."""
    rounded = op.Floor(op.Add(x, 0.5))
    is_tie = op.Equal(op.Sub(rounded, x), 0.5)
    half = op.Mul(rounded, 0.5)
    is_odd = op.Greater(op.Sub(half, op.Floor(half)), 0.0)
    return [op.Where(op.And(is_tie, is_odd), op.Sub(rounded, 1.0), rounded)]


def _pow(op: Ops, node: ir.Node, x: ir.Value, exponent: ir.Value) -> list[ir.Value]:
    known = constant_array(exponent)
    number = op.cast(exponent, x.dtype) if known is None else op.const(known.astype(np.float32))
    return [op.Pow(x, number)]


def _dropout(op: Ops, node: ir.Node, x: ir.Value, *_: ir.Value) -> list[ir.Value] | None:
    """Outside of training it changes nothing."""
    if len(node.outputs) > 1 and node.outputs[1].uses():
        return None
    training = node.inputs[2] if len(node.inputs) > 2 else None
    known = constant_array(training)
    if training is not None and (known is None or known.any()):
        return None
    return [op.Identity(x)]


# ---- filling, choosing ---------------------------------------------------------------------------


def _constant_of_shape(op: Ops, node: ir.Node, shape: ir.Value) -> list[ir.Value]:
    fill = node.attributes.get_tensor("value")
    number = 0.0 if fill is None else float(fill.numpy().reshape(-1)[0])
    return [op.Expand(op.const(number, node.outputs[0].dtype), shape)]


def _one_hot(
    op: Ops, node: ir.Node, indices: ir.Value, depth: ir.Value, values: ir.Value
) -> list[ir.Value] | None:
    count, dims = constant_array(depth), dims_of(indices)
    if count is None or dims is None:
        return None
    rank = len(dims) + 1
    axis = node.attributes.get_int("axis", -1) % rank
    classes = int(count.reshape(-1)[0])
    shape = [classes if a == axis else 1 for a in range(rank)]
    index = op.unsqueeze(op.cast(indices, _INT32), [axis])
    is_negative = op.Less(index, op.const(0, _INT32))
    wrapped = op.Where(is_negative, op.Add(index, op.const(classes, _INT32)), index)
    is_one = op.Equal(wrapped, op.const(np.arange(classes, dtype=np.int32).reshape(shape)))
    off, on = (op.squeeze(op.slice(values, 0, k, k + 1), [0]) for k in (0, 1))
    return [op.Where(is_one, on, off)]


# ---- losses --------------------------------------------------------------------------------------


def _log_softmax_of(op: Ops, x: ir.Value, axis: int) -> ir.Value:
    shifted = op.Sub(x, op.ReduceMax(x, [axis], keepdims=1))
    return op.Sub(shifted, op.Log(op.ReduceSum(op.Exp(shifted), [axis], keepdims=1)))


def _log_softmax(op: Ops, node: ir.Node, x: ir.Value) -> list[ir.Value]:
    return [_log_softmax_of(op, x, node.attributes.get_int("axis", -1) % op.rank(x))]


def _cross_entropy(
    op: Ops, node: ir.Node, scores: ir.Value, labels: ir.Value, *weights: ir.Value
) -> list[ir.Value]:
    log_prob = _log_softmax_of(op, scores, 1)
    return [*_picked(op, node, log_prob, labels, *weights), log_prob]


def _picked(
    op: Ops,
    node: ir.Node,
    log_prob: ir.Value,
    labels: ir.Value,
    class_weights: ir.Value | None = None,
) -> list[ir.Value]:
    """Minus what the labels point at, weighted and reduced as the node says."""
    ignored = node.attributes.get_int("ignore_index")
    reduction = node.attributes.get_string("reduction", "mean")
    weights: ir.Value | None = None
    kept: ir.Value | None = None
    # The integers of int64 take no part in arithmetic on the GPU, where those of int32 do.
    labels = op.cast(labels, _INT32)
    if ignored is not None:
        kept = op.Not(op.Equal(labels, op.const(ignored, _INT32)))
        labels = op.Where(kept, labels, op.const(0, _INT32))
    if class_weights is not None:
        weights = op.Gather(class_weights, labels, axis=0)
    if kept is not None:
        one, zero = op.const(1.0, log_prob.dtype), op.const(0.0, log_prob.dtype)
        weights = op.Where(kept, one if weights is None else weights, zero)
    chosen = op.GatherElements(log_prob, op.unsqueeze(labels, [1]), axis=1)
    terms = op.Neg(op.squeeze(chosen, [1]))
    if weights is not None:
        terms = op.Mul(terms, weights)
    if reduction == "none":
        return [terms]
    total = op.ReduceSum(terms, keepdims=0)
    if reduction == "sum":
        return [total]
    if weights is None:
        return [op.ReduceMean(terms, keepdims=0)]
    return [op.Div(total, op.ReduceSum(weights, keepdims=0))]


# ---- windows -------------------------------------------------------------------------------------


def _space_to_depth(op: Ops, node: ir.Node, x: ir.Value) -> list[ir.Value] | None:
    dims = static_dims(x)
    if dims is None:
        return None
    n, c, h, w = dims
    size = node.attributes.get_int("blocksize", 1)
    cut = op.reshape(x, [n, c, h // size, size, w // size, size])
    moved = op.transpose(cut, [0, 3, 5, 1, 2, 4])
    return [op.reshape(moved, [n, c * size * size, h // size, w // size])]


def _either(op: Ops, a: ir.Value, b: ir.Value) -> ir.Value:
    return op.Not(op.And(op.Not(a), op.Not(b)))


_OF_BOOLS = frozenset({"Or", "Xor"})
_RULES: dict[str, Rule] = {
    "ConstantOfShape": _constant_of_shape,
    "Dropout": _dropout,
    "IsNaN": lambda op, _, x: [op.Not(op.Equal(x, x))],
    "LogSoftmax": _log_softmax,
    "Mean": _mean,
    "Mish": lambda op, _, x: [op.Mul(x, op.Tanh(op.Softplus(x)))],
    "NegativeLogLikelihoodLoss": _picked,
    "OneHot": _one_hot,
    "Or": lambda op, _, a, b: [_either(op, a, b)],
    "Pow": _pow,
    "Round": _round,
    "Selu": _selu,
    "Sign": _sign,
    "SoftmaxCrossEntropyLoss": _cross_entropy,
    "Softsign": lambda op, _, x: [op.Div(x, op.Add(op.Abs(x), 1.0))],
    "SpaceToDepth": _space_to_depth,
    "Sum": _sum,
    "Xor": lambda op, _, a, b: [op.And(op.Not(op.And(a, b)), _either(op, a, b))],
}
