"""Outputs that a layer's gradient computes once more, so that nobody keeps them for the products.

The gradient of a linear layer's weight reads what the layer read: the output of a Gelu, four times
as wide as the others, or of a LayerNormalization. The kernels of their gradients have read all that
the output is computed from, and write it beside dx. What goes from the forward to the backward pass
is a copy that kernels leave empty; where the plain nodes run, onnxruntime removes the copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set

import onnx_ir as ir

from onnxtrain.offline.graph.kernels import (
    KernelGroup,
    input_values,
    kernel_groups,
    mark_kernel,
    output_values,
)
from onnxtrain.offline.graph.names import Names
from onnxtrain.offline.graph.subgraphs import ancestors, values_of

# The place of the copy among the outputs of each kind, and of y among those of its gradient.
_PLACES = {"Gelu": 1, "GeluTanh": 1, "LayerNorm": 3}
_X = 1  # the place of x among the inputs of a gradient
_Nodes = Mapping[int, ir.Node]


def compute_again(graph: ir.Graph, names: Names) -> None:
    """Let products of the backward pass read outputs that gradients compute once more."""
    groups = kernel_groups(graph)
    named = {str(v.name): v for v in values_of(graph)}
    gradients: dict[tuple[str, ir.Value], list[tuple[KernelGroup, list[ir.Value]]]] = {}
    for group, nodes in groups.items():
        inputs = input_values(group, nodes, named) if group.kind.endswith("Grad") else None
        if inputs is not None and len(inputs) > _X:
            gradients.setdefault((group.kind, inputs[_X]), []).append((group, inputs))
    for group, nodes in groups.items():
        inputs = input_values(group, nodes, named) if group.kind in _PLACES else None
        if inputs is None:
            continue
        kind, place = f"{group.kind}Grad", _PLACES[group.kind]
        y, *statistics = output_values(group, nodes)
        # Several layers may read one x: theirs is the gradient that reads their scale and mean.
        candidates = gradients.get((kind, inputs[0]), [])
        theirs = {v for v in (*inputs[1:2], *statistics[:1]) if v is not None}
        found = next((c for c in candidates if theirs <= set(c[1])), None)
        if found is None or y is None or y.is_graph_output():
            continue
        gradient, given = found
        own = _in_order(groups[gradient])
        reads = _reads_after(y, ancestors(own))
        if not reads:
            continue
        candidates.remove(found)  # a gradient computes one output again
        kept = _with_output(group, nodes, inputs, y, place, names)
        again = copied_behind(own[-1], kept, names)
        more = [kept, *inputs[2:]]  # the bias, if there is one
        made = [*output_values(gradient, groups[gradient]), *[None] * place][:place]
        about = {k: v for k, v in group.attributes.items() if k == "has_bias"}
        mark_kernel(
            [*own, again], f"{kind}Again", [*given, *more], [*made, again.outputs[0]],
            saved=[kept], **gradient.attributes, **about,
        )  # fmt: skip
        for view, uses in reads:
            _read_instead(again, view, uses, names)


_Use = tuple[ir.Node, int]


def _reads_after(y: ir.Value, before: Set[ir.Node]) -> list[tuple[ir.Node | None, list[_Use]]]:
    """Return what products read of y once its gradient can have been computed.

    With the Reshape between, if there is one. Nothing if y has to be kept for other readers, or if
    the forward pass does not read it, which then computes y for these products alone.
    """
    found: list[tuple[ir.Node | None, list[_Use]]] = []
    is_read = False
    for view, uses in _views(y):
        late = [use for use in uses if use[0] not in before]
        is_read = is_read or len(late) < len(uses)
        if not all(_is_product_beside(y, node) for node, _ in late):
            return []
        if late:
            found.append((view, late))
    return found if is_read else []


def _is_product_beside(y: ir.Value, node: ir.Node) -> bool:
    """Whether a node is a product, in the same graph as what makes y."""
    maker = y.producer()
    is_beside = maker is not None and node.graph is maker.graph
    return is_beside and node.op_type in ("Gemm", "MatMul") and node.domain == ""


def _views(y: ir.Value) -> Iterator[tuple[ir.Node | None, list[_Use]]]:
    """Yield who reads a value itself, and who reads it through each Reshape."""
    direct = list[_Use]()
    for node, index in y.uses():
        reshaped = node.outputs[0]
        if node.op_type != "Reshape" or node.domain != "" or reshaped.is_graph_output():
            direct.append((node, index))
        else:
            yield node, list(reshaped.uses())
    yield None, direct


def _with_output(
    group: KernelGroup,
    nodes: _Nodes,
    inputs: Sequence[ir.Value],
    y: ir.Value,
    place: int,
    names: Names,
) -> ir.Value:
    """Let a layer write a copy of its output, for its gradient; return the copy."""
    copy = copied_behind(_in_order(nodes)[-1], y, names)
    kept = copy.outputs[0]
    outputs = [*output_values(group, nodes), *[None] * place][:place]
    mark_kernel(
        [*_in_order(nodes), copy], f"{group.kind}Once", inputs, [*outputs, kept],
        saved=[kept], **group.attributes,
    )  # fmt: skip
    return kept


def _read_instead(again: ir.Node, view: ir.Node | None, uses: Sequence[_Use], names: Names) -> None:
    """Let products read a value of the backward pass, in the shape in which they read the old."""
    value = again.outputs[0]
    if view is not None:
        reshape = ir.Node(
            "", "Reshape", [value, view.inputs[1]], list(view.attributes.values()),
            name=names.fresh("Reshape"),
        )  # fmt: skip
        old, value = view.outputs[0], reshape.outputs[0]
        value.name, value.type, value.shape = names.fresh(f"{old.name}_again"), old.type, old.shape
        again.append(reshape)
    for node, index in uses:
        node.replace_input_with(index, value)


def copied_behind(node: ir.Node, y: ir.Value, names: Names) -> ir.Node:
    """Write a copy of a value behind a node."""
    copy = ir.Node("", "Identity", [y], name=names.fresh("Identity"))
    kept = copy.outputs[0]
    kept.name, kept.type, kept.shape = names.fresh(f"{y.name}_kept"), y.type, y.shape
    assert isinstance(node.graph, ir.Graph)
    node.graph.insert_after(node, copy)
    return copy


def _in_order(nodes: _Nodes) -> list[ir.Node]:
    return [nodes[place] for place in sorted(nodes)]
