"""The kernel of the gradient of Gather: against its function, and against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from native.harness import assert_near, gradient_with_functions, kinds_of, run, run_both

Shape = tuple[int, ...]


def gather(table: Shape, indices: Shape, int32: bool = False) -> onnx.ModelProto:
    """A model with the gradient of rows of a table with respect to the table."""
    kind = TensorProto.INT32 if int32 else TensorProto.INT64
    inputs = [
        helper.make_tensor_value_info("table", TensorProto.FLOAT, table),
        helper.make_tensor_value_info("indices", kind, indices),
    ]
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, (*indices, *table[1:]))
    nodes = [helper.make_node("Gather", ["table", "indices"], ["y"])]
    graph = helper.make_graph(nodes, "graph", inputs, [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    return gradient_with_functions(model, ["table"])


def feeds_of(table: Shape, indices: Shape, int32: bool = False) -> dict[str, Any]:
    random = np.random.default_rng(0)
    rows = random.integers(-table[0], table[0], indices) if table[0] else np.zeros(indices, int)
    return {
        "table": random.normal(size=table).astype(np.float32),
        "indices": rows.astype(np.int32 if int32 else np.int64),
        "y_grad": random.normal(size=(*indices, *table[1:])).astype(np.float32),
    }


CASES: list[tuple[Shape, Shape]] = [
    ((1, 1), (2,)),
    ((5,), (7,)),
    ((10, 3), (4, 6)),
    ((100, 64), (3, 7)),
    ((2, 300), (500,)),
    ((3000, 65), (200,)),
    ((7, 4, 5), (2, 3)),
    ((6, 0), (2,)),
    ((6, 4), (0,)),
    ((1000, 257), (1000,)),
]


@pytest.mark.parametrize(("table", "indices"), CASES, ids=str)
@pytest.mark.parametrize("int32", [False, True], ids=["int64", "int32"])
def test_like_the_function(table: Shape, indices: Shape, int32: bool) -> None:
    model, feeds = gather(table, indices, int32), feeds_of(table, indices, int32)
    assert kinds_of(model) == {"EmbeddingGrad"}
    # The plain form adds row by row, which loses digits where a row occurs often.
    assert_near(*run_both(model, feeds), ulps=16 if np.prod(indices) < 100 else 64)


def test_long_sums_are_accurate() -> None:
    model, feeds = gather((2, 40), (20_000,)), feeds_of((2, 40), (20_000,))
    (_, found) = run(model, feeds, native=True)
    expected = np.zeros((2, 40))
    np.add.at(expected, feeds["indices"], feeds["y_grad"].astype(np.float64))
    np.testing.assert_allclose(found, expected, atol=2e-4)


def test_same_numbers_whatever_the_threads() -> None:
    model, feeds = gather((3000, 300), (999,)), feeds_of((3000, 300), (999,))
    first = run(model, feeds, native=True)
    for expected, found in zip(first, run(model, feeds, native=True, threads=2), strict=True):
        np.testing.assert_array_equal(expected, found)


def call(**feeds: Any) -> None:
    """Run the kernel by itself."""
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnxtrain", 1)]
    body = [helper.make_node("Identity", ["dy"], ["table"])]
    names = ["indices", "dy", "shape"]
    function = helper.make_function(
        "ai.onnxtrain", "EmbeddingGrad_0", names, ["table"], body, opsets[:1]
    )
    inputs = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(feeds[name].dtype), feeds[name].shape
        )
        for name in names
    ]
    node = helper.make_node("EmbeddingGrad_0", names, ["table"], domain="ai.onnxtrain")
    output = helper.make_tensor_value_info("table", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "graph", inputs, [output])
    model = helper.make_model(graph, opset_imports=opsets, functions=[function], ir_version=8)
    run(model, feeds, native=True)


@pytest.mark.parametrize(
    ("indices", "dy", "shape", "message"),
    [
        ([0, 4], (2, 3), [4, 3], "out of the range"),
        ([0, -5], (2, 3), [4, 3], "out of the range"),
        ([0, 1], (3, 3), [4, 3], "one row for each index"),
        ([0, 1], (2, 3), [4, 4], "one row for each index"),
        ([0, 1], (2, 3), [-4, 3], "negative"),
        ([0, 1], (2, 3), [2**40, 2**40], "too many"),
        ([0, 1], (2, 3), [], "a shape is a vector"),
        ([0.0, 1.0], (2, 3), [4, 3], "not integers"),
    ],
)
def test_what_does_not_fit_is_an_error(
    indices: list[float], dy: Shape, shape: list[int], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        call(
            indices=np.array(indices, np.float32 if isinstance(indices[0], float) else np.int64),
            dy=np.zeros(dy, np.float32),
            shape=np.array(shape, np.int64),
        )  # fmt: skip
