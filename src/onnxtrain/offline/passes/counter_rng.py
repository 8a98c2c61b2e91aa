"""Random numbers that follow from a seed, as plain operators.

The random operators of a runtime keep a hidden state: a run that is interrupted and resumed drops
other units than one that is not, and two runtimes never agree. Here, each number is a function of
the graph input `random_seed` (two words, which change from step to step), of the node and of the
position in the tensor. The same seed gives the same run everywhere.

The numbers of a tensor of R rows and C columns come from R + C hashed ones, a for the rows and b
for the columns: z = a + b, z *= z ^ k, z *= z + l, in 32 bits that wrap around. The low bits of
that are poor, and only the high ones count. It takes five passes over the tensor, which with the
comparison is a quarter of the time of onnxruntime's Dropout.

onnxruntime has no bitwise operators for CUDA. There, only places are hashed, beforehand or when the
graph is loaded: z = a·k + b·l, z *= z + m, z *= z + n, and the keys k to n, of which the first two
are odd, are sums of the words of the seed times numbers of the node.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache, partial

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import ModelError
from onnxtrain.format.names import RANDOM_SEED
from onnxtrain.offline.autodiff.definitions import Definition, write_definition
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import constant_array
from onnxtrain.offline.graph.subgraphs import replace_node, subgraphs_of, take_out

_IS_SEED = "the seed of a training graph"  # in the meta of an input
_FIRST_IN_BODIES = 2**16  # the number of the first node in a body; others count from zero
_INT32, _UINT32 = ir.DataType.INT32, ir.DataType.UINT32


def seed_random_nodes(op: Ops, graph: ir.Graph) -> None:
    """Replace what draws random numbers in a graph, and give the graph the input `random_seed`.

    Those in bodies are replaced before (`seed_random_bodies`); Multinomial stays as it is.
    """
    nodes = [n for n in graph if n.domain == "" and n.op_type in _DRAWN and _draws(n)]
    if not nodes:
        return
    # A writer of its own: what the other one remembers was written behind these nodes.
    op, on_gpu = Ops(graph, op.opset, op.names), op.on_gpu
    op.on_gpu = on_gpu
    seed = seed_input(op, graph)
    for number, node in enumerate(nodes):
        op.scope = f"random/{node.name or node.outputs[0].name}"
        last = graph[-1]
        made = _DRAWN[node.op_type](op, node, _Stream(op, seed, number))
        replace_node(node, made, last)


def seed_random_bodies(op: Ops, graph: ir.Graph) -> None:
    """Replace what draws random numbers in the bodies of If and Loop, before differentiation.

    A gradient computes bodies again, and has to draw the same numbers. Each step of a Loop has a
    seed of its own. A Scan that no gradient passes stays as it is: it does not count its steps.
    """
    numbers = itertools.count(_FIRST_IN_BODIES)
    with op.arithmetic():
        for node in list(graph):
            _seed_bodies_of(op, node, lambda: seed_input(op, graph), numbers)


def _seed_bodies_of(
    op: Ops, node: ir.Node, seed: Callable[[], ir.Value], numbers: Iterator[int]
) -> None:
    if node.domain != "" or node.op_type not in ("If", "Loop"):
        return
    for body in subgraphs_of(node):
        inner = seed
        if node.op_type == "Loop":
            inner = cache(partial(_seed_of_step, op, body, seed))
        for each in list(body):
            if each.domain == "" and each.op_type in _DRAWN and _draws(each):
                stream = _Stream(op, inner(), next(numbers))
                drawn = _DRAWN[each.op_type]
                define = partial(_as_definition, drawn, stream)
                write_definition(op, each, Definition(define, ()))
            _seed_bodies_of(op, each, inner, numbers)


def _as_definition(
    drawn: Callable[[Ops, ir.Node, _Stream], list[ir.Value]],
    stream: _Stream,
    op: Ops,
    node: ir.Node,
    *inputs: ir.Value | None,
) -> list[ir.Value]:
    return drawn(op, node, stream)


def _seed_of_step(op: Ops, body: ir.Graph, seed: Callable[[], ir.Value]) -> ir.Value:
    """Mix the number of the step into the seed, at the start of the body."""

    def write() -> list[ir.Value]:
        number = hashed(op, op.Cast(body.inputs[0], to=_UINT32))
        return [hashed(op, op.BitwiseXor(seed(), number))]

    op.scope = f"random/{body.name}"
    (mixed,), nodes = take_out(op.body([], write))
    body.insert_before(body[0], nodes)
    return mixed


def seed_input(op: Ops, graph: ir.Graph) -> ir.Value:
    """Return the input of the seed, which the graph gets where it has none."""
    found = next((v for v in graph.inputs if v.name == RANDOM_SEED), None)
    if found is not None and _IS_SEED in found.meta:
        return found
    if op.names.fresh(RANDOM_SEED) != RANDOM_SEED:
        raise ModelError(
            f"the model has a value called {RANDOM_SEED!r}, which is the name of the input for the "
            "random seed of training: rename it"
        )
    seed = ir.Value(name=RANDOM_SEED)
    seed.dtype, seed.shape = _UINT32, ir.Shape([2])
    seed.meta[_IS_SEED] = True
    graph.inputs.append(seed)
    return seed


def _draws(node: ir.Node) -> bool:
    if node.op_type != "Dropout":
        return True
    training = node.inputs[2] if len(node.inputs) > 2 else None
    known = constant_array(training)
    return training is not None and (known is None or bool(known.any()))


class _Stream:
    """The random numbers of one node."""

    def __init__(self, op: Ops, seed: ir.Value, number: int) -> None:
        self._op, self._seed, self._number = op, seed, number

    def bits(self, rows: ir.Value, columns: ir.Value, draw: int = 0) -> ir.Value:
        """Return [rows, columns] numbers of type int32, whose high bits are random.

        Sizes are int64 scalars. Each `draw` of a node is independent of the others.
        """
        op = self._op
        if op.on_gpu:
            return self._bits_on_gpu(rows, columns, draw)
        first, second = (self._key(word, draw) for word in (0, 1))
        a = hashed(op, op.BitwiseXor(_count_to(op, rows), first))
        b = hashed(op, op.BitwiseXor(_count_to(op, columns), second))
        a, b = op.unsqueeze(op.cast(a, _INT32), [1]), op.unsqueeze(op.cast(b, _INT32), [0])
        k, l_ = (op.cast(hashed(op, key), _INT32) for key in (first, second))
        z = op.Add(a, b)
        z = op.Mul(z, op.BitwiseXor(z, k))
        return op.Mul(z, op.Add(z, l_))

    def _bits_on_gpu(self, rows: ir.Value, columns: ir.Value, draw: int) -> ir.Value:
        op = self._op
        numbers = np.random.default_rng([self._number, draw]).integers(-(2**31), 2**31, (4, 2))
        numbers[:2] *= 2
        seed, odd = op.Cast(self._seed, to=_INT32), op.const(np.array([1, 1, 0, 0], np.int32))
        terms = (
            op.Mul(op.slice(seed, 0, word, word + 1), op.const(factors.astype(np.int32)))
            for word, factors in enumerate(numbers.T)
        )
        keys = op.Add(op.Add(*terms), odd)
        k, l_, m, n = (op.slice(keys, 0, i, i + 1) for i in range(4))
        # Other numbers for columns than for rows.
        a, b = (_hashed_places(op, size, start) for size, start in ((rows, 0), (columns, 2**24)))
        z = op.Add(op.unsqueeze(op.Mul(a, k), [1]), op.unsqueeze(op.Mul(b, l_), [0]))
        z = op.Mul(z, op.Add(z, m))
        return op.Mul(z, op.Add(z, n))

    def _key(self, word: int, draw: int) -> ir.Value:
        """A number that is this node's own, for one word of the seed."""
        salt = np.uint32((0x9E3779B9 * (2 * self._number + word + 1) + 0x85EBCA6B * draw) % 2**32)
        chosen = self._op.slice(self._seed, 0, word, word + 1)
        return hashed(self._op, self._op.BitwiseXor(chosen, self._op.const(np.array([salt]))))

    def uniform(self, shape: ir.Value, draw: int = 0) -> ir.Value:
        """Return float32 numbers from 0 to 1, without the 1, in a shape."""
        op = self._op
        bits = self.bits(op.int64(1), op.ReduceProd(shape, keepdims=0), draw)
        number = op.Add(op.Mul(op.cast(bits, ir.DataType.FLOAT), 2.0**-32), 0.5)
        return op.reshape(op.Min(number, 1.0 - 2.0**-24), shape)


