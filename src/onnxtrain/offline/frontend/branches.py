"""An If whose condition is known before run time is replaced by the branch that it takes.

The torchscript exporter writes `squeeze` as an If: Squeeze where an axis has size one, else the
value itself. Inference finds no rank for the result, nor for what follows. So the If is removed
where shapes decide the condition, or where only one branch has the rank that its readers need.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.graph.infer import infer_shapes
from onnxtrain.offline.graph.initializers import rename_initializer, replace_by_initializer
from onnxtrain.offline.graph.names import Names, label_of
from onnxtrain.offline.graph.ranks import RANK_FROM_USE
from onnxtrain.offline.graph.shapes import constant_array, dims_of, dims_read
from onnxtrain.offline.graph.subgraphs import take_out, values_of

Partial = np.ndarray[Any, Any]  # of objects; None stands for what only run time tells
_MOST = 64  # elements: shapes, axes and what is computed from them


def take_known_branches(model: ir.Model) -> None:
    """Replace every If that can be decided, in place, until none is left.

    Along with it go the integers in bodies that shapes decide. In the graph around them, inference
    computes with sizes; in a body it does not, and finds no shape for a Slice to half of an axis.
    """
    while any(
        [
            *(_fold_sizes(body) for body in model.graph.subgraphs()),
            *(_decide(model, graph) for graph in (model.graph, *model.graph.subgraphs())),
        ]
    ):
        infer_shapes(model)


def _fold_sizes(body: ir.Graph) -> bool:
    found = False
    for node in list(body):
        output = node.outputs[0]
        if len(node.outputs) > 1 or output.is_graph_output() or not output.uses():
            continue
        known = None if constant_array(output) is not None else known_value(output)
        if known is not None and output.dtype is not None and None not in known.ravel():
            array = known.astype(output.dtype.numpy())
            replace_by_initializer(body, node, ir.tensor(array))
            found = True
    return found


def _decide(model: ir.Model, graph: ir.Graph) -> bool:
    found = False
    for node in [n for n in graph if n.op_type == "If" and n.domain == ""]:
        taken = _known_branch(node)
        if taken is not None:
            _take(model, graph, node, taken)
            found = True
    return found


def _known_branch(node: ir.Node) -> ir.Graph | None:
    """Return the branch that the condition selects, or the only one that its readers can use.

    Where its results lack the rank that they need, the model would fail a few nodes later.
    """
    then, otherwise = (node.attributes[f"{name}_branch"].as_graph() for name in ("then", "else"))
    condition = known_value(node.inputs[0])
    if condition is not None and condition.size == 1 and condition.flat[0] is not None:
        return then if condition.flat[0] else otherwise
    fitting = [
        branch
        for branch in (then, otherwise)
        if all(
            RANK_FROM_USE not in output.meta
            or made.shape is None
            or len(made.shape) == output.meta[RANK_FROM_USE]
            for output, made in zip(node.outputs, branch.outputs, strict=True)
        )
    ]
    return fitting[0] if len(fitting) == 1 else None


def _take(model: ir.Model, graph: ir.Graph, node: ir.Node, branch: ir.Graph) -> None:
    """Move the nodes of a branch to the place of the If; names of its outputs survive."""
    names = Names.of(model.graph)
    taken = {value.name for value in values_of(graph)}
    results, inner = take_out(branch)
    for name, value in list(branch.initializers.items()):
        del branch.initializers[name]
        if name in taken:
            rename_initializer(value, names.fresh(name))
        graph.initializers.add(value)
    for moved in inner:
        for value in moved.outputs:
            if value.name and value.name in taken:
                value.name = names.fresh(value.name)
    graph.insert_before(node, inner)
    for old, result in zip(node.outputs, results, strict=True):
        # Not the result itself: it may be an outer value, or two outputs at once.
        identity = ir.node("Identity", [result], name=names.fresh(f"{label_of(node)}/Identity"))
        graph.insert_before(node, [identity])
        new = identity.outputs[0]
        new.type, new.shape, new.name = old.type, old.shape, old.name
        new.meta.update(old.meta)  # the rank that its readers need
        old.name = names.fresh(f"{old.name}_replaced")
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def known_value(value: ir.Value | None) -> Partial | None:
    """Return the known elements of a small integer or boolean value, or None."""
    if value is None:
        return None
    constant = constant_array(value)
    if constant is not None:
        small = constant.size <= _MOST and constant.dtype.kind in "iub"
        return constant.astype(object) if small else None
    node = value.producer()
    if node is None or node.domain != "":
        return None
    if node.op_type in _ELEMENTWISE:
        return _elementwise(_ELEMENTWISE[node.op_type], node.inputs)
    return _KNOWN[node.op_type](node) if node.op_type in _KNOWN else None


def _shape(node: ir.Node) -> Partial | None:
    dims = dims_read(node)
    if dims is None:
        return None
    return np.array([d if isinstance(d, int) else None for d in dims], dtype=object)


def _size(node: ir.Node) -> Partial | None:
    shape = _shape(node)
    return None if shape is None or None in shape else np.array(np.prod(shape), dtype=object)


def _gather(node: ir.Node) -> Partial | None:
    data, indices = known_value(node.inputs[0]), known_value(node.inputs[1])
    if data is None or indices is None or None in indices.flat or data.ndim != 1:
        return None
    places = indices.astype(np.int64)
    if np.any(places < -data.size) or np.any(places >= data.size):
        return None  # in a branch that is not taken
    return np.asarray(data[places], dtype=object)


def _same(node: ir.Node) -> Partial | None:
    return known_value(node.inputs[0])


def _flat(node: ir.Node) -> Partial | None:
    """Squeeze and Unsqueeze of something that has at most one element, or one axis."""
    value = known_value(node.inputs[0])
    rank = dims_of(node.outputs[0])
    if value is None or rank is None or value.size > 1:
        return None
    return value.reshape((1,) * len(rank))


def _cast(node: ir.Node) -> Partial | None:
    to = ir.DataType(node.attributes.get_int("to", 0))
    if not (to.is_integer() or to == ir.DataType.BOOL):
        return None
    return _elementwise(bool if to == ir.DataType.BOOL else int, node.inputs)


def _elementwise(function: Callable[..., Any], inputs: Sequence[ir.Value | None]) -> Partial | None:
    """Apply a function to the elements that are known."""

    def apply(*row: Any) -> Any:
        return None if any(v is None for v in row) else function(*row)

    values = [known_value(v) for v in inputs]
    if any(v is None for v in values):
        return None
    return np.asarray(np.frompyfunc(apply, len(values), 1)(*values), dtype=object)


_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "Equal": operator.eq,
    "Greater": operator.gt,
    "GreaterOrEqual": operator.ge,
    "Less": operator.lt,
    "LessOrEqual": operator.le,
    "Not": operator.not_,
    "And": operator.and_,
    "Or": operator.or_,
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Div": lambda a, b: a // b if a >= 0 and b > 0 else None,
}
_KNOWN: dict[str, Callable[[ir.Node], Partial | None]] = {
    "Shape": _shape,
    "Size": _size,
    "Gather": _gather,
    "Identity": _same,
    "Squeeze": _flat,
    "Unsqueeze": _flat,
    "Cast": _cast,
    "CastLike": _same,
}
