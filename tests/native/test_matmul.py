"""Products of matrices, in float32 and with factors that are rounded to bfloat16."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from native.harness import assert_near, run, run_both
from onnxtrain.offline.passes.native_kernels import fit_to_kernels
from onnxtrain.offline.writer.functions import write_functions

Array = np.ndarray[Any, Any]
FLOAT = TensorProto.FLOAT
rng = np.random.default_rng(11)
SIZES = [
    (1, 1, 1), (3, 5, 7), (14, 32, 256), (15, 33, 257), (64, 10, 500), (65, 130, 31), (500, 20, 3),
    (130, 300, 520), (29, 64, 2), (2, 1, 700),
]  # fmt: skip


def call(a: Array, b: Array, bias: Array | None = None, **attributes: int) -> onnx.ModelProto:
    """A call of the kernel, whose plain form is a Gemm, or a MatMul where `a` has more axes."""
    given = {"a": a, "b": b} | ({} if bias is None else {"c": bias})
    kind = "Gemm" if a.ndim == 2 else "MatMul"
    known = {k: v for k, v in attributes.items() if k.startswith("trans") and kind == "Gemm"}
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnxtrain", 1)]
    attributes["has_bias"] = int(bias is not None)
    body = [helper.make_node(kind, [*given], ["y"], **known)]
    function = helper.make_function(
        "ai.onnxtrain", "MatMul_0", [*given], ["y"], body, imports[:1], [*attributes]
    )
    graph = helper.make_graph(
        [helper.make_node("MatMul_0", [*given], ["y"], domain="ai.onnxtrain", **attributes)],
        "product",
        [helper.make_tensor_value_info(n, FLOAT, v.shape) for n, v in given.items()],
        [helper.make_tensor_value_info("y", FLOAT, None)],
    )
    return helper.make_model(graph, opset_imports=imports, functions=[function], ir_version=8)


def random(*shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


def factors(m: int, n: int, k: int, trans_a: int, trans_b: int) -> dict[str, Array]:
    a = random(k, m) if trans_a else random(m, k)
    return {"a": a, "b": random(n, k) if trans_b else random(k, n)}


@pytest.mark.parametrize("trans_b", [0, 1])
@pytest.mark.parametrize("trans_a", [0, 1])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products(sizes: tuple[int, int, int], trans_a: int, trans_b: int) -> None:
    feeds = factors(*sizes, trans_a, trans_b)
    bias, usual = random(sizes[1]), sizes[2] ** 0.5  # of a sum of products of normal numbers
    model = call(**feeds, transA=trans_a, transB=trans_b)
    assert_near(*run_both(model, feeds), 32, usual)
    model = call(**feeds, bias=bias, transA=trans_a, transB=trans_b)
    assert_near(*run_both(model, {**feeds, "c": bias}), 32, usual)


def to_bfloat16(x: Array) -> Array:
    """The nearest number of bfloat16, as float32; where it is in the middle, the even one."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


@pytest.mark.parametrize("trans_b", [0, 1])
@pytest.mark.parametrize("trans_a", [0, 1])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_factors_are_rounded(sizes: tuple[int, int, int], trans_a: int, trans_b: int) -> None:
    """Results are those of rounded factors, or of the factors if the processor cannot."""
    feeds = factors(*sizes, trans_a, trans_b)
    model = call(**feeds, transA=trans_a, transB=trans_b, bf16=1)
    (found,) = run(model, feeds, native=True)
    (exact,) = run(model, feeds, native=False)
    (rounded,) = run(model, {n: to_bfloat16(v) for n, v in feeds.items()}, native=False)
    scale = np.abs(exact).max() * 2.0**-23
    distances = [np.abs(found - expected).max() for expected in (exact, rounded)]
    assert min(distances) <= 64 * scale
    again = run(model, feeds, native=True, threads=3)
    assert np.array_equal(found, again[0])


@pytest.mark.parametrize("bf16", [0, 1])
def test_axes_before_the_rows_and_nothing_to_do(bf16: int) -> None:
    for shape in ((2, 3, 40), (2, 0, 40), (1, 2, 3, 40)):
        feeds = {"a": random(*shape), "b": random(40, 50)}
        plain, native = run_both(call(**feeds, bf16=bf16), feeds)
        assert_near(plain, native, 2.0**16 if bf16 else 32)
    feeds = {"a": random(4, 0), "b": random(0, 50)}
    (y,) = run(call(**feeds, bf16=bf16), feeds, native=True)
    assert y.shape == (4, 50)
    assert not y.any()


def test_what_is_not_finite_stays_so() -> None:
    feeds = {"a": np.eye(40, dtype=np.float32), "b": random(40, 40)}
    feeds["b"][3, 5], feeds["b"][7, 9] = np.nan, np.inf
    (y,) = run(call(**feeds, bf16=1), feeds, native=True)
    assert np.isnan(y[:, 5]).all()
    assert np.isinf(y[7, 9])


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((3, 4), (5, 6)), "do not fit together"),
        (((4,), (4, 6)), "other factors than matrices"),
        (((3, 4), (2, 4, 6)), "other factors than matrices"),
    ],
)
def test_errors(shapes: tuple[tuple[int, ...], tuple[int, ...]], message: str) -> None:
    feeds = {"a": random(*shapes[0]), "b": random(*shapes[1])}
    with pytest.raises(Exception, match=f"ai.onnxtrain::MatMul: .*{message}"):
        run(call(**feeds), feeds, native=True)


def test_a_bias_of_another_size() -> None:
    feeds = {"a": random(3, 4), "b": random(4, 6), "c": random(5)}
    with pytest.raises(Exception, match="the bias does not fit"):
        run(call(feeds["a"], feeds["b"], feeds["c"]), feeds, native=True)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_products_are_calls_where_they_round(precision: Any) -> None:
    nodes = [
        helper.make_node("Gemm", ["x", "w", "c"], ["h"], transB=1),
        helper.make_node("MatMul", ["h", "v"], ["g"]),
        helper.make_node("Gemm", ["g", "small"], ["y"]),
    ]
    sizes = {"x": [64, 40], "w": [50, 40], "c": [50], "v": [50, 60], "small": [60, 3]}
    graph = helper.make_graph(
        nodes, "layers", [helper.make_tensor_value_info(n, FLOAT, s) for n, s in sizes.items()],
        [helper.make_tensor_value_info("y", FLOAT, [64, 3])],
        value_info=[helper.make_tensor_value_info("h", FLOAT, [64, 50]),
                    helper.make_tensor_value_info("g", FLOAT, [64, 60])],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    read = ir.from_proto(model)
    fit_to_kernels(read.graph, precision)
    functions = write_functions(read)
    made = ir.to_proto(read)
    made.functions.extend(functions)
    assert len(functions) == (2 if precision == "bf16" else 0)  # the last one is too narrow
    feeds = {n: random(*s) for n, s in sizes.items()}
    plain, native = run_both(made, feeds)
    assert_near(plain, native, 2.0**17 if functions else 0)
