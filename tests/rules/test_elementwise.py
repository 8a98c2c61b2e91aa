"""Specs of rules/elementwise.py."""

import numpy as np
import pytest

from gradcheck import Spec, check_spec, ids, special_values

F32 = np.float32
SPECS = [
    Spec("Add", [(2, 3), (2, 3)], eps=1.0),
    Spec("Add", [(2, 3), (3,)], id="broadcast", eps=1.0),
    Spec("Add", [(), (2, 3)], id="scalar", eps=1.0),
    Spec("Sub", [(2, 1), (4, 1, 3)], id="broadcast-both", eps=1.0),
    Spec("Mul", [(2, 3), (1, 3)], eps=1.0),
    Spec("Mul", [(2, 1, 3), (4, 1)], id="broadcast-both", eps=1.0),
    Spec("Div", [(2, 3), (2, 1)], domain=(0.5, 2.0)),
    Spec("Pow", [(2, 3), (3,)], domain=(0.5, 2.0)),
    Spec("Pow", [(3,), (2, 3)], id="broadcast-base", domain=(0.5, 2.0)),
    Spec("Pow", [(2, 3), np.array(3, np.int64)], id="int-exponent"),
    Spec("Pow", [(2, 3), np.array(2, F32)], id="negative-base", wrt=[0]),
    Spec("Sum", [(2, 3), (3,), (1, 1)], eps=1.0),
    Spec("Sum", [(2, 3)], id="one", eps=1.0),
    Spec("Mean", [(2, 3), (3,), (2, 1)], eps=1.0),
    Spec("Max", [(2, 3), (3,), (2, 1)], apart=0.2),
    Spec("Max", [(2, 3)], id="one"),
    Spec("Min", [(2, 3), (3,), (2, 1)], apart=0.2),
    Spec("Mod", [(2, 3), np.array([[1.7], [0.9]], F32)], {"fmod": 1}, eps=1e-3, wrt=[0]),
    Spec("Mod", [np.array([5.3, -7.1, 2.2], F32), np.array([2.0, 3.0, -0.9], F32)],
         {"fmod": 1}, id="divisor", eps=1e-3, second_opinion=False),  # it rounds float64 to float32
    Spec("Identity", [(2, 3)], eps=1.0),
    Spec("Neg", [(2, 3)], eps=1.0),
    Spec("Abs", [(3, 4)], away_from=(0,)),
    Spec("Reciprocal", [(2, 3)], domain=(0.5, 2.0)),
    Spec("Sqrt", [(2, 3)], domain=(0.5, 2.0)),
    Spec("Exp", [(2, 3)]),
    Spec("Log", [(2, 3)], domain=(0.5, 2.0)),
    Spec("Sin", [(2, 3)]),
    Spec("Cos", [(2, 3)]),
    Spec("Tan", [(2, 3)], domain=(-1.0, 1.0)),
    Spec("Asin", [(2, 3)], domain=(-0.8, 0.8)),
    Spec("Acos", [(2, 3)], domain=(-0.8, 0.8)),
    Spec("Atan", [(2, 3)]),
    Spec("Sinh", [(2, 3)]),
    Spec("Cosh", [(2, 3)]),
    Spec("Tanh", [(2, 3)]),
    Spec("Asinh", [(2, 3)]),
    Spec("Acosh", [(2, 3)], domain=(1.5, 3.0)),
    Spec("Atanh", [(2, 3)], domain=(-0.8, 0.8)),
    Spec("Erf", [(2, 3)], second_opinion=False),  # it computes Erf in float32
    Spec("Where", [np.array([[True], [False]]), (2, 3), (2, 3)], eps=1.0),
    Spec("Where", [np.array([[True, False, True]]), (2, 1), (3,)], id="broadcast", eps=1.0),
    Spec("Clip", [(3, 4), np.array(-1, F32), np.array(1, F32)], away_from=(-1, 1)),
    Spec("Clip", [(3, 4), None, np.array(1, F32)], id="upper", away_from=(1,)),
    Spec("Clip", [(3, 4), np.array(-1, F32)], id="lower", away_from=(-1,)),
    Spec("Clip", [(3, 4), np.array(1, F32), np.array(-1, F32)], id="crossed"),
    Spec("Clip", [(3, 4)], id="none"),
    Spec("Clip", [(5, 4), np.array(0, F32), np.array(6, F32)], id="relu6", wrt=[0],
         domain=(-4, 10), away_from=(0, 6), constants=(1, 2)),
    Spec("Cast", [(2, 3)], {"to": 11}, eps=1.0, output_type=np.float64),
    Spec("CastLike", [(2, 3), np.array(0, F32)], wrt=[0], eps=1.0, opset=19),
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_gradient(spec: Spec) -> None:
    check_spec(spec)


@pytest.mark.parametrize("spec", [s for s in SPECS if s.symbolic], ids=ids)
def test_gradient_with_symbolic_dimensions(spec: Spec) -> None:
    check_spec(spec, symbolic=True)


@pytest.mark.parametrize(
    ("op", "inputs", "expected"),
    [
        ("Abs", [[-1, 0, 1]], [[-1, 0, 1]]),
        ("Tanh", [[-1000, 0, 1000]], [[0, 1, 0]]),
        ("Erf", [[-1000, 1000]], [[0, 0]]),
        ("Max", [[1, 2, 3], [1, 5, 0]], [[0.5, 0, 1], [0.5, 1, 0]]),
        ("Min", [[1, 2, 3], [1, 5, 0]], [[0.5, 1, 0], [0.5, 0, 1]]),
        ("Clip", [[-2, -1, 0, 1, 2], -1.0, 1.0], [[0, 1, 1, 1, 0], 1, 1]),
        ("Pow", [[0, 0, -2], [0, 1, 2]], [[0, 1, -4], [0, 0, 0]]),
        ("Div", [[0, 1], [1, 1]], [[1, 1], [0, -1]]),
    ],
)
def test_special_values(op: str, inputs: list, expected: list) -> None:
    special_values(op, inputs, expected)


def test_relu6_is_zero_at_its_bounds() -> None:
    """As in torch, and as Relu is at zero; behind a dead channel every element lies there."""
    bounds = {"constants": (1, 2)}
    inputs = [[-1, 0, 3, 6, 7], 0.0, 6.0]
    special_values("Clip", inputs, [[0, 0, 1, 0, 0]], **bounds)
    special_values("Clip", [[-1, 0, 3, 6, 7], 0.0, 5.0], [[0, 1, 1, 0, 0]], **bounds)


def test_one_value_used_twice_by_one_node() -> None:
    spec = Spec("Mul", [(2, 3)], id="square")
    check_spec(spec, repeat_first_input=True)
