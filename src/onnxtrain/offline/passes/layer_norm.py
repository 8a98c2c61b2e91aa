"""LayerNormalization as exporters wrote it before opset 17, in nine nodes: one node instead.

c = x - mean(x), then c / √(mean(c²) + ε) · scale + bias over the last axis. The operator is one
pass over memory, has one gradient, and a native kernel each way.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import constant_array, dims_of, same_dims
from onnxtrain.offline.graph.subgraphs import maker_read_once, replace_node


def join_layer_norms(model: ir.Model, trainable: Collection[str] = ()) -> None:
    """Replace the nodes of each written out LayerNormalization, in place.

    One whose ε or exponent is to train keeps its nodes.
    """
    graph = model.graph
    for addition in [n for n in graph if n.op_type == "Add" and n.domain == ""]:
        found = _Search(frozenset(trainable)).norm_behind(addition)
        if found is None:
            continue
        x, scale, bias, epsilon = found
        op = Ops(graph, model.opset_imports[""])
        op.scope = addition.name or str(addition.outputs[0].name)
        last = graph[-1]
        (made,) = op.call(
            "LayerNormalization", x, scale, bias, like=x, axis=-1, epsilon=epsilon, stash_type=1
        )
        replace_node(addition, [made], last)


@dataclass(frozen=True)
class _Search:
    trainable: frozenset[str]

    def norm_behind(self, addition: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value, float] | None:
        """Return x, scale, bias and ε of a normalization that an Add ends."""
        for scaled, bias in _pairs(addition):
            product = maker_read_once(scaled, "Mul")
            for normalized, scale in () if product is None else _pairs(product):
                quotient = maker_read_once(normalized, "Div")
                if quotient is None or any(v is None for v in quotient.inputs):
                    continue
                centred, root = quotient.inputs
                assert centred is not None and root is not None
                found = self._centred_and_epsilon(centred, root)
                if found is None:
                    continue
                x, epsilon = found
                row = (dims_of(x) or ())[-1:]
                floats = {v.dtype for v in (x, scale, bias)} == {ir.DataType.FLOAT}
                if floats and row and all(same_dims(dims_of(v), row) for v in (scale, bias)):
                    return x, scale, bias, epsilon
        return None

    def _centred_and_epsilon(
        self, centred: ir.Value, root: ir.Value
    ) -> tuple[ir.Value, float] | None:
        sqrt = maker_read_once(root, "Sqrt")
        of_root = None if sqrt is None else sqrt.inputs[0]
        total = None if of_root is None else maker_read_once(of_root, "Add")
        for variance, added in () if total is None else _pairs(total):
            epsilon, square = self._number(added), _mean_of(variance)
            if epsilon is None or square is None:
                continue
            power = maker_read_once(square, "Pow") or maker_read_once(square, "Mul")
            if power is None or power.inputs[0] is None:
                continue
            base, exponent = power.inputs
            is_product = power.op_type == "Mul"
            is_square = exponent is base if is_product else self._number(exponent) == 2
            x = _source_of_centred(centred)
            if is_square and x is not None and (base is centred or _source_of_centred(base) is x):
                return x, epsilon
        return None

    def _number(self, value: ir.Value | None) -> float | None:
        """Return a constant that neither trains nor has axes of its own."""
        array = constant_array(value)
        if array is None or array.size != 1 or array.ndim > 1:
            return None
        return None if value is None or value.name in self.trainable else float(array.item())


def _source_of_centred(value: ir.Value | None) -> ir.Value | None:
    """Return x of x - mean(x)."""
    minus = None if value is None or value.is_graph_output() else value.producer()
    if minus is None or (minus.domain, minus.op_type) != ("", "Sub"):
        return None
    x, mean = minus.inputs
    return x if x is not None and mean is not None and _mean_of(mean) is x else None


def _mean_of(value: ir.Value) -> ir.Value | None:
    """Return what a value is the mean of over the last axis, which stays."""
    node = value.producer()
    if node is None or (node.domain, node.op_type) != ("", "ReduceMean") or len(node.inputs) < 2:
        return None
    axes, x = constant_array(node.inputs[1]), node.inputs[0]
    rank = len(dims_of(x) or ()) if x is not None else 0
    last = axes is not None and axes.size == 1 and rank and int(axes.item()) in (-1, rank - 1)
    return x if last and node.attributes.get_int("keepdims", 1) == 1 else None


def _pairs(node: ir.Node) -> list[tuple[ir.Value, ir.Value]]:
    a, b = node.inputs
    return [] if a is None or b is None else [(a, b), (b, a)]
