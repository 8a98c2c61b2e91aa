"""RMS normalization as exporters write it, x / √(mean(x²) + ε) · scale, which gets one gradient.

It is seven nodes, and their gradients are fifteen; as one group, a native kernel can stand in for
either. A language model has sixty of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import Cotangents, Rule
from onnxtrain.offline.autodiff.rules.norm import scaled_rows
from onnxtrain.offline.graph.kernels import mark_kernel
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import constant_array, dims_of, same_dims
from onnxtrain.offline.graph.subgraphs import maker_read_once


def join_rms_norm(products: Iterable[ir.Node], wanted: Collection[ir.Value]) -> dict[ir.Node, Rule]:
    """Return a rule for each Mul that is the last node of such a normalization.

    `wanted` are the values that are differentiated, or with respect to which.
    """
    found = {product: _norm_behind(product, wanted) for product in products}
    return {product: _rule(norm) for product, norm in found.items() if norm is not None}


@dataclass(frozen=True)
class _Norm:
    """The normalization of the last axis of x."""

    nodes: tuple[ir.Node, ...]  # in their order
    x: ir.Value
    scale: ir.Value
    inverse: ir.Value  # 1 / √(mean(x²) + ε)
    epsilon: float


def _rule(norm: _Norm) -> Rule:
    x, scale, inverse = norm.x, norm.scale, norm.inverse

    def gradient(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
        last = op.rank(x) - 1

        def write() -> list[ir.Value | None]:
            dx, dscale, _ = scaled_rows(op, dy, x, inverse, scale, None, [last], False)
            return [dx, dscale]

        about: dict[str, int | float] = {"axis": last, "epsilon": norm.epsilon}
        mark_kernel(
            norm.nodes, "RMSNorm", [x, scale], [node.outputs[0], inverse], saved=[inverse], **about
        )
        inputs = [dy, x, scale, inverse]
        dx, dscale = op.kernel("RMSNormGrad", inputs, write, saved=[inverse], **about)
        return {x: dx, scale: dscale}

    stops = frozenset({0, 1})  # the gradient goes past the factors, to x and the scale
    return Rule(
        gradient, "Mul", "", 1, False, stops, "RMSNormalization", reaches=lambda _: (x, scale)
    )


def _norm_behind(last: ir.Node, wanted: Collection[ir.Value]) -> _Norm | None:
    """Return the normalization that a product by a scale ends, if nobody else reads its parts."""
    search = _Search(wanted)
    for normalized, scale in _in_either_order(last):
        product = search.maker(normalized, "Mul")
        for x, inverse in () if product is None else _in_either_order(product):
            found = search.inverse_root(x, inverse)
            dims = dims_of(x)
            if product is None or found is None or not dims:
                continue
            if same_dims(dims_of(scale), dims[-1:]) and scale.dtype == x.dtype:
                nodes, epsilon = found
                return _Norm((*nodes, product, last), x, scale, inverse, epsilon)
    return None


@dataclass(frozen=True)
class _Search:
    wanted: Collection[ir.Value]

    def inverse_root(
        self, x: ir.Value, inverse: ir.Value
    ) -> tuple[tuple[ir.Node, ...], float] | None:
        """Return the nodes of 1 / √(mean(x²) + ε), and ε."""
        inverted = self.maker(inverse, "Reciprocal") or self.maker(inverse, "Div")
        if inverted is None or (inverted.op_type == "Div" and _number(inverted.inputs[0]) != 1):
            return None
        root = self.maker(inverted.inputs[-1], "Sqrt")
        total = None if root is None else self.maker(root.inputs[0], "Add")
        for average, added in () if total is None else _in_either_order(total):
            mean, epsilon = self.maker(average, "ReduceMean"), _number(added)
            squares = None if mean is None else self._squares(mean.inputs[0], x)
            if mean is None or squares is None or epsilon is None or root is None or total is None:
                continue
            if _is_over_rows(mean, x):
                return (squares, mean, total, root, inverted), epsilon
        return None

    def _squares(self, value: ir.Value | None, x: ir.Value) -> ir.Node | None:
        product, power = self.maker(value, "Mul"), self.maker(value, "Pow")
        if product is not None and list(product.inputs) == [x, x]:
            return product
        is_square = power is not None and power.inputs[0] is x and _number(power.inputs[1]) == 2
        return power if is_square else None

    def maker(self, value: ir.Value | None, op_type: str) -> ir.Node | None:
        """Return the node of a kind that makes a value, if the value is read once and unwanted."""
        if value is None or value in self.wanted:
            return None
        return maker_read_once(value, op_type)


def _in_either_order(node: ir.Node) -> list[tuple[ir.Value, ir.Value]]:
    a, b = node.inputs
    return [] if a is None or b is None else [(a, b), (b, a)]


def _number(value: ir.Value | None) -> float | None:
    array = None if value is None else constant_array(value)
    return float(array.item()) if array is not None and array.size == 1 else None


def _is_over_rows(mean: ir.Node, x: ir.Value) -> bool:
    """Whether an average is taken over the last axis, which stays."""
    axes = constant_array(mean.inputs[1]) if len(mean.inputs) > 1 and mean.inputs[1] else None
    rank = len(dims_of(x) or ())
    if axes is None or axes.size != 1 or not rank:
        return False
    return int(axes.item()) in (-1, rank - 1) and mean.attributes.get_int("keepdims", 1) == 1