def _count_to(op: Ops, size: ir.Value) -> ir.Value:
    return op.Cast(op.Range(op.int64(0), size, op.int64(1)), to=_UINT32)


def _hashed_places(op: Ops, size: ir.Value, start: int) -> ir.Value:
    places = op.Add(op.Range(op.int64(0), size, op.int64(1)), op.int64(start))
    return op.Cast(hashed(op, op.Cast(places, to=_UINT32)), to=_INT32)


def hashed(op: Ops, x: ir.Value) -> ir.Value:
    """Mix the bits of uint32 numbers; onnxruntime before 1.20 multiplies signed ones only."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, None)):
        x = op.BitwiseXor(x, op.BitShift(x, op.const(shift, _UINT32), direction="RIGHT"))
        if factor is not None:
            signed = op.const(factor - 2**32 if factor >= 2**31 else factor, _INT32)
            x = op.Cast(op.Mul(op.Cast(x, to=_INT32), signed), to=_UINT32)
    return x


# ---- the operators -------------------------------------------------------------------------------


def _dropout(op: Ops, node: ir.Node, stream: _Stream) -> list[ir.Value]:
    x, ratio, training = (*node.inputs, None, None)[:3]
    assert x is not None and training is not None
    ratio = op.const(0.5) if ratio is None else op.cast(ratio, ir.DataType.FLOAT)
    # In training or not may be an input: then the ratio is 0, which drops nothing.
    if constant_array(training) is None:
        ratio = op.Where(training, ratio, op.const(0.0))
    kept = op.Not(op.Less(stream.bits(*_rows_and_columns(op, x)), _threshold(op, ratio)))
    mask = op.reshape(kept, op.shape_of(x))
    scale = op.cast(op.Reciprocal(op.Sub(1.0, ratio)), x.dtype)
    return [op.Mul(op.Mul(x, op.Cast(mask, to=x.dtype)), scale), mask]


def _threshold(op: Ops, probability: ir.Value) -> ir.Value:
    """Return the int32 number that a share `probability` of all lies below."""
    wide = op.cast(probability, ir.DataType.DOUBLE)
    # 1 is not a ratio of Dropout, but the number has to fit for it as well.
    edge = op.Min(op.Sub(op.Mul(wide, 2.0**32), 2.0**31), 2.0**31 - 1)
    return op.Cast(op.Floor(edge), to=_INT32)


def _rows_and_columns(op: Ops, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return sizes whose product is that of the tensor; the last axis is the columns."""
    if op.rank(x) == 0:
        return op.int64(1), op.int64(1)
    shape = op.shape_of(x)
    rows = op.ReduceProd(op.slice(shape, 0, 0, -1), keepdims=0)
    return rows, op.squeeze(op.slice(shape, 0, -1, 2**31), [0])


