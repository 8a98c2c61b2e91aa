"""Cross entropy over a large vocabulary, a few tokens at a time.

The scores of 256 tokens for 49,152 words are 50 MB, and so are their softmax and their gradient. A
language model needs none of them whole: each token's loss depends on its own scores. So the last
layer and the loss become the body of a Scan over chunks of tokens. In training the body also
computes the gradient with respect to what the last layer reads, while the scores are there: they
are neither kept nor computed again. What is kept is as small as the last layer's input.

The last layer has to be frozen for that: the gradient of its weights would need to know first how
much each token counts. It may be any chain of operators that treat each token alike.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxtrain.offline.autodiff.definitions import splice
from onnxtrain.offline.autodiff.engine import differentiate
from onnxtrain.offline.autodiff.registry import Cotangents, Rule
from onnxtrain.offline.graph.op_facts import ON_SCORES
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import UNKNOWN, dims_of
from onnxtrain.offline.graph.subgraphs import take_out
from onnxtrain.offline.passes.weight_pieces import multiply_in_pieces

LEAST_CLASSES = 4096  # fewer are not worth it
CHUNK_ELEMENTS = 2**22  # of scores, at a time
_LONGEST_CHAIN = 12  # nodes of a last layer
_LAST = 2**62  # as the end of a Slice
_TERMS, _DHIDDEN = 0, 1  # outputs of the Scan
_PRODUCTS = ("MatMul", "MatMulNBits")  # by weights, which are not their first input


def chunk_losses(
    op: Ops, graph: ir.Graph, trained: Collection[ir.Value], *, gradient: bool
) -> dict[ir.Node, Rule]:
    """Compute large cross entropies in chunks, in place; return the rules of what computes them.

    With `gradient`, the gradient is computed on the way. `trained` are parameters that need one.
    """
    rules: dict[ir.Node, Rule] = {}
    for node in [n for n in graph if n.op_type == "SoftmaxCrossEntropyLoss" and n.domain == ""]:
        found = _LastLayer.before(node, trained)
        if found is not None:
            scan = _replace(op, node, found, gradient)
            rules[scan] = Rule(_gradient, "Scan", "", 1, False, frozenset({1}), "loss in chunks")
    return rules


def _gradient(op: Ops, node: ir.Node, dterms: ir.Value, _: ir.Value | None = None) -> Cotangents:
    """Each token's gradient is there already; it counts as much as the token's loss."""
    each = op.unsqueeze(dterms, [2])
    return (op.type_as(node.outputs[_DHIDDEN] * each, node.outputs[_DHIDDEN]),)


# ---- finding it ----------------------------------------------------------------------------------


@dataclass
class _LastLayer:
    """What computes scores from what is much smaller, token by token."""

    hidden: ir.Value
    scores: ir.Value
    nodes: list[ir.Node] = field(default_factory=list)  # in the order of the graph

    @property
    def sizes(self) -> tuple[int, int]:
        """How many numbers the layer reads and makes for each token."""
        width, classes = ((dims_of(v) or (UNKNOWN,))[-1] for v in (self.hidden, self.scores))
        assert isinstance(width, int) and isinstance(classes, int)
        return width, classes

    @staticmethod
    def before(loss: ir.Node, trained: Collection[ir.Value]) -> _LastLayer | None:
        """Return the layer whose scores a loss reads, if nothing else reads them."""
        if loss.attributes.get_string("reduction", "mean") != "none" or len(loss.inputs) > 2:
            return None
        if any(v.uses() or v.is_graph_output() for v in loss.outputs[1:]):
            return None
        flat = loss.inputs[0]
        dims = None if flat is None else dims_of(flat)
        if flat is None or dims is None or len(dims) != 2 or not _is_large(dims[1]):
            return None
        scores = _before_flattening(flat)
        return None if scores is None else _Search(scores, trained).last_layer()


def _is_large(classes: object) -> bool:
    return isinstance(classes, int) and classes >= LEAST_CLASSES


def _before_flattening(flat: ir.Value) -> ir.Value | None:
    """Return the scores before their leading axes were made one."""
    node = flat.producer()
    if not _is_read_once(flat, but_for="Shape") or node is None or node.domain:
        return None
    if node.op_type not in ("Flatten", "Reshape"):
        return flat
    scores = node.inputs[0]
    before, after = dims_of(scores) if scores is not None else None, dims_of(flat)
    if scores is None or not before or not after or before[-1] != after[-1]:
        return None
    return scores if _is_read_once(scores) else None


def _is_read_once(value: ir.Value, but_for: str = "") -> bool:
    """Tell whether one node reads a value, beside those of a kind."""
    readers = [node for node, _ in value.uses() if node.op_type != but_for or node.domain]
    return len(readers) == 1 and not value.is_graph_output()


@dataclass
class _Search:
    scores: ir.Value
    trained: Collection[ir.Value]

    def last_layer(self) -> _LastLayer | None:
        """Walk back from the scores, until one value that is much narrower is left."""
        nodes: dict[ir.Node, None] = {}
        open_ = [self.scores]
        while len(nodes) < _LONGEST_CHAIN:
            if len(open_) == 1 and self._is_narrow(open_[0]) and nodes:
                return self._checked(open_[0], nodes)
            value = self._last_of(open_)
            node = value.producer()
            read = None if node is None else _data_inputs(node)
            if node is None or read is None:
                return None
            nodes[node] = None
            open_.remove(value)
            open_.extend(v for v in read if v not in open_)
        return None

    def _last_of(self, values: Sequence[ir.Value]) -> ir.Value:
        """Return the value that is computed last: others may be what it is computed from."""
        graph = self.scores.producer().graph  # type: ignore[union-attr]
        place = {node: i for i, node in enumerate(graph)}  # type: ignore[arg-type]
        return max(values, key=lambda v: place.get(v.producer(), -1))

    def _is_narrow(self, value: ir.Value) -> bool:
        width, classes = (dims_of(v) or (UNKNOWN,) for v in (value, self.scores))
        narrow, wide = width[-1], classes[-1]
        return isinstance(narrow, int) and isinstance(wide, int) and 2 * narrow <= wide

    def _checked(self, hidden: ir.Value, found: Collection[ir.Node]) -> _LastLayer | None:
        graph = next(iter(found)).graph
        assert graph is not None
        nodes = [n for n in graph if n in found]
        inner = [v for n in nodes for v in n.outputs if v is not self.scores]
        if any(v.is_graph_output() or any(u not in found for u, _ in v.uses()) for v in inner):
            return None
        weights = {v for n in nodes for v in n.inputs if v is not None}
        if not weights.isdisjoint(self.trained):
            return None
        return _LastLayer(hidden, self.scores, nodes)


def _data_inputs(node: ir.Node) -> list[ir.Value] | None:
    """Return what a node computes token by token; None where it does something else."""
    values = [v for v in node.inputs if v is not None]
    if node.op_type in _PRODUCTS and values:
        is_plain = all(v.const_value is not None or v.is_graph_input() for v in values[1:])
        weights = dims_of(values[1]) if node.op_type == "MatMul" else ()
        return values[:1] if is_plain and weights is not None and len(weights) in (0, 2) else None
    if node.op_type not in ON_SCORES or node.domain:
        return None
    vectors = [v for v in values if v.const_value is not None or v.is_graph_input()]
    if any(len(dims_of(v) or (1, 1)) > 1 for v in vectors):
        return None
    rest = [v for v in values if v not in vectors]
    ranks = {len(dims_of(v) or ()) for v in (*rest, *node.outputs)}
    return list(dict.fromkeys(rest)) if len(ranks) == 1 else None


# ---- writing it ----------------------------------------------------------------------------------


def _replace(op: Ops, loss: ir.Node, layer: _LastLayer, gradient: bool) -> ir.Node:
    """Put a Scan in the place of a loss, and return it."""
    _state_shape(op, loss, layer)
    scans: list[ir.Node] = []
    outer, op.scope = op.scope, f"{loss.name or 'loss'}/chunks"

    def write() -> list[ir.Value]:
        labels = loss.inputs[1]
        assert labels is not None
        with op.arithmetic():
            terms, scan = _write_scan(op, layer, labels, gradient)
        scans.append(scan)
        return [op.shape_as(terms, loss.outputs[0])]

    results, nodes = take_out(op.body([], write))
    op.scope = outer
    splice(loss, nodes, {loss.outputs[0]: results[0]})
    return scans[0]


def _state_shape(op: Ops, loss: ir.Node, layer: _LastLayer) -> None:
    """Tell who asks for the shape of the scores, which will not be there."""
    flat = loss.inputs[0]
    assert flat is not None
    for reader in [node for node, _ in flat.uses() if node is not loss]:

        def write(reader: ir.Node = reader) -> list[ir.Value]:
            width, classes = layer.sizes
            rows = op.reshape(layer.hidden, [-1, width])
            whole = op.dims_vector(op.Shape(rows, start=0, end=1), classes)
            begin = reader.attributes.get_int("start", 0)
            end = reader.attributes.get_int("end", _LAST)
            return [op.slice(op.with_dims(whole, (2,)), 0, begin, end)]

        results, nodes = take_out(op.body([], write))
        splice(reader, nodes, {reader.outputs[0]: results[0]})


def _write_scan(
    op: Ops, layer: _LastLayer, labels: ir.Value, gradient: bool
) -> tuple[ir.Value, ir.Node]:
    (width, classes), dtype = layer.sizes, layer.scores.dtype
    assert dtype is not None
    rows = op.Shape(labels, start=0, end=1)
    most = max(1, CHUNK_ELEMENTS // classes)
    count = op.Max(op.Div(op.Add(rows, op.int64([most - 1])), op.int64([most])), op.int64([1]))
    each = op.Div(op.Sub(op.Add(rows, count), op.int64([1])), count)  # as even as possible
    missing = op.Sub(op.Mul(count, each), rows)

    flat = op.with_dims(op.reshape(layer.hidden, [-1, width]), (UNKNOWN, width))
    none, last = op.int64([0]), op.int64([0])
    padded = op.Pad(flat, op.Concat(none, none, missing, last, axis=0))
    chunks = op.reshape(padded, op.dims_vector(count, each, width))
    op.with_dims(chunks, (UNKNOWN, UNKNOWN, width))
    chunks.dtype = dtype
    indices = op.reshape(
        op.Pad(labels, op.Concat(none, missing, axis=0)), op.dims_vector(count, each)
    )
    op.with_dims(indices, (UNKNOWN, UNKNOWN))

    def step(hidden: ir.Value, index: ir.Value) -> list[ir.Value]:
        return _write_chunk(op, layer, hidden, index, gradient)

    assert layer.hidden.dtype is not None
    body = op.body(
        [
            ("hidden", layer.hidden.dtype, (UNKNOWN, width)),
            ("labels", ir.DataType.INT64, (UNKNOWN,)),
        ],
        step,
        name="chunk",
    )
    made = op.call("Scan", chunks, indices, outputs=len(body.outputs), body=body, num_scan_inputs=2)
    made[_TERMS].dtype = dtype
    op.with_dims(made[_TERMS], (UNKNOWN, UNKNOWN))
    if gradient:
        op.type_as(made[_DHIDDEN], chunks)
    scan = made[0].producer()
    assert scan is not None
    return op.slice(op.with_dims(op.reshape(made[_TERMS], [-1]), (UNKNOWN,)), 0, 0, rows), scan


def _write_chunk(
    op: Ops, layer: _LastLayer, hidden: ir.Value, index: ir.Value, gradient: bool
) -> list[ir.Value]:
    """Write the loss of each token of a chunk, and the gradient of it where that is wanted."""
    before = len(op.target)
    scores = _copied(op, layer, hidden)
    nodes = list(op.target)[before:]
    log_probabilities = op.LogSoftmax(scores, axis=-1)
    op.type_as(log_probabilities, scores)
    column = op.unsqueeze(index, [1])
    picked = op.GatherElements(log_probabilities, column, axis=1)
    terms = op.Neg(op.with_dims(op.reshape(picked, [-1]), (UNKNOWN,)))
    terms.type = scores.type
    if not gradient:
        return [terms]
    less = op.Expand(op.const(-1.0, scores.dtype), op.Shape(column))
    probabilities = op.type_as(op.Exp(log_probabilities), scores)
    dscores = op.ScatterElements(probabilities, column, less, axis=1, reduction="add")
    op.type_as(dscores, scores)
    dhidden = multiply_in_pieces(op, nodes[0], dscores) if len(nodes) == 1 else None
    if dhidden is None:
        dhidden = differentiate(op, nodes, {scores: dscores}, [hidden])[hidden]
    assert dhidden is not None
    return [terms, op.type_as(dhidden, hidden)]


def _copied(op: Ops, layer: _LastLayer, hidden: ir.Value) -> ir.Value:
    """Write the last layer once more, for the tokens of a chunk."""
    copies = {layer.hidden: hidden}
    for node in layer.nodes:
        inputs = [None if v is None else copies.get(v, v) for v in node.inputs]
        name = op.names.fresh(f"{op.scope}/{node.op_type}")
        copy = ir.Node(
            node.domain, node.op_type, inputs, list(node.attributes.values()),
            num_outputs=len(node.outputs), version=node.version, name=name,
        )  # fmt: skip
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            new.name = op.names.fresh(f"{name}_out")
            new.type = old.type
            new.shape = ir.Shape([UNKNOWN, op.dims(old)[-1]])
            copies[old] = new
        op.target.append(copy)
    return copies[layer.scores]
