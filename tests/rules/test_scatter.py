"""Specs of rules/scatter.py."""

import numpy as np
import onnx
import pytest
import torch

from gradcheck import Spec, check_spec, ids, vjp


def ints(numbers: object) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


ONCE = [(4, 3), ints([[0, 1, -1], [2, 0, 1]]), (2, 3)]  # no element is written twice
TWICE = [(4, 3), ints([[0, 1, -1], [-4, 0, 1]]), (2, 3)]
ROWS_ONCE = [(4, 3), ints([[[2], [-4]]]), (1, 2, 3)]
ROWS_TWICE = [(4, 3), ints([[2], [0], [-2]]), (3, 3)]
POINTS_TWICE = [(4, 3), ints([[2, 1], [0, 2], [-2, 1]]), (3,)]


def with_reduction(op: str, inputs: list[object], reduction: str, **more: object) -> Spec:
    eps = {"add": 1.0, "none": 1.0, "mul": 1e-2}.get(reduction, 1e-3)
    return Spec(op, inputs, {"reduction": reduction}, **{"id": reduction, "eps": eps, **more})


SPECS = [
    with_reduction("ScatterElements", ONCE, "none"),
    Spec("ScatterElements", [(2, 4), ints([[3, -4], [0, 1]]), (2, 2)], {"axis": 1}, id="axis",
         eps=1.0),
    # The reference evaluator takes no negative axis, nor indices smaller than data on others.
    Spec("ScatterElements", [(2, 4), ints([[3, -4]]), (1, 2)], {"axis": -1}, id="smaller",
         second_opinion=False, eps=1.0),
    with_reduction("ScatterElements", TWICE, "add"),
    with_reduction("ScatterElements", TWICE, "mul"),
    with_reduction("ScatterElements", TWICE, "max", apart=0.1),
    with_reduction("ScatterElements", TWICE, "min", apart=0.1),
    with_reduction("ScatterND", ROWS_ONCE, "none"),
    with_reduction("ScatterND", ROWS_TWICE, "add"),
    with_reduction("ScatterND", ROWS_TWICE, "mul"),
    with_reduction("ScatterND", ROWS_TWICE, "mul", id="mul-constant", constants=[1]),
    with_reduction("ScatterND", POINTS_TWICE, "mul", id="mul-points"),
    with_reduction("ScatterND", ROWS_TWICE, "max", apart=0.1),
    with_reduction("ScatterND", ROWS_TWICE, "min", apart=0.1),
    with_reduction("ScatterND", POINTS_TWICE, "min", id="min-points", apart=0.1),
    Spec("TensorScatter", [(2, 5, 3), (2, 2, 3), ints([1, 3])], opset=24, eps=1.0),
    Spec("TensorScatter", [(2, 5, 3), (2, 2, 3)], id="no-start", opset=24, eps=1.0),
    Spec("TensorScatter", [(2, 3, 5, 2), (2, 3, 3, 2), ints([4, 1])], {"mode": "circular"},
         id="circular", opset=24, eps=1.0),
    Spec("TensorScatter", [(2, 5, 3), (2, 2, 3), ints([4, 3])], {"axis": 1, "mode": "circular"},
         id="axis", opset=24, eps=1.0),
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_gradient(spec: Spec) -> None:
    check_spec(spec)


@pytest.mark.parametrize("spec", [s for s in SPECS if s.symbolic], ids=ids)
def test_gradient_with_symbolic_dimensions(spec: Spec) -> None:
    check_spec(spec, symbolic=True)


# Position 0 receives two updates, position 1 none, position 2 one.
COMBINED = """
    <ir_version: 10, opset_import: ["" : 18]>
    g (float[3] data, int64[k] i, float[k] updates) => (float[3] y)
    { y = ScatterElements<reduction = "HOW">(data, i, updates) }"""
SPECIAL = [
    ("mul", [2, 3, 4], [0, 5, 6]),  # one zero: the derivative with respect to it stays
    ("mul", [2, 3, 4], [0, 0, 0]),
    ("mul", [0, 0, 0], [2, 5, 6]),
    ("max", [7, 3, 4], [7, 7, 4]),  # ties
    ("max", [1, 3, 4], [7, 7, 5]),
    ("min", [1, 3, 4], [1, 7, 4]),
]


@pytest.mark.parametrize(("reduction", "data", "updates"), SPECIAL)
def test_zeros_and_ties_are_what_torch_says(
    reduction: str, data: list[float], updates: list[float]
) -> None:
    index, ct = ints([0, 0, 2]), np.array([1, 2, 3], np.float32)
    feeds = {
        "data": np.array(data, np.float32),
        "i": index,
        "updates": np.array(updates, np.float32),
    }
    model = onnx.parser.parse_model(COMBINED.replace("HOW", reduction))
    computed = vjp(model, feeds, ["data", "updates"], ct)
    leaves = [torch.tensor(feeds[n], requires_grad=True) for n in ("data", "updates")]
    name = {"mul": "prod", "max": "amax", "min": "amin"}[reduction]
    result = leaves[0].scatter_reduce(0, torch.tensor(index), leaves[1], name)
    result.backward(torch.tensor(ct))
    for ours, leaf in zip(computed, leaves, strict=True):
        np.testing.assert_allclose(ours, leaf.grad, rtol=1e-6)
