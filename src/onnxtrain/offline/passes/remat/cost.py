"""How long nodes take, roughly: enough to tell what is cheap to compute again from what is not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from onnxtrain.offline.graph.op_facts import COSTLY, ELEMENT_COST
from onnxtrain.offline.passes.remat.flow import Step

_PRODUCTS_PER_SECOND = 3e10  # of two numbers, added up: on two cores of these days
_NUMBERS_PER_SECOND = 1e9  # read or written
Shape = Sequence[int]


def seconds(step: Step, shapes: Mapping[str, Shape]) -> float:
    """Estimate how long a node takes on a small machine."""
    made = sum(math.prod(shapes.get(name, ())) for name in step.makes)
    read = sum(math.prod(shapes.get(name, ())) for name in step.reads)
    moved = (made + read) * ELEMENT_COST.get(step.op_type, 1) / _NUMBERS_PER_SECOND
    return 0.0 if step.is_view else moved + _products(step, shapes) / _PRODUCTS_PER_SECOND


def _products(step: Step, shapes: Mapping[str, Shape]) -> float:
    if step.op_type not in COSTLY:
        return 0.0
    made = math.prod(shapes.get(step.makes[0], ()))
    known = [shapes[name] for name in step.reads[:2] if name in shapes]
    if len(known) < 2 or not known[0] or not known[1]:
        return 100.0 * made
    first, second = known
    if step.op_type == "Conv":
        return float(made * math.prod(second[1:]))
    if step.op_type == "MatMul":
        return float(made * first[-1])
    if step.op_type == "Gemm":
        return float(made * math.prod(first) / max(1, shapes[step.makes[0]][0]))
    # Every number of the smaller one meets a row of the other: right for recurrent layers, and
    # an order of magnitude for the rest.
    return float(math.prod(first[:-1] or first) * math.prod(second))
