"""The definition of Scan as a Loop, whose rule (`loop.py`) then differentiates it."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.offline.autodiff.definitions import definition
from onnxtrain.offline.graph.copy_graph import copy_graph
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import Dim, dims_of

_FIRST = -(2**63)  # as the end of a Slice backwards: up to the first element


@definition("Scan")
def scan(op: Ops, node: ir.Node, *inputs: ir.Value) -> Sequence[ir.Value]:
    """A Loop whose step picks the elements of the scanned inputs by its number.

    What runs from the last element is turned around before or behind the Loop, and what is stacked
    along another axis than the first is transposed behind it.
    """
    body: ir.Graph = node.attributes["body"].as_graph()
    count = node.attributes.get_int("num_scan_inputs", 0)
    carried = len(inputs) - count
    made = len(body.outputs) - carried
    ints = node.attributes.get_ints
    axes = [
        a % op.rank(v)
        for a, v in zip(ints("scan_input_axes") or [0] * count, inputs[carried:], strict=True)
    ]
    turned = ints("scan_input_directions") or [0] * count
    scanned = [
        _turn(op, v, axis) if backwards else v
        for v, axis, backwards in zip(inputs[carried:], axes, turned, strict=True)
    ]

    def step(number: ir.Value, go_on: ir.Value, *states: ir.Value) -> Sequence[ir.Value]:
        elements = [op.Gather(v, number, axis=a) for v, a in zip(scanned, axes, strict=True)]
        copies = dict(zip(body.inputs, (*states, *elements), strict=True))
        copy_graph(body, op.target, copies, op.names)
        return [op.const(True), *(copies.get(v, v) for v in body.outputs)]

    given: list[tuple[str, ir.DataType, Sequence[Dim] | None]] = [
        ("step", ir.DataType.INT64, ()),
        ("go_on", ir.DataType.BOOL, ()),
    ]
    given += [("state", v.dtype, dims_of(v)) for v in inputs[:carried]]  # type: ignore[misc]
    looped = op.body(given, step, name="step")
    steps = op.squeeze(op.dim(scanned[0], axes[0]), [0])
    results = op.call(
        "Loop",
        steps,
        op.const(True),
        *inputs[:carried],
        outputs=len(looped.outputs) - 1,
        body=looped,
    )
    for result, inner in zip(results, looped.outputs[1:], strict=True):
        result.type = inner.type
    stacks = [
        _place(op, _turn(op, stack, 0) if backwards else stack, axis, node.outputs[carried + i])
        for i, (stack, axis, backwards) in enumerate(
            zip(
                results[carried:],
                ints("scan_output_axes") or [0] * made,
                ints("scan_output_directions") or [0] * made,
                strict=True,
            )
        )
    ]
    return [*results[:carried], *stacks]


def _turn(op: Ops, value: ir.Value, axis: int) -> ir.Value:
    return op.Slice(value, [-1], [_FIRST], [axis], [-1])


def _place(op: Ops, stack: ir.Value, axis: int, like: ir.Value) -> ir.Value:
    """Move the first axis to where the Scan stacks."""
    if axis == 0:
        return stack
    order = list(range(1, op.rank(like)))
    axis %= op.rank(like)
    return op.Transpose(stack, perm=[*order[:axis], 0, *order[axis:]])
