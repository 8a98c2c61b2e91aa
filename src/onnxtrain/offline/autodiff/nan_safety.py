"""Where a gradient could be NaN although the derivative is finite.

**Masks.** A mask can be applied with Where or as a factor. The product takes half the time in
onnxruntime, but 0 · ∞ is NaN, and some gradients are infinite where the function is finite: that of
√relu(x) at x = 0 must be 0, not NaN.

So a rule may multiply only where the cotangent comes through operators that cannot make an infinite
number out of finite ones. Beyond a product with weights, an infinite number has already spoilt all
gradients.

**What is selected away.** `Where(mask, √x, 0)` is differentiable at x = 0 where the mask is false,
and so is the softmax of a row of -∞ that a Where replaces. The cotangent is zero there, but zero
times an infinite or undefined derivative is NaN. The nodes where that can happen are guarded: a
zero cotangent gives zero, whatever the forward value is (`Ops.keep_zeros`). They lie before an
operator that can make a cotangent zero, and their derivative may be infinite or their values may
not be finite. Both are followed up to the next product with weights: beyond it, one such number
reaches a whole row. A product that meets both itself is guarded, and followed further.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.graph.op_facts import (
    ADDITIVE,
    BOUNDED_GRADIENT,
    BOUNDED_IF_POSITIVE,
    LINEAR,
    SELECTS,
    UNBOUNDED_GRADIENT,
)
from onnxtrain.offline.graph.quantized_operators import is_quantized_product
from onnxtrain.offline.graph.shapes import constant_array, is_float
from onnxtrain.offline.graph.signs import is_positive


def finite_cotangents(
    nodes: Sequence[ir.Node],
    edges: Mapping[ir.Node, Sequence[ir.Value]],
    unsure: Iterable[ir.Value],
) -> set[ir.Value]:
    """Return the values whose cotangents are finite if all forward values are.

    `nodes` are the active ones, in topological order, `edges` the values that each passes a
    gradient to, and `unsure` the outputs whose seed may be infinite.
    """
    doubtful = set(unsure)
    met: set[ir.Value] = set()
    for node in reversed(nodes):
        met.update(node.outputs, edges[node])
        if not _keeps_finite(node, doubtful):
            doubtful.update(edges[node])
    return met - doubtful


def _keeps_finite(node: ir.Node, doubtful: set[ir.Value]) -> bool:
    if is_quantized_product(node):
        return True
    if node.domain != "":
        return False
    if node.op_type in LINEAR:  # its gradient mixes all elements: an infinity reaches every weight
        return True
    return node.op_type in BOUNDED_GRADIENT and not any(v in doubtful for v in node.outputs)


# ---- what is selected away -----------------------------------------------------------------------


def nodes_to_guard(
    nodes: Sequence[ir.Node],
    active: Sequence[ir.Node],
    edges: Mapping[ir.Node, Sequence[ir.Value]],
    unsure: Iterable[ir.Value],
    trained: Iterable[ir.Value],
) -> set[ir.Node]:
    """Return the active nodes at which a cotangent of zero may meet what is not finite.

    `nodes` are all nodes before the outputs, in topological order; `unsure` are the outputs whose
    seed may have zeros, and `trained` the inputs that are finite.
    """
    from_inputs, strange = _not_finite(nodes, set(trained))
    guarded: set[ir.Node] = set()
    zeros, selected = set(unsure), set(unsure)  # what has cotangents of zero, and by a selection
    for node in reversed(active):
        some = any(v in zeros for v in node.outputs)
        chosen = any(v in selected for v in node.outputs)
        beyond = chosen and not _is(node, LINEAR)
        if (some and _is_doubtful(node, strange)) or (beyond and _is_doubtful(node, from_inputs)):
            guarded.add(node)
        if _is(node, LINEAR) and node not in guarded:
            continue
        if some or not _is(node, ADDITIVE):
            zeros.update(edges[node])
        if chosen or _is(node, SELECTS):
            selected.update(edges[node])
    return guarded


def _not_finite(
    nodes: Sequence[ir.Node], trained: set[ir.Value]
) -> tuple[set[ir.Value], set[ir.Value]]:
    """Return the values that may not be finite because of the inputs, and those because of nodes.

    What callers feed may be anything: targets with NaN for "missing", say. Products with weights
    are not guarded against it, as that would cost time in the first layer of every network.
    """
    from_inputs: set[ir.Value] = set()
    strange: set[ir.Value] = set()
    for node in nodes:
        floats = [v for v in node.inputs if v is not None and is_float(v)]
        given = [v for v in floats if v.producer() is None and v.const_value is None]
        from_inputs.update(v for v in given if v not in trained)
        if _is(node, LINEAR):
            continue
        if _is_unbounded(node) or any(v in strange or _has_infinity(v) for v in floats):
            strange.update(node.outputs)
        if any(v in from_inputs for v in floats):
            from_inputs.update(node.outputs)
    return from_inputs, strange


def _is_doubtful(node: ir.Node, suspects: set[ir.Value]) -> bool:
    """Tell whether the derivative of a node may be infinite, or depend on what is not finite."""
    if _is(node, (ADDITIVE | SELECTS) - LINEAR):
        return False
    values = (*node.inputs, *node.outputs)
    return _is_unbounded(node) or any(v in suspects or _has_infinity(v) for v in values)


def _is_unbounded(node: ir.Node) -> bool:
    """Tell whether a node can make an infinite number or derivative out of finite ones."""
    if not _is(node, UNBOUNDED_GRADIENT):
        return False
    if node.op_type == "Div":
        divisor = constant_array(node.inputs[1])
        safe = divisor is not None and bool(np.all(divisor != 0))
        return not (safe or is_positive(node.inputs[1]))
    if node.op_type == "Pow":
        exponent = constant_array(node.inputs[1])
        return exponent is None or not bool(np.all((exponent >= 1) | (exponent == 0)))
    return node.op_type not in BOUNDED_IF_POSITIVE or not is_positive(node.inputs[0])


def _has_infinity(value: ir.Value | None) -> bool:
    tensor = None if value is None else value.const_value
    if tensor is None or tensor.nbytes > _LARGEST_MASK or not tensor.dtype.is_floating_point():
        return False
    array = constant_array(value)
    return array is not None and not bool(np.isfinite(array.astype(np.float32)).all())


_LARGEST_MASK = 2**24  # bytes; larger constants are weights


def _is(node: ir.Node, family: frozenset[str]) -> bool:
    op_type = "MatMul" if is_quantized_product(node) else "" if node.domain else node.op_type
    return op_type in family
