"""Lists that a Loop appends to, once in each step, become tensors that it collects.

`for x in xs: outs.append(...)` with `torch.stack(outs)` behind it is exported as a Loop that
carries a sequence. What it inserts in each step may as well be stacked by the Loop itself.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.frontend.upgrade.rewrite import Rewriter
from onnxtrain.offline.graph.loop_parts import LoopParts, State, replace_loop
from onnxtrain.offline.graph.shapes import constant_array, dims_of

Elements = Callable[[ir.Value], list[ir.Value] | None]


def collect_appended(
    model: ir.Model, write: Rewriter, elements: Elements, readers: Container[str]
) -> bool:
    """Let Loops collect what they append to sequences, in place; tell if any does.

    `elements` tells what is in a sequence before the Loop, `readers` are the operators that read
    one.
    """
    changed = False
    for graph in (model.graph, *model.graph.subgraphs()):
        for node in [n for n in graph if n.op_type == "Loop" and n.domain == ""]:
            changed |= _collect_in(node, write, elements, readers)
    return changed


def _collect_in(
    node: ir.Node, write: Rewriter, elements: Elements, readers: Container[str]
) -> bool:
    parts = LoopParts(node)
    for state in parts.states:
        appended = _appended(state)
        before = None if appended is None else elements(state.initial)
        if appended is None or before is None or not _can_stack(parts, state, appended, readers):
            continue
        if _reads_of_last(state) and not before:
            continue
        stack = ir.Value(name=write.name(f"{state.final.name}_stacked"), type=appended.type)
        stack.shape = ir.Shape([None, *(dims_of(appended) or ())])
        for reader, _ in state.final.uses():
            _read(write, reader, before, stack)
        new = _collect(write, parts, state, appended, before, stack)
        _collect_in(new, write, elements, readers)
        return True
    return False


def _collect(
    write: Rewriter,
    parts: LoopParts,
    state: State,
    appended: ir.Value,
    before: Sequence[ir.Value],
    stack: ir.Value,
) -> ir.Node:
    """Replace the Loop by one that gives the stack, and carries at most the last element."""
    body, place = parts.body, parts.states.index(state)
    inputs, outputs = list(parts.node.inputs), list[ir.Value | None](parts.node.outputs)
    insert, reads = state.after.producer(), _reads_of_last(state)
    assert insert is not None
    if reads:
        last = ir.Value(name=state.before.name, type=appended.type, shape=appended.shape)
        for read in reads:
            result = read.outputs[0]
            ir.convenience.replace_all_uses_with(result, last, replace_graph_outputs=True)
            assert isinstance(read.graph, ir.Graph)
            read.graph.remove(read, safe=True)
        inputs[2 + place], outputs[place] = before[-1], None
        body.inputs[2 + place] = last
        body.outputs[1 + place] = _as_output(write, body, appended)
    else:
        del inputs[2 + place], outputs[place]
        body.inputs.pop(2 + place)
        body.outputs.pop(1 + place)
    body.outputs.append(_as_output(write, body, appended))
    body.remove(insert, safe=True)
    return replace_loop(parts.node, inputs, [*outputs, stack])


def _appended(state: State) -> ir.Value | None:
    """Return what a step appends to a sequence, if it does no more than that and read its end."""
    insert = state.after.producer()
    if not isinstance(state.before.type, ir.SequenceType) or insert is None:
        return None
    if insert.op_type != "SequenceInsert" or insert.domain or len(insert.inputs) > 2:
        return None
    others = {node for node, _ in state.before.uses()} - {insert, *_reads_of_last(state)}
    appends = insert.inputs[0] is state.before and not others and not state.after.uses()
    return insert.inputs[1] if appends else None


def _reads_of_last(state: State) -> list[ir.Node]:
    """Return the nodes that read the last element of a sequence before a step."""
    return [
        node
        for node, _ in state.before.uses()
        if node.op_type == "SequenceAt"
        and node.domain == ""
        and (place := constant_array(node.inputs[1])) is not None
        and int(place) == -1
    ]


def _can_stack(parts: LoopParts, state: State, appended: ir.Value, readers: Container[str]) -> bool:
    """Tell whether what is appended has one shape, and what reads the sequence can read a stack."""
    nodes = [reader for reader, _ in state.final.uses()]
    known = all(n.domain == "" and n.op_type in readers for n in nodes)
    if state.final.is_graph_output() or not known or dims_of(appended) is None:
        return False
    stacked = [n.attributes.get_int("new_axis", 0) for n in nodes]
    return parts.is_steady(appended) or (bool(stacked) and all(stacked))


def _as_output(write: Rewriter, body: ir.Graph, value: ir.Value) -> ir.Value:
    """Return a value that is no output of the body yet."""
    producer = value.producer()
    if producer is not None and producer.graph is body and not value.is_graph_output():
        return value
    identity = ir.node("Identity", [value], name=write.name(f"{value.name}_collected"))
    result = identity.outputs[0]
    result.name, result.type, result.shape = identity.name, value.type, value.shape
    body.append(identity)
    return result


def _read(write: Rewriter, reader: ir.Node, before: Sequence[ir.Value], stack: ir.Value) -> None:
    """Let a reader of the sequence read the stack, behind the elements that came before."""
    whole = stack
    if before:
        first = write.constant(reader, "axes", np.array([0], np.int64))
        rows = [write.insert(reader, "Unsqueeze", [v, first]) for v in before]
        whole = write.insert(reader, "Concat", [*rows, stack], axis=0)
    if reader.op_type == "SequenceAt":
        write.become(reader, "Gather", [whole, reader.inputs[1]], axis=0)
    elif reader.op_type == "SequenceLength":
        length = write.insert(reader, "Shape", [whole], start=0, end=1)
        write.become(reader, "Squeeze", [length])
    else:
        _concatenate(write, reader, whole, len(dims_of(stack) or ()) - 1)


def _concatenate(write: Rewriter, reader: ir.Node, stack: ir.Value, rank: int) -> None:
    new_axis = reader.attributes.get_int("new_axis", 0)
    axis = reader.attributes.get_int("axis", 0) % (rank + new_axis)
    order = [*range(1, axis + 1), 0, *range(axis + 1, rank + 1)]
    if new_axis:
        write.become(reader, "Transpose", [stack], perm=order)
        return
    moved = write.insert(reader, "Transpose", [stack], perm=order) if axis else stack
    parts = [
        write.insert(reader, "Shape", [moved], start=0, end=axis),
        write.constant(reader, "all", np.array([-1], np.int64)),
        write.insert(reader, "Shape", [moved], start=axis + 2),
    ]
    shape = write.insert(reader, "Concat", parts, axis=0)
    write.become(reader, "Reshape", [moved, shape])
