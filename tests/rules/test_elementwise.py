"""Specs of rules/elementwise.py."""

import numpy as np
import pytest
from gradcheck import Spec, check_spec, ids

SPECS = [
    Spec("Add", [(2, 3), (2, 3)], eps=1.0),
    Spec("Add", [(2, 3), (3,)], id="broadcast", eps=1.0),
    Spec("Sub", [(2, 1), (4, 1, 3)], id="broadcast-both", eps=1.0),
    Spec("Mul", [(2, 3), (1, 3)], eps=1.0),
    Spec("Div", [(2, 3), (2, 1)], domain=(0.5, 2.0)),
    Spec("Pow", [(2, 3), (3,)], domain=(0.5, 2.0)),
    Spec("Pow", [(2, 3), np.array(3, np.int64)], id="int-exponent", domain=(0.5, 2.0)),
    Spec("Max", [(2, 3), (3,), (2, 1)], apart=0.1),
    Spec("Tanh", [(2, 3)]),
    Spec("Clip", [(3, 4), np.array(-1, np.float32), np.array(1, np.float32)],
         wrt=[0], away_from=(-1, 1)),
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_gradient(spec: Spec) -> None:
    check_spec(spec)


@pytest.mark.parametrize("spec", [s for s in SPECS if s.symbolic], ids=ids)
def test_gradient_with_symbolic_dimensions(spec: Spec) -> None:
    check_spec(spec, symbolic=True)
