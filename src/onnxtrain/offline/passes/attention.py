"""Attention as exporters write it: softmax(scale q kᵀ + mask) v, found so that a kernel can do it.

Nothing is rewritten: each node keeps its gradient. What is found is marked as two groups of nodes,
forward and backward, that native kernels can stand in for. The kernels keep no scores: a row of
queries has its largest score and the sum of its exponentials kept, from which the backward pass
computes probabilities again, block by block.

Heads are often transposed on the way, (batch, length, heads, size) to (batch, heads, length, size),
and the factor of the scores is applied to queries and keys. These nodes are a part of the group:
the kernels read and write any order of axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from onnxtrain.offline.autodiff.registry import Cotangents, Rule, lookup, zero_reason
from onnxtrain.offline.graph.kernels import mark_kernel, written_after
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.scalars import fold_scales, known_number
from onnxtrain.offline.graph.shapes import dims_of, is_float, same_dims
from onnxtrain.offline.graph.subgraphs import captured_values


def join_attention(
    op: Ops, graph: ir.Graph, outputs: Iterable[ir.Value], targets: Sequence[ir.Value]
) -> dict[ir.Node, Rule]:
    """Return rules for the nodes of each attention, which write what their own rules write.

    `outputs` are differentiated, with respect to `targets`. With the last of its rules, an
    attention is marked.
    """
    fold_scales(op, graph)
    search = _Search(frozenset((*outputs, *targets)), _dependent(graph, targets))
    rules: dict[ir.Node, Rule] = {}
    for softmax in [n for n in graph if n.op_type == "Softmax" and n.domain == ""]:
        found = search.attention_of(softmax)
        if found is not None and not any(node in rules for node in found.nodes):
            rules.update(_Marker(found).rules(op.opset))
    return rules


def _dependent(graph: ir.Graph, targets: Iterable[ir.Value]) -> set[ir.Value]:
    """Return the values that a gradient may flow through on the way to the targets."""
    found = set(targets)
    for node in graph:
        read = (*node.inputs, *captured_values(node))
        if zero_reason(node.op_type, node.domain) is None and any(v in found for v in read):
            found.update(v for v in node.outputs if is_float(v))
    return found


# ---- finding it ----------------------------------------------------------------------------------


@dataclass
class _Side:
    """Queries, keys or values before they are transposed and scaled."""

    value: ir.Value
    order: list[int]  # the axis of the value for each axis of the product's operand
    reader: tuple[ir.Node, int]  # which reads the value as this input
    nodes: list[ir.Node] = field(default_factory=list)  # from the last to the first


@dataclass
class _Scale:
    """The factor of the scores: a number, and values that multiply or divide it."""

    number: float = 1.0
    factors: list[tuple[ir.Value, bool]] = field(default_factory=list)  # with whether it divides


@dataclass
class _Mask:
    value: ir.Value
    attributes: dict[str, int | float] = field(default_factory=dict)


@dataclass
class _Attention:
    q: _Side
    k: _Side
    v: _Side
    scale: _Scale
    mask: _Mask | None
    probabilities: ir.Value
    output: ir.Value
    output_order: list[int]  # the axis of the product for each axis of the output
    blind_are_zero: bool
    nodes: list[ir.Node]  # in the order of the graph

    def inputs(self) -> list[ir.Value]:
        return [self.q.value, self.k.value, self.v.value]

    def more_inputs(self) -> list[ir.Value]:
        masks = [] if self.mask is None else [self.mask.value]
        return [*masks, *(value for value, _ in self.scale.factors)]

    def attributes(self) -> dict[str, int | float | list[int]]:
        batch_head_row = {4: [0, 1, 2], 3: [0, -1, 1], 2: [-1, -1, 0]}
        lead = batch_head_row[len(self.q.order)]
        last = len(self.q.order) - 1

        def axes(order: Sequence[int], row: int, element: int) -> list[int]:
            return [-1 if a < 0 else order[a] for a in (*lead[:2], row, element)]

        placed = [self.output_order.index(a) for a in range(last + 1)]
        found: dict[str, int | float | list[int]] = {
            "scale": self.scale.number,
            "q_axes": axes(self.q.order, last - 1, last),
            "k_axes": axes(self.k.order, last, last - 1),
            "v_axes": axes(self.v.order, last - 1, last),
            "o_axes": axes(placed, last - 1, last),
        }
        if self.scale.factors:
            found["divides"] = [int(divides) for _, divides in self.scale.factors]
        if self.mask is not None:
            found.update(self.mask.attributes, has_mask=1)
        if self.blind_are_zero:
            found["blind_are_zero"] = 1
        return found


@dataclass(frozen=True)
class _Search:
    wanted: Collection[ir.Value]
    dependent: Collection[ir.Value]

    def attention_of(self, softmax: ir.Node) -> _Attention | None:
        """Return the attention that a Softmax is a part of."""
        scores = softmax.inputs[0]
        axis, dims = softmax.attributes.get_int("axis", -1), dims_of(softmax.outputs[0])
        if scores is None or dims is None or axis not in (-1, len(dims) - 1) or len(dims) > 4:
            return None
        before = self._scores(scores)
        after = self._output(softmax.outputs[0])
        if before is None or after is None:
            return None
        product, mask, scale, score_nodes = before
        mixing, output, order, output_nodes = after
        regrouped = [n for n in (*score_nodes, *output_nodes) if n.op_type == "Reshape"]
        queries = self._grouped(product, regrouped) if regrouped else (product, 0)
        if queries is None:
            return None
        sides = [self._side(queries, scale), self._side((product, 1), scale)]
        values = self._side((mixing, 1), None)
        rank = len(dims)
        if any(side is None or len(side.order) != rank for side in (*sides, values)):
            return None
        (q, k), v = sides, values
        assert q is not None and k is not None and v is not None
        if q.order[-1] != rank - 1 or not self._fit(product, mixing, (q, k, v)):
            return None
        nodes = {queries[0], product, mixing, softmax, *score_nodes, *output_nodes}
        nodes.update(n for side in (q, k, v) for n in side.nodes)
        graph = softmax.graph
        assert graph is not None
        blind_are_zero = any(n.op_type == "IsNaN" for n in output_nodes)
        return _Attention(
            q, k, v, scale, mask, softmax.outputs[0], output, order, blind_are_zero,
            [n for n in graph if n in nodes],
        )  # fmt: skip

    def _grouped(
        self, product: ir.Node, regrouped: Sequence[ir.Node]
    ) -> tuple[ir.Node, int] | None:
        """Return what reads the queries, where a head of keys serves a group of their heads.

        The queries of a group are further rows of the products, by a Reshape before and behind
        each: (batch, heads, length) to (batch, heads of keys, group · length).
        """
        rows = product.inputs[0]
        before = None if rows is None else self._between(rows)
        if rows is None or before is None or before.op_type != "Reshape" or len(regrouped) != 3:
            return None
        split = dims_of(before.inputs[0]) if before.inputs[0] is not None else None
        joined = dims_of(rows)
        if split is None or joined is None or len(split) != 4 or len(joined) != 4:
            return None
        expected = split[:3], joined[:2], split[:3]  # of scores, probabilities and the output
        for node, known in zip(regrouped, expected, strict=True):
            dims = dims_of(node.outputs[0])
            if dims is None or len(dims) != 4 or not same_dims(dims[: len(known)], known):
                return None
        return before, 0

    def _fit(self, product: ir.Node, mixing: ir.Node, sides: Sequence[_Side]) -> bool:
        """Tell whether nothing is broadcast, and gradients go to queries, keys and values alone."""
        shapes = [dims_of(v) for v in (*product.inputs, mixing.inputs[1]) if v is not None]
        lead = [None if dims is None else dims[:-2] for dims in shapes]  # batch, heads of keys
        first = lead[0]
        if first is None or any(not same_dims(first, other) for other in lead):
            return False
        floats = all(side.value.dtype == ir.DataType.FLOAT for side in sides)
        return floats and all(side.value in self.dependent for side in sides)

    # ---- before the softmax ----------------------------------------------------------------------

    def _scores(
        self, value: ir.Value
    ) -> tuple[ir.Node, _Mask | None, _Scale, list[ir.Node]] | None:
        """Return the product of queries and keys, and what happens to it before the softmax."""
        mask, scale, nodes = None, _Scale(), list[ir.Node]()
        whole = dims_of(value)
        while (node := self._between(value)) is not None:
            if node.op_type == "MatMul":
                return node, mask, scale, nodes
            masked = self._masked(node) if mask is None and len(nodes) == 0 else None
            scaled = self._scaled(node, scale) if masked is None else None
            if masked is not None:
                value, mask = masked
                if not same_dims(whole, dims_of(value)):
                    return None
            elif scaled is not None:
                value = scaled
            elif node.op_type == "Reshape" and node.inputs[0] is not None:
                value = node.inputs[0]
            else:
                return None
            nodes.append(node)
        return None

    def _masked(self, node: ir.Node) -> tuple[ir.Value, _Mask] | None:
        """Return the scores and their mask, where a node adds one or puts a number in its place."""
        operands = [v for v in node.inputs if v is not None]
        if node.op_type == "Add":
            for scores, mask in (operands, reversed(operands)):
                if scores in self.dependent and mask not in self.dependent:
                    found = mask.dtype == ir.DataType.FLOAT and not self._is_scalar(mask)
                    return (scores, _Mask(mask)) if found else None
        if node.op_type == "Where":
            condition, *branches = operands
            for hides, (scores, number) in enumerate((branches, branches[::-1])):
                constant = known_number(number)
                if scores in self.dependent and constant is not None:
                    attributes = {"hidden": constant, "mask_hides": hides}
                    return scores, _Mask(condition, attributes)
        return None

    def _scaled(self, node: ir.Node, scale: _Scale) -> ir.Value | None:
        """Return what a node multiplies or divides by a single number, which goes to the scale."""
        if node.op_type not in ("Mul", "Div"):
            return None
        divides = node.op_type == "Div"
        first, second = node.inputs
        for value, factor in ((first, second), *([] if divides else [(second, first)])):
            if value is None or factor is None or value not in self.dependent:
                continue
            if factor in self.dependent or not self._is_scalar(factor):
                continue
            number = known_number(factor)
            if number is None:
                scale.factors.append((factor, divides))
            else:
                scale.number = scale.number / number if divides else scale.number * number
            return value
        return None

    def _side(self, reader: tuple[ir.Node, int], scale: _Scale | None) -> _Side | None:
        """Return where an operand of a product comes from, through Transpose and scaling."""
        operand = reader[0].inputs[reader[1]]
        dims = None if operand is None else dims_of(operand)
        if operand is None or dims is None:
            return None
        side = _Side(operand, list(range(len(dims))), reader)
        while (node := self._between(side.value)) is not None:
            if node.op_type == "Transpose":
                permutation = list(node.attributes.get_ints("perm", range(len(dims))[::-1]))
                order = [permutation[a] for a in side.order]
                source = node.inputs[0]
                if scale is None and order[-1] != len(dims) - 1:
                    break
            else:
                order = side.order
                source = None if scale is None else self._scaled(node, scale)
            if source is None or dims_of(source) is None or source not in self.dependent:
                break
            side.value, side.order = source, order
            side.reader = node, list(node.inputs).index(source)
            side.nodes.append(node)
        return side

    # ---- behind the softmax ----------------------------------------------------------------------

    def _output(
        self, probabilities: ir.Value
    ) -> tuple[ir.Node, ir.Value, list[int], list[ir.Node]] | None:
        """Return the product with the values, its output and the order of its axes."""
        if probabilities in self.wanted or probabilities.is_graph_output():
            return None
        mixed, nodes = probabilities, list[ir.Node]()
        readers = [node for node, _ in probabilities.uses()]
        if len(readers) == 2:  # one asks where they are NaN, the other puts zero there
            guarded = self._without_nan(probabilities, readers)
            if guarded is None:
                return None
            mixed, nodes = guarded
        if (regrouped := self._only_reader(mixed, "Reshape")) is not None:
            mixed = regrouped.outputs[0]
            nodes.append(regrouped)
        product = self._only_reader(mixed, "MatMul")
        if product is None or product.inputs[0] is not mixed:
            return None
        output = product.outputs[0]
        if regrouped is not None:
            split = self._only_reader(output, "Reshape")
            if split is None:
                return None
            output = split.outputs[0]
            nodes.append(split)
        dims = dims_of(output)
        if dims is None:
            return None
        order = list(range(len(dims)))
        if (transposed := self._only_reader(output, "Transpose")) is not None:
            permutation = list(transposed.attributes.get_ints("perm", order[::-1]))
            if permutation[-1] == len(dims) - 1:
                return product, transposed.outputs[0], permutation, [*nodes, transposed]
        return product, output, order, nodes

    def _without_nan(
        self, probabilities: ir.Value, readers: Sequence[ir.Node]
    ) -> tuple[ir.Value, list[ir.Node]] | None:
        asking = next((n for n in readers if n.op_type == "IsNaN"), None)
        choosing = next((n for n in readers if n.op_type == "Where"), None)
        if asking is None or choosing is None or not self._is_inner(asking.outputs[0]):
            return None
        condition, zero, kept = choosing.inputs
        fits = condition is asking.outputs[0] and kept is probabilities and known_number(zero) == 0
        result = choosing.outputs[0]
        fits = fits and len(asking.outputs[0].uses()) == 1 and self._is_inner(result)
        return (result, [asking, choosing]) if fits else None

    def _only_reader(self, value: ir.Value, op_type: str) -> ir.Node | None:
        """Return the node that reads a value, if there is just one and it is of a kind."""
        uses = list(value.uses())
        if len(uses) != 1 or not self._is_inner(value):
            return None
        node = uses[0][0]
        return node if node.op_type == op_type and node.domain == "" else None

    def _between(self, value: ir.Value) -> ir.Node | None:
        """Return the node that makes a value, if only one node reads it and it is not wanted."""
        node = value.producer()
        if node is None or node.domain != "" or len(value.uses()) != 1:
            return None
        return node if self._is_inner(value) else None

    def _is_inner(self, value: ir.Value) -> bool:
        return not value.is_graph_output() and value not in self.wanted

    @staticmethod
    def _is_scalar(value: ir.Value) -> bool:
        dims = dims_of(value)
        return dims is not None and math.prod(d if isinstance(d, int) else 0 for d in dims) == 1


# ---- marking it ----------------------------------------------------------------------------------


class _Marker:
    """Follows the rules of the nodes of an attention, and marks what they have written."""

    def __init__(self, found: _Attention) -> None:
        self._found = found
        self._waiting = {n for n in found.nodes if n.op_type != "IsNaN"}  # which has no gradient
        self._written: list[ir.Node] = []
        self._given: ir.Value | None = None
        self._results: dict[tuple[ir.Node, int], ir.Value | None] = {}
        self._is_guarded = False

    def rules(self, opset: int) -> Iterator[tuple[ir.Node, Rule]]:
        for node in self._waiting:
            own = lookup(node.op_type, node.domain, opset)
            if own is not None:
                yield node, replace(own, function=self._follow(own))

    def _follow(self, own: Rule) -> Callable[[Ops, ir.Node, ir.Value], Cotangents]:
        def gradient(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
            last = op.target[-1] if len(op.target) else None
            returned: list[Cotangents] = []

            def write() -> list[ir.Value]:
                returned.append(own(op, node, dy))
                return []

            op.kernel("Attention", [], write)
            self._note(op, node, dy, returned[0])
            self._written.extend(list(written_after(op.target, last))[::-1])
            if not self._waiting:
                self._mark()
            return returned[0]

        return gradient

    def _note(self, op: Ops, node: ir.Node, dy: ir.Value, returned: Cotangents) -> None:
        self._waiting.discard(node)
        if node.outputs[0] is self._found.output:
            self._given = dy
        self._is_guarded = self._is_guarded or op.guarded
        if isinstance(returned, Mapping):
            returned = [None if v is None else returned.get(v) for v in node.inputs]
        self._results.update(((node, index), each) for index, each in enumerate(returned))

    def _mark(self) -> None:
        found, given = self._found, self._given
        gradients = [self._results.get(side.reader) for side in (found.q, found.k, found.v)]
        if given is None or any(g is None for g in gradients):
            return
        read = dict.fromkeys(v for n in self._written for v in n.inputs if v is not None)
        made = {v for n in found.nodes for v in n.outputs}
        saved = [v for v in read if v in made and v not in (found.output, found.probabilities)]
        saved.sort(key=is_float)  # where probabilities are NaN comes first
        more, attributes = found.more_inputs(), found.attributes()
        kept = [found.probabilities, *saved]
        kind = "Attention" if all(is_float(v) for v in saved) else "AttentionOrZero"
        mark_kernel(
            found.nodes, kind, [*found.inputs(), *more], [found.output, *kept],
            saved=kept, **attributes,
        )  # fmt: skip
        mark_kernel(
            self._written, "AttentionGrad",
            [given, *found.inputs(), found.output, found.probabilities, *more, *saved],
            gradients, saved=kept, zeros_stay=int(self._is_guarded), **attributes,
        )  # fmt: skip
