"""Forms for which onnxruntime has kernels of integers, in the place of others that mean the same.

- MatMul and Add of a bias become Gemm, whose integer kernel adds the bias as 32-bit integers;
- a weight that is transposed before its product is stored transposed;
- the mean over all positions of an image becomes GlobalAveragePool;
- zeros that are padded before Conv become padding of Conv itself;
- Relu and Clip move in front of what only moves elements (Relu behind MaxPool), next to the layer
  that their bounds become the range of.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.graph.initializers import remove_node
from onnxtrain.offline.graph.op_facts import INTEGER_ARITHMETIC, INTEGER_PRODUCTS
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import constant_array, dims_of, static_dims
from onnxtrain.offline.graph.subgraphs import replace_node
from onnxtrain.offline.passes.quantize.bounds import bounds_of, keeps_range

TURNED = "turned"  # in the meta of an initializer that is stored transposed
_SHOWN = 3


def write_integer_forms(model: ir.Model) -> None:
    """Rewrite a canonical model, in place; its values keep their names."""
    graph = model.graph
    op = Ops(graph, model.opset_imports[""])
    op.scope = "quantization/forms"
    for node in list(graph):
        if node.domain == "" and node.graph is not None:
            if node.op_type == "MatMul":
                _join_bias(op, node)
            elif node.op_type == "ReduceMean":
                _pool_everything(op, node)
            elif node.op_type == "Pad":
                _pad_inside(graph, node)
    while any([_move_bounds(graph, node) for node in list(graph)]):
        pass


def store_turned_weights(graph: ir.Graph) -> None:
    """Store matrices as products read them, where torch's newer exporter transposes them each time.

    A weight that is computed would be taken for data, and stay a float.
    """
    for node in [n for n in graph if n.op_type == "Transpose" and n.domain == ""]:
        weight, turned = node.inputs[0], node.outputs[0]
        sizes = None if weight is None else static_dims(weight)
        if weight is None or weight.const_value is None or sizes is None or len(sizes) != 2:
            continue
        readers = {(user.op_type, user.domain, index) for user, index in turned.uses()}
        is_seen = any(v.is_graph_input() or v.is_graph_output() for v in (weight, turned))
        if is_seen or len(weight.uses()) != 1 or readers != {("MatMul", "", 1)}:
            continue
        if list(node.attributes.get_ints("perm", (1, 0))) == [1, 0]:
            turn(weight, weight.const_value.numpy())
            ir.convenience.replace_all_uses_with(turned, weight)
            graph.remove(node, safe=True)


def turn(weight: ir.Value, array: np.ndarray) -> None:
    """Store a matrix, which is this array, transposed under its name."""
    weight.const_value = ir.Tensor(np.ascontiguousarray(array.T), name=weight.name)
    weight.shape = ir.Shape(array.T.shape)
    weight.meta[TURNED] = True


def note_on_turned(graph: ir.Graph) -> tuple[str, ...]:
    """Tell whose weights are no longer stored as the given model has them."""
    turned = [name for name, value in graph.initializers.items() if TURNED in value.meta]
    if not turned:
        return ()
    some = ", ".join(map(repr, turned[:_SHOWN])) + (" ..." if len(turned) > _SHOWN else "")
    return (f"Stored transposed, as [inputs, outputs]: {some}.",)


def _join_bias(op: Ops, product: ir.Node) -> None:
    x, weight = product.inputs[:2]
    dims, matrix = None if x is None else dims_of(x), static_dims(weight) if weight else None
    add = _only_reader(product.outputs[0])
    if x is None or weight is None or not dims or not matrix or len(matrix) != 2 or len(dims) < 2:
        return
    if add is None or (add.domain, add.op_type) != ("", "Add") or not weight.is_initializer():
        return
    bias = next((v for v in add.inputs if v is not product.outputs[0]), None)
    if bias is None or not bias.is_initializer() or static_dims(bias) != (matrix[1],):
        return
    graph = add.graph
    assert isinstance(graph, ir.Graph)
    last, rank = graph[-1], len(dims)
    rows = x if rank == 2 else op.Reshape(x, [-1, matrix[0]])
    made = op.with_dims(op.Gemm(rows, weight, bias), [*(dims_of(rows) or ())[:1], matrix[1]])
    gemm = made.producer()
    assert gemm is not None
    if rank > 2:
        sizes = [op.dim(x, axis) for axis in range(rank - 1)]
        made = op.Reshape(made, op.dims_vector(*sizes, matrix[1]))
    replace_node(add, [made], last)
    remove_node(graph, product)
    gemm.name = product.name
    gemm.metadata_props.update(product.metadata_props)


def _pool_everything(op: Ops, mean: ir.Node) -> None:
    x, graph = mean.inputs[0], mean.graph
    dims = None if x is None else dims_of(x)
    given = mean.inputs[1] if len(mean.inputs) > 1 else None
    axes = constant_array(given) if given is not None else mean.attributes.get_ints("axes")
    if x is None or dims is None or axes is None or not isinstance(graph, ir.Graph):
        return
    if len(dims) < 3 or {int(a) % len(dims) for a in axes} != set(range(2, len(dims))):
        return
    last = graph[-1]
    made = op.with_dims(op.GlobalAveragePool(x), [*dims[:2], *[1] * (len(dims) - 2)])
    if not mean.attributes.get_int("keepdims", 1):
        made = op.Flatten(made, axis=1)
    node = made.producer()
    assert node is not None
    node.metadata_props.update(mean.metadata_props)
    replace_node(mean, [made], last)


def _pad_inside(graph: ir.Graph, pad: ir.Node) -> None:
    x, padded = pad.inputs[0], pad.outputs[0]
    before_and_after = _spatial_zeros(pad)
    convs = [user for user, index in padded.uses() if index == 0]
    if x is None or before_and_after is None or padded.is_graph_output() or not convs:
        return
    if len(convs) != len(padded.uses()) or not all(map(_has_plain_padding, convs)):
        return
    for conv in convs:
        own = conv.attributes.get_ints("pads") or [0] * len(before_and_after)
        total = [a + b for a, b in zip(own, before_and_after, strict=True)]
        conv.attributes["pads"] = ir.AttrInt64s("pads", total)
        conv.replace_input_with(0, x)
    remove_node(graph, pad)


def _spatial_zeros(pad: ir.Node) -> list[int] | None:
    """Return how many zeros are in front of and behind each axis of an image, if it is that."""
    x = pad.inputs[0]
    dims = None if x is None else dims_of(x)
    given = [constant_array(v) if v is not None else None for v in pad.inputs[1:]]
    numbers, value, axes = (given + [None] * 3)[:3]
    inputs = [v is not None for v in pad.inputs[1:]] + [False] * 3
    if pad.attributes.get_string("mode", "constant") != "constant" or dims is None:
        return None
    if numbers is None or (inputs[1] and (value is None or value.reshape(-1)[0] != 0)):
        return None
    if inputs[2] and axes is None:
        return None
    rank = len(dims)
    chosen = range(rank) if axes is None else [int(a) % rank for a in axes]
    before, after = dict.fromkeys(range(rank), 0), dict.fromkeys(range(rank), 0)
    for place, axis in enumerate(chosen):
        before[axis], after[axis] = int(numbers[place]), int(numbers[place + len(chosen)])
    outside = (before[0], before[1], after[0], after[1])
    inside = [before[a] for a in range(2, rank)] + [after[a] for a in range(2, rank)]
    return inside if not any(outside) and min(inside, default=-1) >= 0 else None


def _has_plain_padding(node: ir.Node) -> bool:
    automatic = node.attributes.get_string("auto_pad", "NOTSET")
    return (node.domain, node.op_type) == ("", "Conv") and automatic == "NOTSET"


def _move_bounds(graph: ir.Graph, bound: ir.Node) -> bool:
    """Let Relu or Clip go before what moves its input; the result is the same."""
    moved = bound.inputs[0] if bounds_of(bound) is not None else None
    mover = None if moved is None else moved.producer()
    if moved is None or mover is None or not keeps_range(mover):
        return False
    x = mover.inputs[0]
    if x is None or len(mover.outputs) != 1 or _only_reader(moved) is not bound:
        return False
    if _only_reader(x) is not mover or not _leads_to_arithmetic(x):
        return False
    bounded = bound.outputs[0]
    name = bounded.name
    ir.convenience.replace_all_uses_with(bounded, moved, replace_graph_outputs=True)
    bounded.name, moved.name = moved.name, name
    bound.replace_input_with(0, x)
    mover.replace_input_with(0, bounded)
    bounded.shape = x.shape
    graph.remove(bound)
    graph.insert_before(mover, bound)
    return True


def _leads_to_arithmetic(value: ir.Value) -> bool:
    """Whether a value is computed on integers, or moved from there."""
    node = value.producer()
    while node is not None and keeps_range(node):
        node = None if node.inputs[0] is None else node.inputs[0].producer()
    known = INTEGER_PRODUCTS | INTEGER_ARITHMETIC
    return node is not None and node.domain == "" and node.op_type in known


def _only_reader(value: ir.Value) -> ir.Node | None:
    users = [user for user, _ in value.uses()]
    return users[0] if len(users) == 1 and not value.is_graph_output() else None