def _random_uniform(op: Ops, node: ir.Node, stream: _Stream) -> list[ir.Value]:
    low = node.attributes.get_float("low", 0.0)
    high = node.attributes.get_float("high", 1.0)
    number = stream.uniform(_shape_to_draw(op, node))
    return [op.cast(op.Add(op.Mul(number, high - low), low), node.outputs[0].dtype)]


def _random_normal(op: Ops, node: ir.Node, stream: _Stream) -> list[ir.Value]:
    """Box and Muller: the logarithm of one uniform number is a radius, another one an angle."""
    mean = node.attributes.get_float("mean", 0.0)
    scale = node.attributes.get_float("scale", 1.0)
    shape = _shape_to_draw(op, node)
    radius = op.Sqrt(op.Mul(op.Log(op.Sub(1.0, stream.uniform(shape))), -2.0))
    wave = op.Cos(op.Mul(stream.uniform(shape, draw=1), 2.0 * np.pi))
    number = op.Add(op.Mul(op.Mul(radius, wave), scale), mean)
    return [op.cast(number, node.outputs[0].dtype)]


def _bernoulli(op: Ops, node: ir.Node, stream: _Stream) -> list[ir.Value]:
    chance = node.inputs[0]
    assert chance is not None
    number = stream.uniform(op.shape_of(chance))
    drawn = op.Less(number, op.cast(chance, ir.DataType.FLOAT))
    return [op.Cast(drawn, to=node.outputs[0].dtype)]


def _shape_to_draw(op: Ops, node: ir.Node) -> ir.Value:
    if node.op_type.endswith("Like"):
        like = node.inputs[0]
        assert like is not None
        return op.shape_of(like)
    return op.int64(list(node.attributes.get_ints("shape") or ()))


_DRAWN: dict[str, Callable[[Ops, ir.Node, _Stream], list[ir.Value]]] = {
    "Bernoulli": _bernoulli,
    "Dropout": _dropout,
    "RandomNormal": _random_normal,
    "RandomNormalLike": _random_normal,
    "RandomUniform": _random_uniform,
    "RandomUniformLike": _random_uniform,
}
