"""Writes the copies: late nodes read values that are computed again.

A runtime merges nodes that compute the same, and runs nodes as early as it likes. Either would undo
it. So each chain of copies begins with a kept value that has passed through a Reshape to its own
shape, and the shape is computed from one element of a gradient that is there when the copies are
due: no optimiser can know that the element does not matter, and a Reshape copies no data.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import onnx_ir as ir

from onnxtrain.offline.graph.control_dependencies import flag_of
from onnxtrain.offline.graph.kernels import (
    KernelGroup,
    mark_copy,
    place_of,
    rename_kernel_inputs,
)
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import UNKNOWN, dims_of, static_dims
from onnxtrain.offline.graph.subgraphs import subgraphs_of, values_of
from onnxtrain.offline.graph.sweep import sweep
from onnxtrain.offline.optimizers.in_place import written_behind
from onnxtrain.offline.passes.remat.copies import AGAIN, FLAG, late_steps
from onnxtrain.offline.passes.remat.flow import Flow, Step
from onnxtrain.offline.passes.remat.layers import Layers


def rematerialize(
    op: Ops,
    results: Sequence[ir.Value],
    forward: Collection[str],
    data: Collection[str],
    kept: Collection[str],
    sizes: Mapping[str, int],
) -> dict[str, str]:
    """Let gradients compute again the large values of the forward pass that are not kept.

    Args:
        op: the writer of a graph with forward pass and gradients; nothing comes behind them.
        results: the gradients, and what else is not to be swept.
        forward: the names of the values of the forward pass.
        data: the names of the inputs that are not parameters.
        kept: the names of the values that are kept.
        sizes: the bytes of values.

    Returns:
        The names of the copies, and of what they are copies.

    """
    graph = op.target
    sweep(graph, keep=results)
    op = Ops(graph, op.opset, op.names)
    forward = {*forward, *_shapes_early(op, graph, set(forward))}
    layers = Layers(Flow.of(graph), forward, data, sizes)
    copies = _CopyWriter(op, graph).write(layers, kept)
    sweep(graph, keep=results)
    return copies


class _CopyWriter:
    """Writes the steps of a plan; values go by the names that they have there."""

    def __init__(self, op: Ops, graph: ir.Graph) -> None:
        self._op, self._graph = op, graph
        self._values = {str(v.name): v for v in values_of(graph)}
        self._flags: dict[str, ir.Value] = {}  # by gate
        self._twins: dict[KernelGroup, KernelGroup] = {}  # groups of copies
        op.scope = "again"

    def write(self, layers: Layers, kept: Collection[str]) -> dict[str, str]:
        """Write all copies; return their names, and of what they are copies."""
        nodes = list(self._graph)
        late = [nodes[place] for place in sorted(layers.late)]
        self._graph.remove(late)
        gates: dict[str, str] = {}  # by the name of their flag
        copies: dict[str, str] = {}
        for step in late_steps(layers, kept):
            if step.is_copy:
                original = step.makes[0].removesuffix(AGAIN)
                copies.update(self._copy(nodes[layers.maker[original]], step))
            elif step.makes[0] in layers.maker:
                node = nodes[layers.maker[step.makes[0]]]
                self._reconnect(node, step)
                self._graph.append(node)
            elif step.op_type == FLAG:
                gates[step.makes[0]] = step.reads[0]
            else:
                value, flag = step.reads
                self._values[step.makes[0]] = self._wait(self._values[value], gates[flag])
        self._let_kernels_read_copies(late, layers, kept)
        # A Shape whose result onnxruntime knows beforehand is not late, what it reads may be.
        self._graph.sort()
        return copies

    def _let_kernels_read_copies(
        self, late: Sequence[ir.Node], layers: Layers, kept: Collection[str]
    ) -> None:
        """Keep late kernels from holding what is not kept: those that no copy serves stay plain."""
        gone = layers.copied(kept)
        lost = (n for n, maker in layers.maker.items() if maker in gone and n not in layers.fixed)
        copies = {name: self._values.get(f"{name}{AGAIN}") for name in lost}
        # The nodes of a gradient that are not late themselves have to stay in its group.
        groups = {mark[0] for n in late if (mark := place_of(n)) is not None}
        marked = [n for n in self._graph if (mark := place_of(n)) and mark[0] in groups]
        rename_kernel_inputs(marked, {n: None if v is None else v.name for n, v in copies.items()})

    def _reconnect(self, node: ir.Node, step: Step) -> None:
        """Let a late node, and what is in it, read copies."""
        for reader in (node, *(n for body in subgraphs_of(node) for n in body.all_nodes())):
            for index, read in enumerate(reader.inputs):
                again = "" if read is None else f"{read.name}{AGAIN}"
                if again in step.reads:
                    reader.replace_input_with(index, self._values[again])

    def _copy(self, node: ir.Node, step: Step) -> Iterator[tuple[str, str]]:
        reads = iter(step.reads)
        copy = ir.Node(
            node.domain, node.op_type,
            [self._values[next(reads)] if v is not None and v.name else v for v in node.inputs],
            list(node.attributes.values()),
            num_outputs=len(node.outputs), overload=node.overload, version=node.version,
            name=self._op.names.fresh(f"{node.name or node.op_type}_again"),
        )  # fmt: skip
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            new.name = self._op.names.fresh(f"{old.name}_again") if old.name else old.name
            new.type, new.shape = old.type, None if old.shape is None else old.shape.copy()
            self._values[f"{old.name}{AGAIN}"] = new
            yield str(new.name), str(old.name)
        mark_copy(copy, node, self._twins)
        self._graph.append(copy)

    def _wait(self, value: ir.Value, gate: str) -> ir.Value:
        """Return the value itself, as soon as a gate is there."""
        op = self._op
        shape = op.shape_of(value)
        if gate not in self._flags:
            # One zero, from the first element of a tensor of any type.
            self._flags[gate] = op.Min(flag_of(op, self._values[gate]), op.int64([0]))
        waiting = op.Reshape(value, op.Add(shape, self._flags[gate]), allowzero=1)
        # onnxruntime replaces a chain of Reshapes whose last shape it knows by one that waits for
        # nothing. So it is not told all of this one's.
        dims = dims_of(value)
        waiting.type = value.type
        waiting.shape = ir.Shape([UNKNOWN, *dims[1:]]) if dims else None
        return waiting


def _shapes_early(op: Ops, graph: ir.Graph, forward: set[str]) -> list[str]:
    """Let shapes of forward values be taken in the forward pass; return the names of new values.

    A Shape runs when its result is asked for, and its input lives until then. Where a gradient
    asks, that is long. So what else reads the value, reads it through a Reshape to that shape.
    """
    written: list[str] = []
    for node in [n for n in graph if any(v.name in forward for v in n.outputs)]:
        for value in node.outputs:
            shapes = [n for n, _ in value.uses() if n.op_type == "Shape" and n.domain == ""]
            others = [(n, i) for n, i in value.uses() if n not in shapes]
            if shapes and others and static_dims(value) is None:
                with written_behind(op, node) as new:
                    _shape_early(op, value, shapes, others)
                written.extend(str(v.name) for n in new for v in n.outputs)
    return written


def _shape_early(
    op: Ops, value: ir.Value, shapes: list[ir.Node], others: list[tuple[ir.Node, int]]
) -> None:
    op.scope = f"{value.name}/shape"
    whole = op.Shape(value)
    passed = op.type_as(op.Reshape(value, whole, allowzero=1), value)
    for node, index in others:
        node.replace_input_with(index, passed)
    for node in shapes:
        start, end = (node.attributes.get_int(k, d) for k, d in (("start", 0), ("end", 2**31 - 1)))
        taken = whole if (start, end) == (0, 2**31 - 1) else op.Slice(whole, [start], [end], [0])
        old = node.outputs[0]
        taken.type, taken.shape = old.type, old.shape
        ir.convenience.replace_all_uses_with(old, taken)
