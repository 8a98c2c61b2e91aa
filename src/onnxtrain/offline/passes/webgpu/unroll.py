"""Scans of a known length, unrolled: WebGPU has kernels for their nodes, but none for Scan."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import dims_of
from onnxtrain.offline.graph.subgraphs import replace_node, subgraphs_of

MOST_STEPS = 256  # a longer loop would make a graph that takes minutes to load


def unroll_scans(op: Ops, graph: ir.Graph) -> None:
    """Replace each Scan that has a known and moderate number of steps by those steps."""
    for node in list(graph):
        if node.op_type != "Scan" or node.domain:
            continue
        scan = _Scan(node)
        steps = scan.steps()
        if steps is None or steps > MOST_STEPS or any(map(subgraphs_of, scan.body)):
            continue
        writer = Ops(graph, op.opset, op.names)
        writer.scope = f"webgpu/{node.name or node.outputs[0].name}"
        last = graph[-1]
        results = [writer.Identity(value) for value in scan.write(writer, steps)]
        replace_node(node, results, last)


class _Scan:
    """A Scan, taken apart."""

    def __init__(self, node: ir.Node) -> None:
        self.body = subgraphs_of(node)[0]
        scanned = node.attributes.get_int("num_scan_inputs", 0)
        self.carried = len(node.inputs) - scanned
        self.inputs = [v for v in node.inputs if v is not None]
        made = len(node.outputs) - self.carried
        get = node.attributes.get_ints
        self.axes = get("scan_input_axes") or [0] * scanned
        self.backwards = get("scan_input_directions") or [0] * scanned
        self.output_axes = get("scan_output_axes") or [0] * made
        self.prepends = get("scan_output_directions") or [0] * made

    def steps(self) -> int | None:
        """Return the number of steps, if the shape of any scanned input has it."""
        for value, axis in zip(self.inputs[self.carried :], self.axes, strict=True):
            dims = dims_of(value)
            size = None if dims is None else dims[axis]
            if isinstance(size, int):
                return size
        return None

    def write(self, op: Ops, steps: int) -> list[ir.Value]:
        """Write all steps and return the outputs of the Scan."""
        state = self.inputs[: self.carried]
        made: list[list[ir.Value]] = [[] for _ in self.output_axes]
        for step in range(steps):
            items = []
            for value, axis, backwards in zip(
                self.inputs[self.carried :], self.axes, self.backwards, strict=True
            ):
                at = steps - 1 - step if backwards else step
                items.append(op.Squeeze(op.slice(value, axis, at, at + 1), [axis]))
            results = self._step(op, [*state, *items])
            state = results[: self.carried]
            for own, item, axis in zip(
                made, results[self.carried :], self.output_axes, strict=True
            ):
                dims = dims_of(item)
                place = axis if axis >= 0 or dims is None else axis + len(dims) + 1
                own.append(op.unsqueeze(item, [place]))
        stacked = [
            op.Concat(*(reversed(own) if first else own), axis=axis)
            for own, axis, first in zip(made, self.output_axes, self.prepends, strict=True)
        ]
        return [*state, *stacked]

    def _step(self, op: Ops, values: list[ir.Value]) -> list[ir.Value]:
        inside: dict[ir.Value | None, ir.Value | None] = {None: None}
        inside.update(zip(self.body.inputs, values, strict=True))
        for name, value in self.body.initializers.items():
            assert value.const_value is not None, name
            inside[value] = op.const(value.const_value.numpy())
        for node in self.body:
            copied = ir.Node(
                node.domain,
                node.op_type,
                [inside.get(v, v) for v in node.inputs],
                node.attributes.values(),
                num_outputs=len(node.outputs),
                name=op.names.fresh(f"{op.scope}/{node.op_type}"),
            )
            for old, new in zip(node.outputs, copied.outputs, strict=True):
                new.name = op.names.fresh(f"{copied.name}_out") if old.name else ""
                new.type, new.shape = old.type, old.shape
                inside[old] = new
            op.target.append(copied)
        found = [inside.get(v, v) for v in self.body.outputs]
        return [v for v in found if v is not None]
