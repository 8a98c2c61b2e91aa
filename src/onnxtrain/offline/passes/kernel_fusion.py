"""Joins groups of native kernels with what stands next to them.

The sum with a residual and the ReLU or ReLU6 behind a BatchNormalization are one instruction each
for a kernel that has the number in a register, and a pass over memory of their own otherwise. The
plain nodes stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from onnxtrain.offline.graph.kernels import (
    KernelGroup,
    input_values,
    kernel_groups,
    mark_kernel,
    output_values,
    place_of,
)
from onnxtrain.offline.graph.names import Names
from onnxtrain.offline.graph.shapes import dims_of, same_dims
from onnxtrain.offline.graph.subgraphs import values_of
from onnxtrain.offline.passes.compute_again import compute_again, copied_behind
from onnxtrain.offline.passes.next_nodes import Bounds, bounds_of, only_reader, other_summand

_Nodes = Mapping[int, ir.Node]
_RELU, _RELU6 = (0.0, float("inf")), (0.0, 6.0)
_ACTIVATION_GRADIENTS = {"ReluGrad": _RELU, "ClipInsideGrad": _RELU6}
_SETTINGS = frozenset({"epsilon", "clipped", "low", "high"})  # of BatchNorm, for its output
_COPY = 6  # the place of a copy among the outputs of BatchNorm


def join_kernels(graph: ir.Graph) -> None:
    """Join the groups of a graph, its subgraphs not included, as far as kernels can do it."""
    groups = kernel_groups(graph)
    named = {str(v.name): v for v in values_of(graph)}
    for group, nodes in groups.items():
        if group.kind == "BatchNormGrad":
            _join_activation_gradient(group, nodes, groups, named)
    # From the end: a sum of two layers is joined to the one that is computed last.
    for group, nodes in reversed(groups.items()):
        if group.kind == "BatchNorm":
            _join_what_follows(group, nodes, named)
    for group, nodes in kernel_groups(graph).items():
        if group.kind == "ReluGrad":
            _join_sum(group, nodes, named)
    groups, names = kernel_groups(graph), Names.of(graph)
    for group, nodes in groups.items():
        if group.kind == "BatchNorm":
            _forget_output(group, nodes, groups, named, names)
    compute_again(graph, names)


def _join_what_follows(group: KernelGroup, nodes: _Nodes, named: Mapping[str, ir.Value]) -> None:
    """Let BatchNorm add a residual and clip before it writes, if only these nodes read it."""
    inputs, (y, *others) = input_values(group, nodes, named), output_values(group, nodes)
    if inputs is None or y is None:
        return
    attributes, together = dict(group.attributes), _in_order(nodes)
    node = only_reader(y)
    residual = None if node is None else other_summand(node, y)
    if node is not None and residual is not None:
        together.append(node)
        inputs.append(residual)
        attributes["has_residual"] = 1
        y = node.outputs[0]
        node = only_reader(y)
    bounds = None if node is None else _bounds(node)
    if node is not None and bounds is not None:
        together.append(node)
        attributes.update(_clipped(bounds))
        y = node.outputs[0]
    saved = [v for i, v in enumerate(others, 1) if i in group.saved_outputs and v is not None]
    mark_kernel(together, group.kind, inputs, [y, *others], saved=saved, **attributes)


def _join_activation_gradient(
    group: KernelGroup,
    nodes: _Nodes,
    groups: Mapping[KernelGroup, _Nodes],
    named: Mapping[str, ir.Value],
) -> None:
    """Let BatchNormGrad find out from x where a ReLU or ReLU6 behind the layer let pass."""
    inputs, outputs = input_values(group, nodes, named), output_values(group, nodes)
    before = None if inputs is None else _gradient_of_activation(inputs[0], nodes.values(), groups)
    if inputs is None or before is None:
        return
    given = input_values(before, groups[before], named)
    activation = None if given is None else given[1].producer()
    bounds = _ACTIVATION_GRADIENTS[before.kind]
    if given is None or activation is None or _bounds(activation) != bounds:
        return
    layer = None if activation.inputs[0] is None else activation.inputs[0].producer()
    if layer is None or layer.op_type != "BatchNormalization" or layer.domain != "":
        return
    if list(layer.inputs) != inputs[1:6]:
        return
    saved = [inputs[i] for i in group.saved_inputs]
    together = [*_in_order(groups[before]), *_in_order(nodes)]
    mark_kernel(
        together, group.kind, [given[0], *inputs[1:]], outputs,
        saved=saved, **{**group.attributes, **_clipped(bounds)},
    )  # fmt: skip


def _join_sum(group: KernelGroup, nodes: _Nodes, named: Mapping[str, ir.Value]) -> None:
    """Let the gradient of a ReLU add up the cotangents of two readers itself."""
    inputs, outputs = input_values(group, nodes, named), output_values(group, nodes)
    node = None if inputs is None else inputs[0].producer()
    if inputs is None or node is None or node.op_type != "Add" or node.domain != "":
        return
    dy, y = inputs
    alone = {reader for reader, _ in dy.uses()} <= set(nodes.values()) and not dy.is_graph_output()
    if not alone or place_of(node) is not None or any(v is None for v in node.inputs):
        return
    parts = [v for v in node.inputs if v is not None]
    if all(same_dims(dims_of(part), dims_of(y)) for part in parts):
        mark_kernel([node, *_in_order(nodes)], "AddReluGrad", [*parts, y], outputs)


def _forget_output(
    group: KernelGroup,
    nodes: _Nodes,
    groups: Mapping[KernelGroup, _Nodes],
    named: Mapping[str, ir.Value],
    names: Names,
) -> None:
    """Let the weight gradient of a convolution behind BatchNorm compute what it reads again.

    It takes a pass over x, little beside a convolution of several taps, and the output of the layer
    need not stay in memory between the passes: what the backward pass reads is a copy that the
    kernel leaves empty.
    """
    inputs, outputs = input_values(group, nodes, named), output_values(group, nodes)
    y, mean, variance = (*outputs, None, None, None)[:3]
    if inputs is None or y is None or mean is None or variance is None or y.is_graph_output():
        return
    readers = _backward_readers(y)
    if readers is None or "has_residual" in group.attributes:
        return
    reads = {reader: input_values(reader, groups[reader], named) for reader in readers}
    for reader, given in reads.items():
        if given is None or (y in given) != (reader.kind == "ConvGradWeight") or y in given[1:]:
            return
    copy = copied_behind(_in_order(nodes)[-1], y, names)
    kept = copy.outputs[0]
    own = [*outputs, *[None] * (_COPY - len(outputs)), kept]
    _mark_again(group, [*_in_order(nodes), copy], inputs, own, kept)
    settings = {k: v for k, v in group.attributes.items() if k in _SETTINGS}
    for reader, given in reads.items():
        users, made = _in_order(groups[reader]), output_values(reader, groups[reader])
        for node, index in [use for use in y.uses() if use[0] in users]:
            node.replace_input_with(index, kept)
        if given is not None and reader.kind == "BatchNormGrad":
            _mark_again(reader, users, [*given, kept], made, kept)
        elif given is not None:
            mark_kernel(
                users, "BatchNormConvGradWeight",
                [kept, given[1], *inputs[:3], mean, variance], [None, *made],
                saved=[kept], **settings, **reader.attributes,
            )  # fmt: skip


def _backward_readers(y: ir.Value) -> list[KernelGroup] | None:
    """Return the groups that read the output of a layer in the backward pass.

    None unless these are the gradient of the layer itself, which needs no more than x, and that of
    one large convolution.
    """
    marks = [place_of(node) for node, _ in y.uses()]
    readers = {mark[0]: None for mark in marks if mark is not None}
    backward = [r for r in readers if r.kind not in ("Conv", "BatchNorm")]
    convolutions = [r for r in backward if r.kind == "ConvGradWeight" and _is_large(r)]
    others = [r for r in backward if r.kind == "BatchNormGrad"]
    fits = len(convolutions) == 1 and len(others) <= 1 and len(backward) == 1 + len(others)
    return backward if fits and None not in marks else None


def _mark_again(
    group: KernelGroup,
    nodes: Sequence[ir.Node],
    inputs: Sequence[ir.Value],
    outputs: Sequence[ir.Value | None],
    saved: ir.Value,
) -> None:
    """Mark a group with one more value that kernels save."""
    known = {inputs[i] for i in group.saved_inputs} | {outputs[i] for i in group.saved_outputs}
    all_saved = [v for v in known if v is not None]
    mark_kernel(nodes, group.kind, inputs, outputs, saved=[*all_saved, saved], **group.attributes)


def _is_large(convolution: KernelGroup) -> bool:
    """Whether a convolution has several taps and sums over channels."""
    kernel = convolution.attributes.get("kernel_shape", ())
    assert isinstance(kernel, Sequence)
    return any(int(size) > 1 for size in kernel) and convolution.attributes.get("group", 1) == 1


def _gradient_of_activation(
    dy: ir.Value, readers: Iterable[ir.Node], groups: Mapping[KernelGroup, _Nodes]
) -> KernelGroup | None:
    """Return the group that computes a cotangent, if it can be joined to its readers."""
    producer = dy.producer()
    marked = None if producer is None else place_of(producer)
    if marked is None or marked[0].kind not in _ACTIVATION_GRADIENTS or marked[0] not in groups:
        return None
    alone = {node for node, _ in dy.uses()} <= set(readers) and not dy.is_graph_output()
    return marked[0] if alone and output_values(marked[0], groups[marked[0]])[0] is dy else None


def _bounds(node: ir.Node) -> Bounds | None:
    """Return the bounds of a node that is a ReLU or ReLU6."""
    found = bounds_of(node)
    return found if found in (_RELU, _RELU6) else None


def _clipped(bounds: Bounds) -> dict[str, int | float]:
    low, high = bounds
    return {"clipped": 1, "low": low, "high": high}


def _in_order(nodes: _Nodes) -> list[ir.Node]:
    return [nodes[place] for place in sorted(nodes)]
