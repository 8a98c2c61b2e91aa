"""The rule of If; Loop and Scan are refused, since the number of their steps is open."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

import onnx_ir as ir

from onnxtrain.errors import NotDifferentiableError
from onnxtrain.offline.autodiff.engine import current_path, differentiate
from onnxtrain.offline.autodiff.registry import Cotangents, optional, rule
from onnxtrain.offline.graph.names import Names
from onnxtrain.offline.graph.op_facts import RANDOM
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import constant_array, dims_of, same_dims
from onnxtrain.offline.graph.sweep import sweep


@rule("If", notes="to the values that its branches use; what they need is computed again")
def if_(op: Ops, node: ir.Node, *dys: ir.Value | None) -> Cotangents:
    """The gradient is an If with the same condition, the branches of which are the gradients.

    An If has no data inputs: its branches use values of the graphs around them. Each branch of the
    gradient returns a cotangent for all of these, zero for those that only the other one uses.
    """
    inside = current_path().inside(node)
    wanted = list(dict.fromkeys(v for branch in inside for v in branch.reached()))
    if not wanted:
        return {}
    then_branch, else_branch = (
        _gradient_branch(op, node, node.attributes[name].as_graph(), dys, wanted)
        for name in ("then_branch", "else_branch")
    )
    results = op.call(
        "If", node.inputs[0], outputs=len(wanted), then_branch=then_branch, else_branch=else_branch
    )
    return {value: op.type_as(result, value) for value, result in zip(wanted, results, strict=True)}


def _gradient_branch(
    op: Ops,
    node: ir.Node,
    branch: ir.Graph,
    dys: Sequence[ir.Value | None],
    wanted: Sequence[ir.Value],
) -> ir.Graph:
    through = current_path().straight_through

    def write() -> Sequence[ir.Value]:
        copies: dict[ir.Value, ir.Value] = {}
        copy_graph(branch, op.target, copies, op.names)
        seeds: dict[ir.Value, list[ir.Value]] = {}
        for output, dy in zip(branch.outputs, dys, strict=True):
            if dy is not None:
                inner = copies.get(output, output)
                seeds.setdefault(inner, []).append(_as_in_branch(op, dy, inner))
        totals = {value: op.add_all(parts) for value, parts in seeds.items()}
        found = differentiate(op, list(op.target), totals, wanted, through)
        return [op.zeros_like(v) if (dv := found[v]) is None else dv for v in wanted]

    written = op.body([], write, name=branch.name or "branch")
    sweep(written)
    _require_certainty(node, written)
    return written


def _as_in_branch(op: Ops, dy: ir.Value, inner: ir.Value) -> ir.Value:
    """Give the cotangent the shape that the output has in this branch: it was the one taken."""
    outer = dims_of(dy)
    if inner.shape is None or same_dims(outer, dims_of(inner)):
        return dy
    if outer is not None and len(outer) == len(inner.shape):
        return op.type_as(op.Identity(dy), inner)
    # Changes nothing in the branch that was taken. In the other, which does not run, it lets ranks
    # agree that could not.
    return op.type_as(op.reshape(dy, op.shape_of(inner)), inner)


def _require_certainty(node: ir.Node, written: ir.Graph) -> None:
    """Refuse what would draw other numbers when it is computed again."""
    for inner in written.all_nodes():
        if inner.op_type in RANDOM and inner.domain == "" and not _inference_dropout(inner):
            raise NotDifferentiableError(
                f"a branch of If (node {node.name!r}) draws random numbers with {inner.op_type} "
                f"(node {inner.name!r}), and its gradient depends on them. The gradient computes "
                "the branch again and would draw others: draw them outside of the If"
            )


def _inference_dropout(node: ir.Node) -> bool:
    if node.op_type != "Dropout":
        return False
    training = optional(node, 2)
    known = constant_array(training)
    return training is None or (known is not None and not known.any())


def copy_graph(
    source: ir.Graph, target: ir.Graph, copies: MutableMapping[ir.Value, ir.Value], names: Names
) -> None:
    """Append copies of the nodes and initializers of a graph to another, under new names.

    `copies` is extended by what became of each value. Values from outside stay the same.
    """
    for value in source.initializers.values():
        tensor = value.const_value
        assert tensor is not None
        copies[value] = _copy_value(value, ir.Value(), names)
        # A tensor of its own on the same memory: naming a value renames the tensor it holds.
        copies[value].const_value = ir.Tensor(
            tensor.numpy(), dtype=tensor.dtype, name=copies[value].name
        )
        target.register_initializer(copies[value])
    for node in source:
        inputs = [None if v is None else copies.get(v, v) for v in node.inputs]
        attributes = [_copy_attribute(a, copies, names) for a in node.attributes.values()]
        copy = ir.Node(
            node.domain, node.op_type, inputs, attributes, num_outputs=len(node.outputs),
            overload=node.overload, version=node.version,
            name=names.fresh(f"{node.name}_again") if node.name else None,
        )  # fmt: skip
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            copies[old] = _copy_value(old, new, names)
        target.append(copy)


def _copy_value(old: ir.Value, new: ir.Value, names: Names) -> ir.Value:
    new.name = names.fresh(f"{old.name}_again") if old.name else old.name
    new.type, new.shape = old.type, None if old.shape is None else old.shape.copy()
    return new


def _copy_attribute(
    attribute: ir.Attr, copies: MutableMapping[ir.Value, ir.Value], names: Names
) -> ir.Attr:
    if attribute.is_ref() or attribute.type != ir.AttributeType.GRAPH:
        return attribute
    source = attribute.as_graph()
    inputs = [_copy_value(v, ir.Value(), names) for v in source.inputs]
    copies.update(zip(source.inputs, inputs, strict=True))
    graph = ir.Graph(inputs, [], nodes=[], name=names.fresh(f"{source.name}_again"))
    copy_graph(source, graph, copies, names)
    graph.outputs.extend(copies.get(v, v) for v in source.outputs)
    return ir.AttrGraph(attribute.name, graph)
