"""Specs of the running sums and products in rules/reduce.py."""

import itertools

import numpy as np
import pytest

from gradcheck import Spec, check_spec, ids

LAST = np.array(-1, np.int64)
DIRECTIONS = list(itertools.product((0, 1), (0, 1)))
WITH_ZEROS = np.array(
    [[1, 2, -3, 2], [0, 2, 3, 2], [2, 0, 3, 2], [2, 0, 3, 0], [2, 3, 2, 0], [0, 0, 2, 2]],
    np.float32,
)


def running(
    op: str, entry: object, exclusive: int, reverse: int, label: str, **more: object
) -> Spec:
    return Spec(
        op, [entry, LAST], {"exclusive": exclusive, "reverse": reverse},
        id=f"{label}{'-exclusive' * exclusive}{'-reverse' * reverse}", **more,
    )  # fmt: skip


SPECS = [
    *(running("CumSum", (3, 4), *flags, "sum", eps=1.0) for flags in DIRECTIONS),
    Spec("CumSum", [(3, 4, 2), np.array(1, np.int32)], id="constant-axis", constants=[1], eps=1.0),
    *(running("CumProd", (3, 4), *flags, "product", opset=26) for flags in DIRECTIONS),
    *(running("CumProd", WITH_ZEROS, *flags, "zeros", opset=26) for flags in DIRECTIONS),
    Spec("CumProd", [(3, 4), np.array(0, np.int64)], id="axis-0", opset=26, constants=[1]),
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_gradient(spec: Spec) -> None:
    check_spec(spec)


@pytest.mark.parametrize("spec", [s for s in SPECS if s.symbolic], ids=ids)
def test_gradient_with_symbolic_dimensions(spec: Spec) -> None:
    check_spec(spec, symbolic=True)
