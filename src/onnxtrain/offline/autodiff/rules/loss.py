"""Rules for softmax and the losses built on it."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import Cotangents, optional, output_of, required, rule
from onnxtrain.offline.graph.kernels import mark_kernel, written_after
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import constant_array, dims_of, working_type

# ---- softmax -----------------------------------------------------------------------------------


@rule("Softmax")
def softmax(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """With the sum s along the axis: dx = y (dy - s(y dy))."""
    y, axis = op.without_nan(node.outputs[0]), node.attributes.get_int("axis", -1)

    def write() -> list[ir.Value]:
        return [y * (dy - op.sum(dy * y, [axis], keepdims=True))]

    return op.kernel("SoftmaxGrad", [dy, y], write) if _is_last(axis, y) else write()


@rule("LogSoftmax")
def log_softmax(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """With the sum s along the axis: dx = dy - exp(y) s(dy)."""
    y, axis = op.without_nan(node.outputs[0]), node.attributes.get_int("axis", -1)

    def write() -> list[ir.Value]:
        return [dy - op.Exp(y) * op.sum(dy, [axis], keepdims=True)]

    return op.kernel("LogSoftmaxGrad", [dy, y], write) if _is_last(axis, y) else write()


def _is_last(axis: int, value: ir.Value) -> bool:
    dims = dims_of(value)
    return axis == -1 or (dims is not None and axis == len(dims) - 1)


# ---- losses ------------------------------------------------------------------------------------


@rule("SoftmaxCrossEntropyLoss", notes="to the scores and to the class weights")
def softmax_cross_entropy_loss(
    op: Ops, node: ir.Node, dloss: ir.Value | None, dlog_prob: ir.Value | None = None
) -> Cotangents:
    """dscores = (softmax - onehot) c for the loss, where c is what a label's term counts.

    For the second output it is dlog_prob - softmax · sum over the classes of dlog_prob.
    """
    (scores,) = required(node)
    wide = working_type(scores)
    log_prob = op.type_as(output_of(op, node, 1, "log_prob"), scores)

    def write() -> list[ir.Value]:
        # The kernel computes it in any case, and exp of it is cheaper than a softmax beside it:
        # along axis 1 of (8, 21, 128, 128) the Softmax of onnxruntime takes three times as long
        # as the loss.
        prob = op.Exp(op.cast(log_prob, wide))
        parts = []
        if dloss is not None:
            parts.append(_from_terms(op, node, prob, op.cast(dloss, wide)))
        if dlog_prob is not None:
            seed = op.cast(dlog_prob, wide)
            parts.append(seed - prob * op.sum(seed, [1], keepdims=True))
        return [op.cast(op.add_all(parts), scores.dtype)]

    if dloss is None or (dlog_prob is not None and _smoothing(log_prob, dlog_prob) is None):
        (dscores,) = write()
    else:
        (dscores,) = _with_kernels(op, node, dloss, dlog_prob, write)
    if dloss is None or optional(node, 2) is None:
        return (dscores,)
    return dscores, None, _class_weights(op, node, op.cast(log_prob, wide), op.cast(dloss, wide))


def _from_terms(op: Ops, node: ir.Node, prob: ir.Value, dloss: ir.Value) -> ir.Value:
    """Return the part of dscores that comes from the loss."""
    labels, weight = _labels_and_weight(op, node, dloss)
    indices = op.unsqueeze(labels, [1])
    minus_one = op.Expand(op.const(-1.0, prob.dtype), op.shape_of(indices))
    # One number per label changes: scattering it beats every one-hot of the size of the
    # scores (512×30522, all that is written here: 5 ms; OneHot 30, Equal and Where 25).
    difference = op.ScatterElements(prob, indices, minus_one, axis=1, reduction="add")
    return op.Mul(difference, weight)


def _smoothing(log_prob: ir.Value, dlog_prob: ir.Value) -> tuple[ir.Node, ir.Node] | None:
    """Return the sum over the classes that alone reads log_prob, and what spreads its cotangent.

    That is how smoothed labels use log_prob, if the classes have no weights.
    """
    uses, spread = list(log_prob.uses()), dlog_prob.producer()
    if len(uses) != 1 or log_prob.is_graph_output() or spread is None:
        return None
    node = uses[0].node
    axes = constant_array(optional(node, 1))
    sums = node.op_type == "ReduceSum" and node.attributes.get_int("keepdims", 1) == 0
    along_classes = axes is not None and axes.reshape(-1).tolist() == [1]
    return (node, spread) if sums and along_classes and spread.op_type == "Expand" else None


def _with_kernels(
    op: Ops,
    node: ir.Node,
    dloss: ir.Value,
    dlog_prob: ir.Value | None,
    write: Callable[[], list[ir.Value]],
) -> list[ir.Value]:
    """Write dscores as a kernel, beside one of the loss, which saves other things than log_prob."""
    loss, log_prob = node.outputs[:2]
    given = [v for v in node.inputs if v is not None]
    smoothing = None if dlog_prob is None else _smoothing(log_prob, dlog_prob)
    ignored = node.attributes.get_int("ignore_index")
    reduction = node.attributes.get_string("reduction", "mean")
    attributes = {
        "has_weight": int(len(given) == 3),
        "has_ignored": int(ignored is not None),
        "has_total": int(smoothing is not None),
        "ignored": ignored or 0,
        "reduction": ["none", "mean", "sum"].index(reduction),
    }
    forward, backward = "SoftmaxCrossEntropy", "SoftmaxCrossEntropyGrad"
    if smoothing is None:
        mark_kernel([node], forward, given, [loss, log_prob], saved=[log_prob], **attributes)
        inputs = [dloss, log_prob, *given]
        return op.kernel(backward, inputs, write, saved=[log_prob], **attributes)
    total, spread = smoothing
    outputs = [loss, log_prob, total.outputs[0]]
    mark_kernel([node, total], forward, given, outputs, saved=[log_prob], **attributes)
    last = op.target[-1]
    (dscores,) = write()
    nodes = [spread, *list(written_after(op.target, last))[::-1]]
    inputs = [dloss, log_prob, *given, *required(spread)]
    mark_kernel(nodes, backward, inputs, [dscores], saved=[log_prob], **attributes)
    return [dscores]


@rule("NegativeLogLikelihoodLoss", notes="to the scores and to the class weights")
def negative_log_likelihood_loss(op: Ops, node: ir.Node, dloss: ir.Value) -> Cotangents:
    """Only the element that a label points at has a gradient: minus what its term counts."""
    (x,) = required(node)
    labels, weight = _labels_and_weight(op, node, op.cast(dloss, working_type(x)))
    indices = op.unsqueeze(labels, [1])
    updates = op.Expand(op.cast(-weight, x.dtype), op.shape_of(indices))
    dx = op.ScatterElements(op.zeros_like(x), indices, updates, axis=1)
    if optional(node, 2) is None:
        return (dx,)
    wide = working_type(x)
    return dx, None, _class_weights(op, node, op.cast(x, wide), op.cast(dloss, wide))


def _class_weights(op: Ops, node: ir.Node, log_prob: ir.Value, dloss: ir.Value) -> ir.Value:
    """dw_c = Σ (term - mean) dloss / total over the labels c, where a term is -log_prob.

    Only the mean divides by the total weight, and only there is a mean to subtract.
    """
    labels, weights = required(node, 3)[1:]
    counts = op.cast(weights, dloss.dtype)
    ignored = node.attributes.get_int("ignore_index")
    kept = None if ignored is None else op.Not(op.Equal(labels, ignored))
    if kept is not None:
        labels = op.Where(kept, labels, 0)
    picked = op.GatherElements(log_prob, op.unsqueeze(labels, [1]), axis=1)
    terms = op.Neg(op.shape_as(op.Squeeze(picked, [1]), labels))
    if node.attributes.get_string("reduction", "mean") == "mean":
        counts = op.Gather(counts, labels, axis=0)
        counts = counts if kept is None else op.Where(kept, counts, 0.0)
        total = op.ReduceSum(counts, keepdims=0)
        total = op.Where(op.Equal(total, 0.0), 1.0, total)
        mean = op.ReduceSum(op.Mul(terms, counts), keepdims=0) / total
        terms = (terms - mean) / total
    parts = op.Mul(terms, dloss)
    if kept is not None:
        parts = op.Where(kept, parts, 0.0)
    zeros = op.cast(op.zeros_like(weights), dloss.dtype)
    places, flat = op.Reshape(labels, [-1]), op.Reshape(parts, [-1])
    added = op.ScatterElements(zeros, places, flat, axis=0, reduction="add")
    return op.cast(op.shape_as(added, weights), weights.dtype)


def _labels_and_weight(op: Ops, node: ir.Node, dloss: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return labels that can be indexed with, and the derivative of the loss by each term.

    The latter is a scalar, or has the shape of the labels with an axis for the classes. Labels to
    be ignored become 0 and count nothing. Where nothing counts, a mean over nothing has the
    gradient 0, although the loss itself is nan.
    """
    labels, class_weights = required(node, 2)[1], optional(node, 2)
    reduction = node.attributes.get_string("reduction", "mean")
    counts: ir.Value | None = None  # of each label; None if all count one
    ignored = node.attributes.get_int("ignore_index")
    if ignored is not None:
        kept = op.Not(op.Equal(labels, ignored))
        labels = op.Where(kept, labels, 0)
    if class_weights is not None:
        counts = op.Gather(op.cast(class_weights, dloss.dtype), labels, axis=0)
    if ignored is not None:
        one = op.const(1.0, dloss.dtype)
        counts = op.Where(kept, one if counts is None else counts, op.const(0.0, dloss.dtype))
    if reduction == "mean":
        if counts is None:
            total = op.cast(op.count(labels), dloss.dtype)
        else:
            total = op.ReduceSum(counts, keepdims=0)
            total = op.Where(op.Equal(total, 0.0), 1.0, total)
        dloss = dloss / total
    if counts is not None:
        dloss = dloss * counts
    return labels, dloss if counts is None and reduction != "none" else op.unsqueeze(dloss, [1])
