"""LayerNormalization as exporters wrote it before opset 17, in nine nodes: one node instead.

c = x - mean(x), then c / √(mean(c²) + ε) · scale + bias over the last axis. The operator is one
pass over memory, has one gradient, and a native kernel each way.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import constant_array, dims_of, same_dims
from onnxtrain.offline.graph.subgraphs import maker_read_once, replace_node


def join_layer_norms(model: ir.Model) -> None:
    """Replace the nodes of each written out LayerNormalization, in place."""
    graph = model.graph
    for addition in [n for n in graph if n.op_type == "Add" and n.domain == ""]:
        found = _norm_behind(addition)
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


def _norm_behind(addition: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value, float] | None:
    for scaled, bias in _pairs(addition):
        product = maker_read_once(scaled, "Mul")
        for normalized, scale in () if product is None else _pairs(product):
            quotient = maker_read_once(normalized, "Div")
            if quotient is None or any(v is None for v in quotient.inputs):
                continue
            centred, root = quotient.inputs
            assert centred is not None and root is not None
            found = _centred_and_epsilon(centred, root)
            if found is None:
                continue
            x, epsilon = found
            row = (dims_of(x) or ())[-1:]
            floats = {v.dtype for v in (x, scale, bias)} == {ir.DataType.FLOAT}
            if floats and row and all(same_dims(dims_of(v), row) for v in (scale, bias)):
                return x, scale, bias, epsilon
    return None


def _centred_and_epsilon(centred: ir.Value, root: ir.Value) -> tuple[ir.Value, float] | None:
    sqrt = maker_read_once(root, "Sqrt")
    total = (
        None if sqrt is None or sqrt.inputs[0] is None else maker_read_once(sqrt.inputs[0], "Add")
    )
    for variance, added in () if total is None else _pairs(total):
        epsilon = constant_array(added)
        square = _mean_of(variance)
        if epsilon is None or epsilon.size != 1 or square is None:
            continue
        power = maker_read_once(square, "Pow") or maker_read_once(square, "Mul")
        if power is None or power.inputs[0] is None:
            continue
        base, exponent = power.inputs
        two = None if power.op_type == "Mul" else constant_array(exponent)
        is_square = exponent is base if power.op_type == "Mul" else two is not None and two == 2
        x = _source_of_centred(centred)
        if is_square and x is not None and (base is centred or _source_of_centred(base) is x):
            return x, float(epsilon.item())
    return None


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
