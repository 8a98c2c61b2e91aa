"""The gradient of a layer some of whose channels train: it is computed for these channels alone.

The cotangent of the rows reads the same channels of the cotangent of the output. The weight with
its rows joined in is not kept for the backward pass: it is joined again when the cotangent of the
output is there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import Cotangents, Rule, lookup
from onnxtrain.offline.graph.control_dependencies import flag_of
from onnxtrain.offline.graph.op_facts import LINEAR
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import constant_array
from onnxtrain.offline.graph.subgraphs import release


def join_sparse(op: Ops, graph: ir.Graph, targets: Collection[ir.Value]) -> dict[ir.Node, Rule]:
    """Return the rules of the layers whose weight has trained rows joined in."""
    found = {}
    for node in graph:
        if node.domain == "" and node.op_type == "ScatterND" and node.inputs[2] in targets:
            layer = _layer_behind(node)
            rule = None if layer is None else lookup(layer.op_type, "", op.opset)
            if layer is not None and rule is not None:
                found[layer] = _rule(node, layer, rule)
    return found


def _layer_behind(scatter: ir.Node) -> ir.Node | None:
    """Return the only node that reads a joined weight, as its second input."""
    value, data, places = scatter.outputs[0], scatter.inputs[0], scatter.inputs[1]
    if data is None or data.const_value is None or constant_array(places) is None:
        return None
    uses = list(value.uses())
    if len(uses) == 1 and uses[0][0].op_type == "Transpose" and not value.is_graph_output():
        value = uses[0][0].outputs[0]
        uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output():
        return None
    node, index = uses[0]
    is_layer = node.domain == "" and node.op_type in LINEAR - {"ConvTranspose"}
    return node if is_layer and index == 1 else None


def _rule(scatter: ir.Node, layer: ir.Node, usual: Rule) -> Rule:
    rows = scatter.inputs[2]
    assert rows is not None

    def gradient(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
        x, _, *bias = node.inputs
        assert x is not None
        cotangents: dict[ir.Value, ir.Value | None] = {}
        again = _with_weight(op, node, _joined_again(op, scatter, node, dy))
        of_x, _, *of_bias = _listed(usual(op, again, dy))
        cotangents[x] = of_x
        if bias and bias[0] is not None and of_bias:
            cotangents[bias[0]] = of_bias[0]
        release(again)
        cotangents[rows] = _of_rows(op, scatter, node, usual, x, dy)
        return cotangents

    return Rule(
        gradient, layer.op_type, "", 1, False, frozenset({1}), "sparse", reaches=lambda _: (rows,)
    )


def _joined_again(op: Ops, scatter: ir.Node, node: ir.Node, dy: ir.Value) -> ir.Value:
    """Join the weight when the cotangent of the output is known, and not before."""
    data, places, rows = scatter.inputs
    assert data is not None
    behind = op.Min(flag_of(op, dy), op.int64([0]))
    joined = op.type_as(op.ScatterND(data, op.Add(places, behind), rows), data)
    weight = node.inputs[1]
    producer = None if weight is None else weight.producer()
    if producer is not None and producer.op_type == "Transpose" and weight is not None:
        joined = op.type_as(op.Transpose(joined, perm=[1, 0]), weight)
    return joined


def _of_rows(
    op: Ops, scatter: ir.Node, node: ir.Node, usual: Rule, x: ir.Value, dy: ir.Value
) -> ir.Value:
    """Return the cotangent of the trained rows, from their channels of the cotangent dy."""
    places, rows = scatter.inputs[1], scatter.inputs[2]
    array = constant_array(places)
    assert array is not None and rows is not None
    channels = op.int64([int(i) for i in array.reshape(-1)])
    if node.op_type != "Conv":
        part = op.Gather(dy, channels, axis=-1)
        (made,) = op.call("Gemm", _flat(op, part), _flat(op, x), transA=1, like=rows)
        return made
    groups = node.attributes.get_int("group", 1)
    part = op.Gather(dy, channels, axis=1)
    op.with_dims(part, [op.dims(dy)[0], array.size, *op.dims(dy)[2:]])
    if groups > 1:  # depthwise: each channel reads its own channel of x
        own = op.Gather(x, channels, axis=1)
        x = op.with_dims(own, [op.dims(x)[0], array.size, *op.dims(x)[2:]])
    small = _with_weight(op, node, rows, x=x, groups=array.size if groups > 1 else 1)
    _, of_rows = _listed(usual(op, small, part))[:2]
    release(small)
    assert of_rows is not None
    return of_rows


def _listed(cotangents: Cotangents) -> list[ir.Value | None]:
    assert not isinstance(cotangents, Mapping)
    return list(cotangents)


def _flat(op: Ops, value: ir.Value) -> ir.Value:
    """Flatten all axes but the last into rows."""
    if op.rank(value) == 2:
        return value
    return op.Reshape(value, op.dims_vector(-1, op.dim(value, -1)))


def _with_weight(
    op: Ops,
    node: ir.Node,
    weight: ir.Value,
    *,
    x: ir.Value | None = None,
    groups: int | None = None,
) -> ir.Node:
    """Return a node like a layer, in no graph, with another weight; its bias stays out with x."""
    attributes = [a for a in node.attributes.values() if groups is None or a.name != "group"]
    if groups is not None:
        attributes.append(ir.AttrInt64("group", groups))
    inputs = [node.inputs[0], weight, *node.inputs[2:]] if x is None else [x, weight]
    made = ir.Node("", node.op_type, inputs, attributes, num_outputs=1)
    made.outputs[0].name = op.names.fresh(f"{node.outputs[0].name}_like")
    op.type_as(made.outputs[0], node.outputs[0])
    return made
