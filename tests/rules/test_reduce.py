"""Specs of rules/reduce.py."""

import numpy as np
import pytest
from onnx import TensorProto, helper

from gradcheck import Spec, check_spec, ids, special_values, vjp

F32 = np.float32
AXES = np.array([1, -1])
NONE = np.array([], np.int64)
KINDS = {
    "ReduceSum": {"eps": 1.0},
    "ReduceMean": {"eps": 1.0},
    "ReduceMax": {"apart": 0.1},
    "ReduceMin": {"apart": 0.1},
    "ReduceProd": {"domain": (0.5, 1.5)},
    "ReduceSumSquare": {},
    "ReduceL1": {"away_from": (0,)},
    "ReduceL2": {},
    "ReduceLogSum": {"domain": (0.5, 2.0)},
    "ReduceLogSumExp": {},
}
SPECS = [
    spec
    for op, options in KINDS.items()
    for spec in (
        Spec(op, [(2, 3, 4)], id="all", **options),
        Spec(op, [(2, 3, 4)], {"keepdims": 0}, id="all-dropped", **options),
        Spec(op, [(2, 3, 4), AXES], id="axes", constants=(1,), **options),
        Spec(op, [(2, 3, 4), AXES], {"keepdims": 0}, id="dropped", constants=(1,), **options),
        Spec(op, [(2, 3, 4), AXES], id="run-time-axes", **options),
    )
] + [
    Spec("ReduceSum", [(2, 3, 4), AXES], {"keepdims": 0}, id="run-time-axes-dropped", eps=1.0),
    Spec("ReduceMean", [(2, 3, 4), AXES], {"keepdims": 0}, id="run-time-axes-dropped", eps=1.0),
    Spec("ReduceSum", [(2, 3)], {"noop_with_empty_axes": 1}, id="noop", eps=1.0),
    Spec("ReduceSum", [(2, 3), NONE], {"noop_with_empty_axes": 1}, id="noop-empty",
         constants=(1,), eps=1.0),
    Spec("ReduceMean", [(2, 3), NONE], id="empty-means-all", constants=(1,), eps=1.0),
    Spec("Range", [np.array(1.5, F32), np.array(4.0, F32), np.array(0.7, F32)], wrt=[0, 2],
         eps=1e-3),
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
        ("ReduceMax", [[1, 3, 3, 2]], [[0, 0.5, 0.5, 0]]),
        ("ReduceMin", [[1, 3, 1, 1]], [[1 / 3, 0, 1 / 3, 1 / 3]]),
        ("ReduceL2", [[0, 0]], [[0, 0]]),
        ("ReduceL1", [[-2, 0, 2]], [[-1, 0, 1]]),
        ("ReduceProd", [[2, 0, 5]], [[0, 10, 0]]),
        ("ReduceProd", [[0, 0, 5]], [[0, 0, 0]]),
        ("ReduceLogSumExp", [[1000, 0]], [[1, 0]]),
    ],
)
def test_special_values(op: str, inputs: list, expected: list) -> None:
    special_values(op, inputs, expected)


def test_the_mean_of_more_than_float16_can_count() -> None:
    x = np.ones(100_000, np.float16)
    value_info = helper.make_tensor_value_info
    for dims in ([100_000], ["n"]):
        graph = helper.make_graph(
            [helper.make_node("ReduceMean", ["x"], ["y"], keepdims=0)],
            "mean",
            [value_info("x", TensorProto.FLOAT16, dims)],
            [value_info("y", TensorProto.FLOAT16, [])],
        )
        opsets = [helper.make_opsetid("", 18)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
        (dx,) = vjp(model, {"x": x}, ["x"], np.array(1, np.float16))
        np.testing.assert_allclose(dx, np.full(x.shape, 1e-5, np.float16), rtol=1e-2)
