"""Graphs for onnxruntime's CUDA provider: nothing falls back to the CPU.

cuDNN pads both ends of an axis alike; where ends differ, onnxruntime computes convolutions on the
CPU. A Concat of more tensors than fit into the arguments of a launch reads their addresses from
memory of the CPU, which a captured graph would read again when it belongs to others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnxtrain.offline.autodiff.window import Window, conv_transpose_window, conv_window
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.runs import in_runs
from onnxtrain.offline.graph.shapes import integers
from onnxtrain.offline.graph.subgraphs import replace_node

MOST_JOINED = 32  # tensors that one Concat takes as arguments of its launch
_Rule = Callable[[Ops, ir.Node], ir.Value | None]


def rewrite_for_cuda(model: ir.Model) -> None:
    """Rewrite a model, in place."""
    names = None
    for node in list(model.graph):
        rule = _RULES.get(node.op_type) if node.domain == "" else None
        if rule is None:
            continue
        # A writer of its own: what another one remembers may have been written behind this node.
        op = Ops(model.graph, model.opset_imports[""], names)
        names, op.scope = op.names, f"cuda/{node.name or node.outputs[0].name}"
        last = model.graph[-1]
        made = rule(op, node)
        if made is not None:
            replace_node(node, [op.type_as(made, node.outputs[0])], last)


def _concat(op: Ops, node: ir.Node) -> ir.Value | None:
    axis = node.attributes.get_int("axis", 0)
    parts: list[ir.Value] = [value for value in node.inputs if value is not None]
    if len(parts) <= MOST_JOINED:
        return None
    while len(parts) > 1:
        runs = in_runs(parts, lambda _: 1, MOST_JOINED)
        parts = [op.Concat(*run, axis=axis) if len(run) > 1 else run[0] for run in runs]
    return parts[0]


def _conv(op: Ops, node: ir.Node) -> ir.Value | None:
    x, w, *bias = (value for value in node.inputs if value is not None)
    window = conv_window(op, node, x, w)
    before, after = integers(window.before), integers(window.after)
    if before is None or after is None or before == after:
        return None
    x = op.Pad(x, [0, 0, *before, 0, 0, *after])
    return op.Conv(x, w, *bias, **_strides(node, window))


def _conv_transpose(op: Ops, node: ir.Node) -> ir.Value | None:
    x, w, *bias = (value for value in node.inputs if value is not None)
    y = node.outputs[0]
    window = conv_transpose_window(op, node, x, w, y)
    before, counts = integers(window.before), integers(op.dims(x)[2:])
    sizes = integers(op.dims(y)[2:])
    if before is None or counts is None or sizes is None:
        return None
    reach = [
        (n - 1) * stride + extent
        for n, stride, extent in zip(counts, window.strides, window.extent, strict=True)
    ]
    after = [r - b - size for r, b, size in zip(reach, before, sizes, strict=True)]
    if after == list(before):
        return None
    made = op.ConvTranspose(x, w, **_strides(node, window))
    if any(end < 0 for end in after):  # positions that no window reaches
        made = op.Pad(made, [0] * (window.rank + 4) + [max(-end, 0) for end in after])
    ends = [b + size for b, size in zip(before, sizes, strict=True)]
    made = op.Slice(made, list(before), ends, list(range(2, window.rank + 2)))
    return op.Add(made, op.reshape(bias[0], [-1] + [1] * window.rank)) if bias else made


def _strides(node: ir.Node, window: Window) -> dict[str, int | Sequence[int]]:
    return {
        "strides": window.strides,
        "dilations": window.dilations,
        "group": node.attributes.get_int("group", 1),
    }


_RULES: dict[str, _Rule] = {"Concat": _concat, "Conv": _conv, "ConvTranspose": _conv_transpose}
