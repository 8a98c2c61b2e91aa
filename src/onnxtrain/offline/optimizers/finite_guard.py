"""A step that is not finite changes nothing: the check, and the If around all updates.

A sum over each gradient tells whether all its elements are finite: infinity and NaN survive in it.
It reads the gradient once, just after it was computed, and the If that holds all updates waits for
all sums. A branch that is not taken costs nothing: where outputs are bound to the memory of the
inputs that they replace, its Identity nodes copy nothing.

Milliseconds for a gradient of 392,000 and of 3.9 million elements, median of 21, one thread:

                                          in the cache     out of it
    ReduceSumSquare                       0.049   0.47     0.07   0.57
    ReduceSum                             0.050   0.51     0.08   0.58
    ReduceMax (which may lose a NaN)      0.036   0.39     0.06   0.52
    MatMul of the gradient with itself    0.86    8.5      0.87   8.5

Where an optimizer keeps squares of gradients, or clips by their norm, the squares are summed: they
overflow in float32 where a norm is above 1.8e19, and the state would be infinite too. Elsewhere
the elements are summed, which overflow where they are about to become infinite themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxtrain.format.names import FINITE_CHECK, UPDATED_FLAG
from onnxtrain.offline.graph.kernels import Attribute
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.runs import in_runs
from onnxtrain.offline.graph.shapes import static_dims, working_type
from onnxtrain.offline.optimizers.late_gradients import Factors
from onnxtrain.offline.optimizers.multi_tensor import flattened
from onnxtrain.offline.optimizers.update_writer import Formula, reserve

Sum = Callable[[Ops, ir.Value], ir.Value]  # of a tensor, as a vector of length one
_MANY = 64  # gradients; fewer have a node each
_MOST_IN_GROUP, _LARGEST_GROUP = 16, 262_144  # gradients, and elements
_GROWTH = 64.0  # of intermediate results over the bound of a product: Winograd's transforms add up


@dataclass(frozen=True)
class FiniteCheck:
    """Whether a step is finite, and the numbers that say so."""

    passed: ir.Value  # BOOL[1]
    sums: ir.Value  # a vector: of each gradient, of the loss, of the running statistics
    of_gradients: ir.Value  # those of the gradients alone
    # Of an early check: 0 or NaN, of the gradients so far, and before the first gradient.
    by_parameter: Mapping[ir.Value, ir.Value] = field(default_factory=dict)
    before: ir.Value | None = None

    def outputs(self, op: Ops) -> list[ir.Value]:
        """Return the flag and the sums as outputs of a graph, under their names."""
        made = [self.passed, self.sums]
        for value, name in zip(made, (UPDATED_FLAG, FINITE_CHECK), strict=True):
            value.name = reserve(op, name)
        return made


def plain_sum(op: Ops, tensor: ir.Value) -> ir.Value:
    """Return the sum of all elements."""
    return op.ReduceSum(flattened(op, op.cast(tensor, working_type(tensor))), keepdims=1)


def fast_sum_of_squares(op: Ops, tensor: ir.Value) -> ir.Value:
    """Return the sum of all squares, to three digits."""
    return op.ReduceSumSquare(flattened(op, op.cast(tensor, working_type(tensor))), keepdims=1)


# Those of whole tensors, which need not be vectors.
_REDUCTIONS: dict[Sum, str] = {plain_sum: "ReduceSum", fast_sum_of_squares: "ReduceSumSquare"}


def check_finite(
    op: Ops,
    gradients: Mapping[ir.Value, ir.Value],
    order: Sequence[ir.Value],
    loss: ir.Value | None = None,
    statistics: Sequence[ir.Value] = (),
    *,
    sum_of: Sum = plain_sum,
    early: bool = False,
    factors: Mapping[ir.Value, Factors] | None = None,
    are_computed: bool = False,
) -> FiniteCheck:
    """Write the check of all gradients, the loss and the new running statistics.

    Args:
        op: the writer of the graph.
        gradients: by parameter.
        order: the parameters, in the order of the sums.
        loss: the loss, if the graph computes it.
        statistics: the new running statistics, which share one sum.
        sum_of: what tells whether a gradient is finite.
        early: let each update wait for no more than the gradients before it. Then there is one
            value for all gradients so far: a sum for each would stay in memory until the end, in
            the midst of what is freed. It needs a loss.
        factors: by parameter, what is checked in the place of its gradient, which is their product.
        are_computed: such gradients are computed all the same. Their checks wait for them, so that
            the factors are freed at once.

    """
    scope, op.scope = op.scope, "finite_check"
    values = [*gradients.values(), *([] if loss is None else [loss]), *statistics]
    is_double = any(v.dtype == ir.DataType.DOUBLE for v in values)
    kind = ir.DataType.DOUBLE if is_double else ir.DataType.FLOAT

    squares = int(sum_of is not plain_sum)

    def sums_of_others() -> list[ir.Value]:
        found = [] if loss is None else [op.cast(flattened(op, loss), kind)]
        if statistics:
            flat = [flattened(op, op.cast(v, kind)) for v in statistics]
            found.append(op.ReduceSum(op.concat(flat, axis=0), keepdims=1))
        return found

    # Written in the order of the gradients: onnxruntime begins with what is last in the file.
    are_given = all(g.is_graph_input() for g in gradients.values())
    products = factors or {}

    def bound(p: ir.Value) -> ir.Value:
        return _bound(op, products[p], kind, squares, gradients[p] if are_computed else None)

    if (are_given or len(gradients) > _MANY) and not early:
        groups = [list(order)] if are_given else list(_groups(gradients, products))
        vectors = [
            bound(own[0])
            if own[0] in products
            else _sums(op, [gradients[p] for p in own], sum_of, kind, squares)
            for own in groups
        ]
        places = {p: place for place, p in enumerate(p for own in groups for p in own)}
        kernel, in_order = "FiniteSums", [places[p] for p in order]
        attributes: dict[str, Attribute] = {"vectors": len(vectors), "order": in_order}
    else:
        made = {
            p: bound(p) if p in products else _summed(op, g, sum_of, kind, squares)
            for p, g in gradients.items()
        }
        vectors, kernel, in_order = [made[p] for p in order], "FiniteCheck", []
        attributes = {"sums": len(order)}

    def write() -> list[ir.Value | None]:
        others = sums_of_others()
        of_gradients = op.Concat(*vectors, axis=0)
        if in_order:
            of_gradients = op.Gather(of_gradients, in_order)
        sums = op.Concat(of_gradients, *others, axis=0) if others else of_gradients
        return [sums, _are_finite(op, sums), of_gradients if others else None]

    if early:
        others = sums_of_others()
        last = before = op.ReduceSum(op.Mul(op.concat(others, axis=0), 0.0), keepdims=1)
        for p in reversed(list(gradients)):  # in the order in which they are computed
            made[p] = last = op.Add(last, op.Mul(made[p], 0.0))
        op.scope = scope
        return FiniteCheck(_are_finite(op, last), last, last, made, before)
    inputs = [*vectors, *([] if loss is None else [loss]), *statistics]
    sums, passed, of_gradients = op.kernel(
        kernel, inputs, write, saved=(),
        has_loss=int(loss is not None), statistics=len(statistics), **attributes,
    )  # fmt: skip
    op.scope = scope
    assert sums is not None and passed is not None
    return FiniteCheck(passed, sums, sums if of_gradients is None else of_gradients)


def _summed(op: Ops, gradient: ir.Value, sum_of: Sum, dtype: ir.DataType, squares: int) -> ir.Value:
    """Return what tells whether a gradient is finite, as a vector of length one.

    One kernel for all gradients would let onnxruntime compute that of the first layer first, and
    keep what the others are computed from until then.
    """
    (made,) = op.kernel(
        "GradientSum", [gradient], lambda: [op.cast(sum_of(op, gradient), dtype)], squares=squares
    )
    assert isinstance(made, ir.Value)
    return made


def _bound(
    op: Ops, factors: Factors, dtype: ir.DataType, squares: int, after: ir.Value | None
) -> ir.Value:
    """Return what tells whether the product of two tensors is finite, without computing it.

    That is the square of the product of their norms, which no square of an element is above, or
    that product, times what intermediate results may grow to. It reads one element of what it is
    computed `after`.
    """

    def write() -> list[ir.Value]:
        sums = [op.cast(fast_sum_of_squares(op, factor), dtype) for factor in factors]
        made = op.Mul(*sums) if squares else op.Mul(op.Mul(*map(op.Sqrt, sums)), _GROWTH)
        if after is None:
            return [made]
        first = op.with_dims(op.cast(op.Slice(flattened(op, after), [0], [1]), dtype), [1])
        return [op.Add(made, op.Mul(first, 0.0))]

    (made,) = op.kernel("ProductBound", list(factors), write, squares=squares)
    return made


def _groups(
    gradients: Mapping[ir.Value, ir.Value], alone: Collection[ir.Value]
) -> Iterator[list[ir.Value]]:
    """Yield parameters whose gradients are summed by one kernel, in the order of the gradients.

    A layer has several, which are small where there are many.
    """

    def size_of(parameter: ir.Value) -> int:
        dims = static_dims(gradients[parameter])
        return _LARGEST_GROUP if dims is None or parameter in alone else math.prod(dims)

    return in_runs(gradients, size_of, _LARGEST_GROUP, _MOST_IN_GROUP)


def _sums(
    op: Ops, gradients: Sequence[ir.Value], sum_of: Sum, dtype: ir.DataType, squares: int
) -> ir.Value:
    """Return a vector of what tells whether each of several gradients is finite."""

    def write() -> list[ir.Value]:
        reduction = _REDUCTIONS.get(sum_of)
        if reduction is None or any(g.dtype != dtype or op.rank(g) != 2 for g in gradients):
            return [op.concat([op.cast(sum_of(op, g), dtype) for g in gradients], axis=0)]
        column = op.concat([op.call(reduction, g, keepdims=1)[0] for g in gradients], axis=0)
        return [op.reshape(column, [len(gradients)])]

    (made,) = op.kernel(
        "SumsOfGradients", gradients, write, gradients=len(gradients), squares=squares
    )
    return made


def early_check(op: Ops, check: FiniteCheck, parameter: ir.Value | None = None) -> ir.Value:
    """Return whether the loss, the statistics and the gradients up to one are finite."""
    so_far = check.before if parameter is None else check.by_parameter[parameter]
    assert so_far is not None
    return _are_finite(op, so_far)


def _are_finite(op: Ops, sums: ir.Value) -> ir.Value:
    """Return a vector of one flag. 0 times a number that is not finite is NaN."""
    return op.Equal(op.ReduceSum(op.Mul(sums, 0.0), keepdims=1), 0.0)


def guarded_formula(op: Ops, passed: ir.Value, formula: Formula) -> Formula:
    """Return a formula of updates that gives the old values where the check has not passed."""

    def update(parameter: ir.Value, gradient: ir.Value, *states: ir.Value) -> Sequence[ir.Value]:
        flag, old = op.squeeze(passed, [0]), (parameter, *states)
        made = formula(parameter, gradient, *states)
        return [op.Where(flag, new, kept) for new, kept in zip(made, old, strict=True)]

    return update


def guarded_updates(
    op: Ops, passed: ir.Value, updates: Mapping[ir.Value, ir.Value]
) -> list[ir.Value]:
    """Return each update if the check has passed, else the value that it is for, by selection.

    An If costs a GPU more: the processor waits for its condition.
    """
    flag, made = op.squeeze(passed, [0]), list[ir.Value]()
    for old, new in updates.items():
        name, new.name = str(new.name), op.names.fresh(f"{new.name}_if_finite")
        kept = op.type_as(op.Where(flag, new, old), new)
        kept.name = name
        made.append(kept)
    return made


def update_if(
    op: Ops,
    passed: ir.Value,
    old: Sequence[ir.Value],
    write: Callable[[], Sequence[ir.Value]],
) -> list[ir.Value]:
    """Return what `write` makes of the old values if the check has passed, else the old values."""
    op.scope, new = "update", list[ir.Value]()

    def update() -> list[ir.Value]:
        new.extend(write())
        return new

    def keep() -> list[ir.Value]:
        return [
            value
            if static_dims(made) in (None, static_dims(value))
            else op.reshape(value, static_dims(made) or ())
            for value, made in zip(old, new, strict=True)
        ]

    then = op.body([], update, "update")
    otherwise = op.body([], keep, "keep")
    results = op.call("If", passed, outputs=len(old), then_branch=then, else_branch=otherwise)
    for result, made in zip(results, new, strict=True):
        result.type = made.type
        result.shape = None if made.shape is None else made.shape.copy()
        result.name, made.name = made.name, op.names.fresh(f"{op.scope}/{made.name}")
    return list(results)
