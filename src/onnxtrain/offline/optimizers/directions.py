"""Random directions: a number for each element of each parameter, drawn from the seed of a step.

They are never stored. Whoever needs a direction computes it again, as plain operators, from a few
hashed words: an element in row r and column c of a parameter comes from z = a[r] + b[c] by
z *= z + k, z *= z + l, in 32 bits that wrap around and of which the high ones count. In signs of
512 rows, singular values, products of rows and of the corners of rectangles are those of
independent ones. The words of all parameters are hashed as one vector, R + C of them for a
parameter of R rows and C columns.

Nanoseconds an element on one thread: 1.3 for signs, of which Where and Less take 0.5; 9 for normal
numbers, because of Cos and Log.

A large parameter is taken a few rows at a time, by a Scan over chunks, so that a direction takes no
more memory than a chunk of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.graph.control_dependencies import flag_of
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import static_dims, working_type
from onnxtrain.offline.optimizers.chunked import CHUNK
from onnxtrain.offline.passes.counter_rng import hashed

Distribution = Literal["signs", "normal"]
Compute = Callable[..., Sequence[ir.Value]]
_INT32, _UINT32 = ir.DataType.INT32, ir.DataType.UINT32
_MIXERS = 4  # words that all elements are mixed with


@dataclass(frozen=True)
class _Words:
    """The hashed words of one parameter."""

    rows: ir.Value  # INT32[R]
    columns: ir.Value  # INT32[C]


class Directions:
    """The random directions of parameters, for one seed."""

    def __init__(
        self,
        op: Ops,
        seed: ir.Value,
        parameters: Sequence[ir.Value],
        distribution: Distribution,
        *,
        chunked: bool = True,
    ) -> None:
        self._op, self._distribution, self._chunked = op, distribution, chunked
        scope, op.scope = op.scope, "direction"
        sizes = [size for p in parameters for size in rows_and_columns(p)]
        words = _words(op, seed, _MIXERS + sum(sizes))
        mixers, *parts = op.call("Split", words, [_MIXERS, *sizes], outputs=1 + len(sizes), axis=0)
        for part, size in zip((mixers, *parts), (_MIXERS, *sizes), strict=True):
            part.dtype = _INT32
            op.with_dims(part, [size])
        self._mixers = [op.slice(mixers, 0, i, i + 1) for i in range(_MIXERS)]
        pairs = zip(parts[::2], parts[1::2], strict=True)
        self._by_parameter = {
            p: _Words(rows, columns) for p, (rows, columns) in zip(parameters, pairs, strict=True)
        }
        op.scope = scope

    def along(
        self,
        parameter: ir.Value,
        factor: ir.Value,
        tensors: Sequence[ir.Value],
        compute: Compute,
        behind: ir.Value | None = None,
    ) -> tuple[list[ir.Value], bool]:
        """Compute with the direction of a parameter, times a factor, and tensors of its shape.

        `compute(direction, *tensors)` is element-wise. The direction is not drawn before the value
        `behind` is known: onnxruntime would draw all directions first. Returns the results, and
        whether they have the shape of the parameter; those of large ones have that of the chunks.
        """
        op, words = self._op, self._by_parameter[parameter]
        rows, columns = words.rows, words.columns
        if behind is not None:
            rows = op.Add(rows, _zero_behind(op, behind))
        dims = static_dims(parameter) or ()
        count = _chunks(*rows_and_columns(parameter)) if self._chunked else 1
        if count == 1:
            direction = op.reshape(self._drawn(rows, columns, factor), list(dims))
            return list(compute(direction, *tensors)), True
        return self._in_chunks(count, rows, columns, factor, tensors, compute), False

    def _in_chunks(
        self,
        count: int,
        rows: ir.Value,
        columns: ir.Value,
        factor: ir.Value,
        tensors: Sequence[ir.Value],
        compute: Compute,
    ) -> list[ir.Value]:
        op = self._op
        height = (static_dims(rows) or (0,))[0] // count
        width = (static_dims(columns) or (0,))[0]
        chunks = [op.reshape(t, [count, height, width]) for t in tensors]
        inputs: list[tuple[str, ir.DataType, list[int]]] = [("rows", _INT32, [height])]
        inputs += [
            (f"part{i}", t.dtype or ir.DataType.FLOAT, [height, width])
            for i, t in enumerate(tensors)
        ]

        def write(part: ir.Value, *parts: ir.Value) -> Sequence[ir.Value]:
            return compute(self._drawn(part, columns, factor), *parts)

        body = op.body(inputs, write, "chunk")
        results = op.call(
            "Scan", op.reshape(rows, [count, height]), *chunks,
            outputs=len(body.outputs), body=body, num_scan_inputs=1 + len(chunks),
        )  # fmt: skip
        for result, inner in zip(results, body.outputs, strict=True):
            result.type = inner.type
            op.with_dims(result, [count, height, width])
        return list(results)

    def _drawn(self, rows: ir.Value, columns: ir.Value, factor: ir.Value) -> ir.Value:
        """Return the direction for some rows, times a factor."""
        op = self._op
        z = op.Add(op.unsqueeze(rows, [1]), op.unsqueeze(columns, [0]))
        if self._distribution == "signs":
            return op.Where(op.Less(self._bits(z, 0), 0), op.Neg(factor), factor)
        # Box and Muller: the logarithm of one uniform number is a radius, another one an angle.
        first, second = (self._uniform(z, draw, factor) for draw in (0, 2))
        radius = op.Sqrt(op.Mul(op.Log(op.Sub(1.0, first)), -2.0))
        wave = op.Cos(op.Mul(second, 2.0 * np.pi))
        return op.Mul(op.Mul(radius, wave), factor)

    def _bits(self, z: ir.Value, draw: int) -> ir.Value:
        """Mix words, so that their high bits are random."""
        op, (k, l_) = self._op, self._mixers[draw : draw + 2]
        z = op.Mul(z, op.Add(z, k))
        return op.Mul(z, op.Add(z, l_))

    def _uniform(self, z: ir.Value, draw: int, like: ir.Value) -> ir.Value:
        """Return numbers from 0 to 1, without the 1."""
        op = self._op
        number = op.Add(op.Mul(op.cast(self._bits(z, draw), like.dtype), 2.0**-32), 0.5)
        return op.Min(number, 1.0 - 2.0**-24)


def rows_and_columns(parameter: ir.Value) -> tuple[int, int]:
    """Return sizes whose product is that of a parameter, with a small sum."""
    dims = static_dims(parameter) or ()
    cuts = [(math.prod(dims[:i]), math.prod(dims[i:])) for i in range(max(len(dims), 1))]
    return min(cuts, key=sum)


def number_for(op: Ops, number: ir.Value, parameter: ir.Value) -> ir.Value:
    """Return a scalar in the type that the direction of a parameter has."""
    return op.cast(number, working_type(parameter))


def _chunks(rows: int, columns: int) -> int:
    """Return how many parts the rows are cut into; 1 where the parameter stays whole."""
    wanted = rows * columns / CHUNK
    if wanted < 2:
        return 1
    fitting = [n for n in range(1, rows + 1) if rows % n == 0 and wanted / 2 <= n <= 4 * wanted]
    return min(fitting, key=lambda n: abs(n - wanted), default=1)


def _words(op: Ops, seed: ir.Value, count: int) -> ir.Value:
    """Return so many words that follow from the two words of the seed."""
    first, second = (op.slice(seed, 0, i, i + 1) for i in (0, 1))
    places = op.Cast(op.Range(op.int64(0), op.int64(count), op.int64(1)), to=_UINT32)
    return op.Cast(hashed(op, op.BitwiseXor(hashed(op, op.BitwiseXor(places, first)), second)),
                   to=_INT32)  # fmt: skip


def _zero_behind(op: Ops, value: ir.Value) -> ir.Value:
    """Return a zero that is known only when a value is."""
    return op.Cast(op.Min(flag_of(op, value), op.int64([0])), to=_INT32)
