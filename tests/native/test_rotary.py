"""Rotary positions have one gradient, and one kernel each way, however they are written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from native.harness import assert_near, gradient_with_functions, kinds_of, run_both
from native.kernel_calls import call

torch = pytest.importorskip("torch", reason="torch is the oracle")

Array = np.ndarray[Any, Any]
BOTH = {"Rotary", "RotaryGrad"}
SHAPE = (2, 3, 5, 8)
TABLES = [(1, 1, 5, 8), (2, 1, 5, 8), (5, 8), (2, 3, 5, 8), (8,)]
# How the halves are made, whether the second is negated, and whether operands are exchanged.
FORMS = [(cut, neg, order) for cut in ("Split", "Slice") for neg in (0, 1) for order in (0, 1)]


def model_of(
    cut: str = "Slice",
    negated: int = 1,
    exchanged: int = 0,
    table: tuple[int, ...] = TABLES[0],
    at: int = 4,
) -> onnx.ModelProto:
    """y = x cos + (±b, a) sin, where a and b are the halves of the last axis of x."""

    def order(*names: str) -> list[str]:
        return list(names)[::-1] if exchanged else list(names)

    if cut == "Split":
        nodes = [helper.make_node("Split", ["x"], ["a", "b"], axis=-1, num_outputs=2)]
    else:
        nodes = [
            helper.make_node("Slice", ["x", "zero", "at", "last"], ["a"]),
            helper.make_node("Slice", ["x", "at", "end", "last"], ["b"]),
        ]
    if negated:
        nodes.append(helper.make_node("Neg", ["b"], ["minus_b"]))
    nodes += [
        helper.make_node("Concat", ["minus_b" if negated else "b", "a"], ["turned"], axis=-1),
        helper.make_node("Mul", order("x", "cos"), ["straight"]),
        helper.make_node("Mul", order("turned", "sin"), ["across"]),
        helper.make_node("Add", order("straight", "across"), ["y"]),
    ]
    numbers = {"zero": 0, "at": at, "end": 2**62, "last": 3}
    constants = [onnx.numpy_helper.from_array(np.array([v]), k) for k, v in numbers.items()]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, SHAPE),
        *(helper.make_tensor_value_info(n, TensorProto.FLOAT, table) for n in ("cos", "sin")),
    ]
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "graph", inputs, [y], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def feeds(table: tuple[int, ...] = TABLES[0]) -> dict[str, Array]:
    random = np.random.default_rng(3)
    shapes = {"x": SHAPE, "cos": table, "sin": table, "y_grad": SHAPE}
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def by_torch(given: dict[str, Array], negated: int) -> dict[str, Array]:
    """Return the gradients, by name."""
    x, cos, sin = (
        torch.tensor(given[n], dtype=torch.float64, requires_grad=True) for n in ("x", "cos", "sin")
    )
    a, b = x.chunk(2, -1)
    y = x * cos + torch.cat([-b if negated else b, a], -1) * sin
    y.backward(torch.tensor(given["y_grad"], dtype=torch.float64))
    return {f"{n}_grad": v.grad.numpy() for n, v in (("x", x), ("cos", cos), ("sin", sin))}


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_like_the_nodes_and_like_torch(form: tuple[str, int, int]) -> None:
    made, given = gradient_with_functions(model_of(*form), ["x"]), feeds()
    assert kinds_of(made) == BOTH
    plain, native = run_both(made, given)
    assert_near(plain, native, 4)
    names = [output.name for output in made.graph.output]
    expected = by_torch(given, form[1])["x_grad"]
    np.testing.assert_allclose(native[names.index("x_grad")], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_angles_of_any_shape(table: tuple[int, ...]) -> None:
    made, given = gradient_with_functions(model_of(table=table), ["x"]), feeds(table)
    assert kinds_of(made) == BOTH
    assert_near(*run_both(made, given), 4)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_learned_angles_have_gradients(form: tuple[str, int, int]) -> None:
    made, given = gradient_with_functions(model_of(*form), ["x", "cos", "sin"]), feeds()
    plain, _ = run_both(made, given)
    names = [output.name for output in made.graph.output]
    for name, expected in by_torch(given, form[1]).items():
        np.testing.assert_allclose(plain[names.index(name)], expected, rtol=1e-5, atol=1e-5)


def test_what_is_read_elsewhere_keeps_its_own_gradient() -> None:
    model = model_of()
    model.graph.output.append(helper.make_tensor_value_info("turned", TensorProto.FLOAT, None))
    assert not BOTH & kinds_of(gradient_with_functions(model, ["x"], of="y"))


@pytest.mark.parametrize("change", [{"at": 5}, {"table": (1, 1, 5, 1)}], ids=str)
def test_other_sums_are_no_rotations(change: dict[str, Any]) -> None:
    assert not BOTH & kinds_of(gradient_with_functions(model_of(**change), ["x"]))


@pytest.mark.parametrize(
    ("x", "table", "message"),
    [
        ((2, 3), (3,), "no halves"),
        ((2, 4), (2,), "do not fit"),
        ((2, 4), (3, 4), "do not fit"),
        ((2, 4), (1, 1, 4), "do not fit"),
    ],
)
def test_shapes_that_do_not_fit(x: tuple[int, ...], table: tuple[int, ...], message: str) -> None:
    angles = np.ones(table, np.float32)
    with pytest.raises(Exception, match=message):
        call("Rotary", [np.ones(x, np.float32), angles, angles], sign=-1)


def test_nothing_to_turn() -> None:
    angles = np.ones((0, 4), np.float32)
    (made,) = call("Rotary", [np.ones((2, 0, 4), np.float32), angles, angles], sign=-1)
    assert made.shape == (2, 0, 4)
