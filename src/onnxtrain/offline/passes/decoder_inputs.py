"""Language models that were exported to generate text, made ready to read whole sequences.

Such a model takes the keys and values of what came before (`past_key_values.0.key`), and returns
them with those of the new tokens. Training reads a sequence at once: nothing came before, and
nothing comes behind. So these inputs are empty here, and the outputs go.

What a token sees follows from `attention_mask` alone. A row of it has 1 for tokens and 0 for
padding, on either side. Several sequences in one row are numbered 1, 2, and so on: a token sees
those before it that have its number. Where a model takes the positions of tokens, they are counted
from the beginning of each sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx
import onnx_ir as ir

from onnxtrain.offline.frontend.unofficial import adopt_unofficial
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.quantized_operators import MICROSOFT
from onnxtrain.offline.graph.shapes import Dims, dims_of, is_float
from onnxtrain.offline.graph.sizes import arange_of

TOKENS, MASK, POSITIONS = "input_ids", "attention_mask", "position_ids"
# Where operators of attention take what came before, and return it with what is new.
_PAST_AT = {
    (MICROSOFT, "GroupQueryAttention"): (3, 4),
    (MICROSOFT, "MultiHeadAttention"): (6, 7),
    ("", "Attention"): (4, 5),
}
_PRESENT_AT = (1, 2)
_ATTENTION_BIAS_AT = 10  # of GroupQueryAttention
_CACHE_RANK = 4  # (batch, heads, length, size)
_LENGTH_AXIS = 2
_READS_NO_ELEMENTS = ("Shape", "Size")
_LONGEST = 2**62


@dataclass(frozen=True)
class WholeSequences:
    """A model that reads whole sequences, and what to tell the user about it."""

    proto: onnx.ModelProto
    notes: tuple[str, ...] = ()


def read_whole_sequences(proto: onnx.ModelProto) -> WholeSequences:
    """Return the model without the keys and values of earlier tokens; others as they are."""
    if not any(_may_be_cache(info) for info in proto.graph.input):
        return WholeSequences(proto)
    model = ir.from_proto(proto)
    cache = _Cache.of(model.graph)
    if not cache.inputs:
        return WholeSequences(proto)
    names = [str(value.name) for value in cache.inputs]
    adopt_unofficial(model)
    _write_inputs(model, cache)
    made = ir.to_proto(model)
    note = (
        f"{len(names)} inputs hold keys and values of earlier tokens ({names[0]!r} and others): "
        "they are empty while the model trains, which reads whole sequences."
    )
    return WholeSequences(made, (note,))


def _may_be_cache(info: onnx.ValueInfoProto) -> bool:
    dims = info.type.tensor_type.shape.dim
    return len(dims) == _CACHE_RANK and not dims[_LENGTH_AXIS].HasField("dim_value")


# ---- what is a cache -----------------------------------------------------------------------------


@dataclass
class _Cache:
    """Inputs that hold earlier keys and values, what they are joined by, and what comes out."""

    inputs: list[ir.Value] = field(default_factory=list)
    attentions: list[ir.Node] = field(default_factory=list)
    joins: dict[ir.Node, ir.Value] = field(default_factory=dict)  # Concat, with what is new

    @staticmethod
    def of(graph: ir.Graph) -> _Cache:
        """Find the caches of a graph by how they are read, not by their names."""
        found = _Cache()
        for value in graph.inputs:
            if _is_open(value) and value.name not in graph.initializers:
                found._add(value)
        found.attentions = list(dict.fromkeys(found.attentions))
        return found

    def _add(self, value: ir.Value) -> None:
        attentions, joins = list[ir.Node](), dict[ir.Node, ir.Value]()
        for node, index in value.uses():
            if node.domain == "" and node.op_type in _READS_NO_ELEMENTS:
                continue
            new = _new_beside(node, value)
            if index in _PAST_AT.get((node.domain, node.op_type), ()):
                attentions.append(node)
            elif new is not None:
                joins[node] = new
            else:
                return
        if attentions or any(_is_returned(node.outputs[0]) for node in joins):
            self.inputs.append(value)
            self.attentions.extend(attentions)
            self.joins.update(joins)


def _is_open(value: ir.Value) -> bool:
    """Tell whether an input is of the form of a cache: floats whose length is not fixed."""
    dims = dims_of(value)
    if dims is None or len(dims) != _CACHE_RANK or not is_float(value):
        return False
    return not isinstance(dims[_LENGTH_AXIS], int)


def _new_beside(node: ir.Node, value: ir.Value) -> ir.Value | None:
    """Return what a Concat puts behind earlier keys or values."""
    if node.op_type != "Concat" or node.domain or len(node.inputs) != 2:
        return None
    axis = node.attributes.get_int("axis", 0) % _CACHE_RANK
    return node.inputs[1] if node.inputs[0] is value and axis == _LENGTH_AXIS else None


def _is_returned(value: ir.Value) -> bool:
    """Tell whether a value is an output of the graph, perhaps under another name."""
    return value.is_graph_output() or any(
        node.op_type == "Identity" and node.outputs[0].is_graph_output() for node, _ in value.uses()
    )


# ---- what stands in their place ------------------------------------------------------------------


def _write_inputs(model: ir.Model, cache: _Cache) -> None:
    graph = model.graph
    op = Ops(graph, model.opset_imports.get("", 1))
    op.scope = "sequences"
    tokens = _tokens(graph, cache)
    mask = next((v for v in graph.inputs if v.name == MASK and len(dims_of(v) or ()) == 2), None)
    if mask is not None and tokens is not None:
        mask.shape = ir.Shape((dims_of(tokens) or ())[:2])
    _drop_outputs(graph, cache)
    with op.arithmetic():
        seen = _Seen(op, tokens, mask)
        for node in cache.attentions:
            for index in _PAST_AT[node.domain, node.op_type]:
                node.replace_input_with(index, None)
            if node.op_type == "GroupQueryAttention":
                seen.tell(node)
        for join, new in cache.joins.items():
            ir.convenience.replace_all_uses_with(join.outputs[0], new)
        _count_positions(op, tokens, mask)
        for value in cache.inputs:
            if value.uses():
                ir.convenience.replace_all_uses_with(value, _empty(op, value, tokens))
    for join in cache.joins:
        graph.remove(join, safe=True)
    for value in cache.inputs:
        graph.inputs.remove(value)
    graph.sort()


def _tokens(graph: ir.Graph, cache: _Cache) -> ir.Value | None:
    """Return the input that has the batch and the length of sequences: the tokens, as a rule."""
    others = [v for v in graph.inputs if v not in cache.inputs and v.name != MASK]
    named = [v for v in others if v.name == TOKENS]
    return next((v for v in (*named, *others) if len(dims_of(v) or ()) >= 2), None)


def _drop_outputs(graph: ir.Graph, cache: _Cache) -> None:
    made = [
        node.outputs[i] for node in cache.attentions for i in _PRESENT_AT if i < len(node.outputs)
    ]
    made += [node.outputs[0] for node in cache.joins]
    copies = [n.outputs[0] for v in made for n, _ in v.uses() if n.op_type == "Identity"]
    gone = {*made, *copies}
    graph.outputs[:] = [v for v in graph.outputs if v not in gone]


def _empty(op: Ops, value: ir.Value, tokens: ir.Value | None) -> ir.Value:
    """Return keys or values of no tokens, for nodes that ask how many there are."""
    dims: Dims = dims_of(value) or ()
    batch = op.dim(tokens, 0) if tokens is not None and not isinstance(dims[0], int) else 1
    sizes = [batch, *(d if isinstance(d, int) else 1 for d in dims[1:])]
    sizes[_LENGTH_AXIS] = 0
    zeros = op.Expand(op.int64(0), op.dims_vector(*sizes))
    return op.Cast(zeros, to=value.dtype)


@dataclass
class _Seen:
    """What each token sees, as numbers to add to scores; computed once for all layers."""

    op: Ops
    tokens: ir.Value | None
    mask: ir.Value | None
    made: dict[tuple[int, ir.DataType | None], ir.Value] = field(default_factory=dict)

    def tell(self, node: ir.Node) -> None:
        """Let an attention add to its scores what hides the tokens that a token does not see."""
        inputs = node.inputs
        taken = inputs[_ATTENTION_BIAS_AT] if len(inputs) > _ATTENTION_BIAS_AT else None
        if taken is not None or self.tokens is None:
            return
        if len(inputs) <= _ATTENTION_BIAS_AT:
            node.resize_inputs(_ATTENTION_BIAS_AT + 1)
        query = node.inputs[0]
        dtype = None if query is None else query.dtype
        window = node.attributes.get_int("local_window_size", -1)
        node.replace_input_with(_ATTENTION_BIAS_AT, self._additive(window, dtype))
        node.attributes["causal"] = ir.AttrInt64("causal", 0)
        node.attributes["local_window_size"] = ir.AttrInt64("local_window_size", -1)

    def _additive(self, window: int, dtype: ir.DataType | None) -> ir.Value:
        if (window, dtype) not in self.made:
            self.made[window, dtype] = self._written(window, dtype or ir.DataType.FLOAT)
        return self.made[window, dtype]

    def _written(self, window: int, dtype: ir.DataType) -> ir.Value:
        op = self.op
        assert self.tokens is not None
        places = arange_of(op, self.tokens, 1)
        queries, keys = op.unsqueeze(places, [1]), op.unsqueeze(places, [0])
        seen = op.LessOrEqual(keys, queries)
        if window > 0:
            seen = op.And(seen, op.Greater(keys, op.Sub(queries, op.int64(window))))
        if self.mask is not None:
            same = op.Equal(op.unsqueeze(self.mask, [2]), op.unsqueeze(self.mask, [1]))
            seen = op.unsqueeze(op.And(same, seen), [1])
        else:
            seen = op.unsqueeze(seen, [0, 1])
        return op.Log(op.Cast(seen, to=dtype))  # 0 and -∞, without numbers that could be trained


def _count_positions(op: Ops, tokens: ir.Value | None, mask: ir.Value | None) -> None:
    """Count the positions of tokens, which the model takes as an input, from the mask."""
    graph = op.target
    given = next((v for v in graph.inputs if v.name == POSITIONS), None)
    if given is None or tokens is None or len(dims_of(given) or ()) != 2:
        return
    places = op.unsqueeze(arange_of(op, tokens, 1), [0])
    if mask is not None:
        same = op.Equal(op.unsqueeze(mask, [2]), op.unsqueeze(mask, [1]))
        first = op.ArgMax(op.Cast(same, to=ir.DataType.INT32), axis=2, keepdims=0)
        places = op.Sub(places, first)
    else:
        places = op.Expand(places, op.Shape(tokens))
    counted = op.cast(places, given.dtype)
    counted.type, counted.shape = given.type, ir.Shape((dims_of(tokens) or ())[:2])
    ir.convenience.replace_all_uses_with(given, counted)
    graph.inputs.remove(given)
