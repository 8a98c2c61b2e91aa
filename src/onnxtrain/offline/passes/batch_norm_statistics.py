"""The running statistics of BatchNormalization, updated as one vector.

Each layer has two of them, and updates each with three operators on small vectors. For the fifty
layers of MobileNetV2 that is a tenth of the training graph, which onnxruntime reads and optimizes
before the first step. So equal updates are joined; `optimizers/multi_tensor.py` does the same for
parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import constant_array
from onnxtrain.offline.optimizers.multi_tensor import is_small, update_multi_tensor


@dataclass(frozen=True)
class _Average:
    """stored · keep + now · (1 − keep), the updated statistic."""

    updated: ir.Value
    stored: ir.Value
    now: ir.Value
    keep: float
    rest: float


def join_statistics(op: Ops, updates: Sequence[ir.Value]) -> list[ir.Value]:
    """Replace equal updates of running statistics by one update of their concatenation."""
    groups: dict[tuple[float, float, ir.DataType | None], list[_Average]] = {}
    joined: dict[ir.Value, ir.Value] = {}
    for updated in updates:
        found = _average(updated)
        if found is not None:
            key = found.keep, found.rest, found.stored.dtype
            groups.setdefault(key, []).append(found)
    for (keep, rest, _), averages in groups.items():
        if len(averages) > 1:
            joined.update(_join(op, averages, keep, rest))
    return [joined.get(updated, updated) for updated in updates]


def _join(
    op: Ops, averages: Sequence[_Average], keep: float, rest: float
) -> Iterator[tuple[ir.Value, ir.Value]]:
    op.scope = "running_statistics"
    with op.arithmetic():
        rows = update_multi_tensor(
            op,
            lambda stored, now: [stored * keep + now * rest],
            [(average.stored, average.now) for average in averages],
        )
    for average, (made,) in zip(averages, rows, strict=True):
        old = average.updated
        made.name, old.name = old.name, op.names.fresh(f"{old.name}_alone")
        yield old, op.type_as(made, average.stored)


def _average(output: ir.Value) -> _Average | None:
    """Recognise the update of a stored statistic that nothing else uses."""
    total = _made_by(output, "Add")
    if total is None:
        return None
    products = [_made_by(value, "Mul") for value in total.inputs]
    if any(product is None for product in products):
        return None
    (stored, keep), (now, rest) = (p.inputs for p in products if p is not None)
    factors = [constant_array(v) for v in (keep, rest)]
    if stored is None or now is None or any(f is None or f.size != 1 for f in factors):
        return None
    if not (stored.producer() is None and is_small(stored) and is_small(now)):
        return None
    numbers = [float(f.reshape(())) for f in factors if f is not None]
    return _Average(output, stored, now, *numbers)


def _made_by(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """Return the node that made a value, before Identity, if it is of a kind."""
    node = None if value is None else value.producer()
    while node is not None and node.op_type == "Identity":
        node = None if node.inputs[0] is None else node.inputs[0].producer()
    return node if node is not None and (node.domain, node.op_type) == ("", op_type) else None
