"""The rule of If."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.errors import NotDifferentiableError
from onnxtrain.offline.autodiff.engine import current_path, differentiate
from onnxtrain.offline.autodiff.registry import Cotangents, optional, rule
from onnxtrain.offline.graph.copy_graph import copy_graph
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
    require_certainty(node, written, "a branch of If", "the If")
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


def require_certainty(node: ir.Node, written: ir.Graph, where: str, outside: str) -> None:
    """Refuse what would draw other numbers when it is computed again."""
    for inner in written.all_nodes():
        if draws(inner):
            raise NotDifferentiableError(
                f"{where} (node {node.name!r}) draws random numbers with {inner.op_type} "
                f"(node {inner.name!r}), and its gradient depends on them. The gradient computes "
                f"them again and would draw others: draw them outside of {outside}"
            )


def draws(node: ir.Node) -> bool:
    """Tell whether a node draws random numbers; a Dropout does so in training only."""
    if node.op_type not in RANDOM or node.domain != "":
        return False
    training = optional(node, 2) if node.op_type == "Dropout" else None
    known = constant_array(training)
    return node.op_type != "Dropout" or (
        training is not None and (known is None or bool(known.any()))
    )
