"""Attention that keeps no scores, against the nodes that it stands in for and against torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from native.harness import assert_near, gradient_with_functions, kinds_of, run, run_both

torch = pytest.importorskip("torch")

Array = np.ndarray[Any, Any]
Inputs = dict[str, tuple[int, Sequence[int]]]
FLOAT, BOOL = TensorProto.FLOAT, TensorProto.BOOL
BOTH = {"Attention", "AttentionGrad"}
rng = np.random.default_rng(7)


def model_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: Inputs,
    out: Sequence[int],
    constants: dict[str, Any] | None = None,
) -> onnx.ModelProto:
    """A model that ends in a product with w: beyond it, no cotangent is zero for certain."""
    graph = helper.make_graph(
        [*nodes, helper.make_node("MatMul", ["o", "w"], ["y"])],
        "attention",
        [helper.make_tensor_value_info(n, t, s) for n, (t, s) in inputs.items()],
        [helper.make_tensor_value_info("y", FLOAT, [*out[:-1], 3])],
        [onnx.numpy_helper.from_array(np.asarray(v), k) for k, v in (constants or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def chain(*steps: str) -> list[onnx.NodeProto]:
    """Nodes, written "y = Op(a, b) perm=0,1"."""
    made = []
    for step in steps:
        output, _, rest = step.partition(" = ")
        call, _, attribute = rest.partition(")")
        kind, _, inputs = call.partition("(")
        node = helper.make_node(kind, inputs.replace(" ", "").split(","), [output])
        name, _, value = attribute.strip().partition("=")
        if name:
            numbers = [int(i) for i in value.split(",")]
            node.attribute.append(
                helper.make_attribute(name, numbers if name == "perm" else numbers[0])
            )
        made.append(node)
    return made


SCALED = chain("kt = Transpose(k) perm=0,1,3,2", "qs = Mul(q, s)", "ks = Mul(kt, s)")
ADDED = chain("x = MatMul(qs, ks)", "z = Add(m, x)")
END = chain("p = Softmax(z) axis=-1", "o = MatMul(p, v)")


def plain_model(b: int, h: int, t: int, s: int, d: int, dv: int) -> onnx.ModelProto:
    inputs: Inputs = {
        "q": (FLOAT, [b, h, t, d]), "k": (FLOAT, [b, h, s, d]), "v": (FLOAT, [b, h, s, dv]),
        "w": (FLOAT, [dv, 3]),
    }  # fmt: skip
    nodes = [*SCALED, *chain("z = MatMul(qs, ks)"), *END]
    return model_of(nodes, inputs, [b, h, t, dv], {"s": np.float32(d**-0.25)})


def masked_model(
    mask: Sequence[int], steps: Sequence[onnx.NodeProto], kind: int = FLOAT
) -> onnx.ModelProto:
    inputs: Inputs = {
        "q": (FLOAT, [2, 3, 70, 16]), "k": (FLOAT, [2, 3, 75, 16]), "v": (FLOAT, [2, 3, 75, 8]),
        "w": (FLOAT, [8, 3]), "m": (kind, mask),
    }  # fmt: skip
    numbers = {"s": np.float32(0.5), "low": np.float32(-1e4), "zero": np.float32(0)}
    return model_of([*SCALED, *steps], inputs, [2, 3, 70, 8], numbers)


def causal(queries: int, keys: int) -> Array:
    return np.triu(np.full((queries, keys), -np.inf, np.float32), 1)


def feeds_of(model: onnx.ModelProto, spread: float = 1) -> dict[str, Array]:
    made: dict[str, Array] = {}
    for info in model.graph.input:
        shape = [d.dim_value for d in info.type.tensor_type.shape.dim]
        if info.type.tensor_type.elem_type == BOOL:
            made[info.name] = rng.random(shape) < 0.6
        else:
            made[info.name] = (rng.standard_normal(shape) * spread).astype(np.float32)
    return made


def compare(
    model: onnx.ModelProto,
    feeds: dict[str, Array] | None = None,
    kinds: set[str] = BOTH,
    wrt: Sequence[str] = ("q", "k", "v"),
) -> list[Any]:
    """Check kernels against the plain nodes, and return what they compute."""
    made = gradient_with_functions(model, list(wrt))
    assert kinds <= kinds_of(made)
    plain, native = run_both(made, {**feeds_of(made), **(feeds or {})})
    assert_near(plain, native, 32)
    return native


@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1, 1, 1, 1, 1), (2, 3, 5, 7, 4, 4), (1, 2, 64, 64, 32, 32), (2, 2, 65, 63, 16, 16),
        (1, 2, 33, 130, 20, 9), (2, 1, 130, 33, 9, 20), (1, 1, 200, 200, 8, 64),
        (1, 2, 16, 17, 1, 40), (1, 1, 3, 300, 33, 33), (1, 1, 70, 520, 17, 5),
        (16, 1, 20, 20, 24, 24),
    ],
    ids=str,
)  # fmt: skip
def test_shapes(sizes: tuple[int, int, int, int, int, int]) -> None:
    compare(plain_model(*sizes))


@pytest.mark.parametrize("sizes", [(0, 4, 4), (2, 0, 4), (2, 3, 0), (2, 5, 6)], ids=str)
def test_sizes_that_are_only_known_when_it_runs(sizes: tuple[int, int, int]) -> None:
    model = plain_model(1, 2, 1, 1, 8, 4)
    for info in model.graph.input:
        dims = info.type.tensor_type.shape.dim
        if len(dims) == 4:
            dims[0].dim_param, dims[2].dim_param = "b", "t" if info.name == "q" else "s"
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", FLOAT, ["b", 2, "t", 3]))
    made = gradient_with_functions(model, ["q", "k", "v"])
    b, t, s = sizes
    (seed,) = {i.name for i in made.graph.input} - {*"qkvw"}
    shapes = {
        "q": (b, 2, t, 8),
        "k": (b, 2, s, 8),
        "v": (b, 2, s, 4),
        "w": (4, 3),
        seed: (b, 2, t, 3),
    }
    feeds = {n: rng.standard_normal(shape).astype(np.float32) for n, shape in shapes.items()}
    assert kinds_of(made) >= BOTH
    plain, native = run_both(made, feeds)
    if t == 0:  # onnxruntime leaves the result of a product of no depth as it was
        plain = [np.zeros_like(p) for p in plain]
    assert_near(plain, native, 32)


def test_large_scores() -> None:
    made = gradient_with_functions(plain_model(2, 2, 40, 100, 16, 16), ["q", "k", "v"])
    plain, native = run_both(made, feeds_of(made, spread=6))
    assert_near(plain, native, 2000)  # scores in the hundreds have errors of their own
    assert all(np.isfinite(n).all() for n in native)


# ---- masks ---------------------------------------------------------------------------------------

MASKS = [
    [75], [70, 75], [70, 1], [1, 1, 70, 75], [2, 1, 1, 75], [2, 3, 70, 75], [3, 1, 75],
    [2, 1, 70, 1],
]  # fmt: skip


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_added_masks(mask: list[int]) -> None:
    compare(masked_model(mask, [*ADDED, *END]))


@pytest.mark.parametrize("mask", [*MASKS, [1]], ids=str)
@pytest.mark.parametrize("branches", ["x, low", "low, x"])
def test_masks_that_replace_scores(mask: list[int], branches: str) -> None:
    steps = chain("x = MatMul(qs, ks)", f"z = Where(m, {branches})")
    native = compare(masked_model(mask, [*steps, *END], BOOL))
    assert all(np.isfinite(n).all() for n in native)


def test_blocks_that_a_mask_hides_are_left_out() -> None:
    native = compare(masked_model([70, 75], [*ADDED, *END]), {"m": causal(70, 75)})
    assert not native[2][:, :, 70:].any()  # keys that no query sees have no gradient


def test_rows_that_see_nothing_are_nan_as_in_plain_form() -> None:
    mask = causal(70, 75)
    mask[3] = -np.inf
    native = compare(masked_model([70, 75], [*ADDED, *END]), {"m": mask})
    assert np.isnan(native[0][:, :, 3]).all()


def test_rows_that_see_nothing_are_zero_where_nan_is_replaced() -> None:
    end = chain(
        "p0 = Softmax(z) axis=-1", "n = IsNaN(p0)", "p = Where(n, zero, p0)", "o = MatMul(p, v)"
    )
    mask = causal(70, 75)
    mask[3] = -np.inf
    model = masked_model([70, 75], [*ADDED, *end])
    native = compare(model, {"m": mask}, {"AttentionOrZero", "AttentionGrad"})
    assert all(np.isfinite(n).all() for n in native)


def test_a_mask_that_trains_stays_plain() -> None:
    model = masked_model([70, 75], [*ADDED, *END])
    assert not kinds_of(gradient_with_functions(model, ["q", "k", "v", "m"])) & BOTH


def test_probabilities_that_are_returned_stay_plain() -> None:
    model = plain_model(1, 2, 4, 4, 8, 8)
    model.graph.output.append(helper.make_tensor_value_info("p", FLOAT, [1, 2, 4, 4]))
    assert not kinds_of(gradient_with_functions(model, ["q", "k", "v"], of="y")) & BOTH


# ---- forms of exporters --------------------------------------------------------------------------


def test_scores_that_are_divided_by_a_number() -> None:
    steps = chain("kt = Transpose(k) perm=0,1,3,2", "x = MatMul(q, kt)", "z = Div(x, s)")
    model = plain_model(2, 2, 10, 11, 8, 8)
    del model.graph.node[:]
    model.graph.node.extend([*steps, *END, helper.make_node("MatMul", ["o", "w"], ["y"])])
    compare(model)


def test_a_scale_that_is_only_known_when_it_runs() -> None:
    model = plain_model(2, 2, 10, 11, 8, 8)
    del model.graph.initializer[:]
    model.graph.input.append(helper.make_tensor_value_info("s", FLOAT, [1]))
    compare(model, {"s": np.array([0.7], np.float32)})


@pytest.mark.parametrize("rank", [3, 4])
def test_heads_behind_the_length(rank: int) -> None:
    there, keys = ("0,2,1,3", "0,2,3,1") if rank == 4 else ("1,0,2", "1,2,0")
    steps = chain(
        f"q1 = Transpose(q) perm={there}", f"kt = Transpose(k) perm={keys}",
        f"v1 = Transpose(v) perm={there}", "qs = Mul(q1, s)", "z = MatMul(qs, kt)",
        "p = Softmax(z) axis=-1", "o1 = MatMul(p, v1)", f"o = Transpose(o1) perm={there}",
    )  # fmt: skip
    shape = [2, 66, 3, 16] if rank == 4 else [66, 6, 16]
    inputs: Inputs = {**{n: (FLOAT, shape) for n in "qkv"}, "w": (FLOAT, [16, 3])}
    model = model_of(steps, inputs, shape, {"s": np.float32(0.25)})
    made = gradient_with_functions(model, ["q", "k", "v"])
    left = [n.op_type for n in made.graph.node]
    assert left.count("Transpose") <= 1  # of w
    compare(model)


def test_keys_that_come_transposed() -> None:
    inputs: Inputs = {
        "q": (FLOAT, [2, 3, 66, 16]), "k": (FLOAT, [2, 3, 16, 70]), "v": (FLOAT, [2, 3, 70, 16]),
        "w": (FLOAT, [16, 3]),
    }  # fmt: skip
    compare(model_of([*chain("z = MatMul(q, k)"), *END], inputs, [2, 3, 66, 16]))


def test_one_tensor_as_queries_keys_and_values() -> None:
    inputs: Inputs = {"x": (FLOAT, [2, 3, 20, 16]), "w": (FLOAT, [16, 3])}
    steps = chain(
        "kt = Transpose(x) perm=0,1,3,2", "z = MatMul(x, kt)", "p = Softmax(z) axis=-1",
        "o = MatMul(p, x)",
    )  # fmt: skip
    compare(model_of(steps, inputs, [2, 3, 20, 16]), wrt=["x"])


# ---- against torch, and from run to run ----------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_same_as_torch(is_causal: bool) -> None:
    b, h, t, d = 2, 4, 100, 32
    inputs: Inputs = {n: (FLOAT, [b, h, t, d]) for n in "qkv"}
    inputs |= {"w": (FLOAT, [d, 3]), "m": (FLOAT, [t, t])}
    model = model_of([*SCALED, *ADDED, *END], inputs, [b, h, t, d], {"s": np.float32(d**-0.25)})
    made = gradient_with_functions(model, ["q", "k", "v"])
    mask = causal(t, t) if is_causal else np.zeros((t, t), np.float32)
    feeds = {**feeds_of(made), "m": mask}
    native = run(made, feeds, native=True)
    tensors = [torch.tensor(feeds[n], requires_grad=True) for n in "qkv"]
    mixed = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=is_causal)
    y = mixed @ torch.tensor(feeds["w"])
    (seed,) = {*feeds} - {*inputs}
    expected = torch.autograd.grad(y, tensors, torch.tensor(feeds[seed]))
    assert_near([y.detach().numpy(), *(g.numpy() for g in expected)], native, 32)


def test_the_same_numbers_each_time_and_with_any_number_of_threads() -> None:
    made = gradient_with_functions(plain_model(1, 2, 150, 400, 16, 16), ["q", "k", "v"])
    feeds = feeds_of(made)
    first = run(made, feeds, native=True)
    for threads in (1, 2, 3):
        again = run(made, feeds, native=True, threads=threads)
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


# ---- kernels by themselves -----------------------------------------------------------------------


def call(kind: str, shapes: Sequence[Sequence[int]], outputs: int, **attributes: Any) -> list[Any]:
    """Run a kernel by itself, without nodes that it stands in for."""
    names, made = [f"i{i}" for i in range(len(shapes))], [f"o{i}" for i in range(outputs)]
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnxtrain", 1)]
    body = [helper.make_node("Identity", ["i0"], [name]) for name in made]
    function = helper.make_function(
        "ai.onnxtrain", f"{kind}_0", names, made, body, imports[:1], list(attributes)
    )
    graph = helper.make_graph(
        [helper.make_node(f"{kind}_0", names, made, domain="ai.onnxtrain", **attributes)],
        "call",
        [helper.make_tensor_value_info(n, FLOAT, None) for n in names],
        [helper.make_tensor_value_info(n, FLOAT, None) for n in made],
    )
    model = helper.make_model(graph, opset_imports=imports, functions=[function], ir_version=8)
    feeds = {n: np.ones(s, np.float32) for n, s in zip(names, shapes, strict=True)}
    return run(model, feeds, native=True)


QKV = [[2, 3, 5, 8], [2, 3, 6, 8], [2, 3, 6, 4]]


@pytest.mark.parametrize(
    ("shapes", "attributes", "message"),
    [
        ([[2, 3, 5, 8], [1, 3, 6, 8], [2, 3, 6, 4]], {}, "differ in their batch"),
        ([[2, 3, 5, 8], [2, 2, 6, 8], [2, 2, 6, 4]], {}, "no multiple"),
        ([[2, 3, 5, 8], [2, 3, 6, 7], [2, 3, 6, 4]], {}, "differ in their size"),
        ([[2, 3, 5, 8], [2, 3, 6, 8], [2, 3, 5, 4]], {}, "as many values as keys"),
        ([[2, 3, 5, 8], [2, 3, 6, 8], [2, 1, 6, 4]], {}, "differ in their heads"),
        ([[3, 5, 8], [2, 3, 6, 8], [2, 3, 6, 4]], {}, "not those of its tensors"),
        (QKV, {"q_axes": [0, 1, 2]}, "another number than four"),
        (QKV, {"q_axes": [0, 1, 2, 9]}, "not from -1 to 3"),
        (QKV, {"q_axes": [0, 1, 1, 3]}, "named twice"),
        (QKV, {"q_axes": [0, 1, 3, 2]}, "side by side"),
        (QKV, {"o_axes": [0, -1, 1, 2]}, "longer than 1"),
        ([*QKV, [5, 7]], {"has_mask": 1}, "does not fit"),
        ([*QKV, [1, 2, 3, 5, 6]], {"has_mask": 1}, None),
        ([*QKV, [2, 2, 3, 5, 6]], {"has_mask": 1}, "does not fit"),
        ([*QKV, [2]], {"divides": [0]}, "not one number"),
    ],
)
def test_forward_errors(
    shapes: list[list[int]], attributes: dict[str, Any], message: str | None
) -> None:
    if message is None:
        call("Attention", shapes, 2, **attributes)
        return
    with pytest.raises(Exception, match=f"ai.onnxtrain::Attention: .*{message}"):
        call("Attention", shapes, 2, **attributes)


@pytest.mark.parametrize("wrong", range(6))
def test_backward_errors(wrong: int) -> None:
    shapes = [[2, 3, 5, 4], *QKV, [2, 3, 5, 4], [2, 2, 3, 5]]
    call("AttentionGrad", shapes, 3)
    shapes[wrong] = [*shapes[wrong][:2], 9, *shapes[wrong][3:]]
    with pytest.raises(Exception, match=r"ai\.onnxtrain::AttentionGrad: "):
        call("AttentionGrad", shapes, 3)


def test_heads_of_keys_that_serve_several_heads_of_queries() -> None:
    shapes = [[2, 6, 5, 4], [2, 6, 5, 8], [2, 3, 6, 8], [2, 3, 6, 4], [2, 6, 5, 4], [2, 2, 6, 5]]
    o, kept = call("Attention", shapes[1:4], 2)
    assert o.shape == (2, 6, 5, 4)
    assert kept.shape == (2, 2, 6, 5)
    np.testing.assert_allclose(o, 1, rtol=1e-6)
    *_, dv = call("AttentionGrad", shapes, 3)
    assert dv.shape == (2, 3, 6, 4)


@pytest.mark.parametrize(
    "shape", [(1, 2, 70, 75, 32, 24), (2, 1, 5, 3, 7, 9), (1, 1, 130, 9, 1, 1)]
)
def test_bfloat16_loses_digits_and_nothing_else(shape: tuple[int, ...]) -> None:
    """Where the processor has no such products, the kernels compute with float32."""
    made = gradient_with_functions(plain_model(*shape), ["q", "k", "v"])
    feeds = feeds_of(made)
    expected = run(made, feeds, native=True)
    for node in made.graph.node:
        if node.op_type.partition("_")[0] in BOTH:
            node.attribute.append(helper.make_attribute("bf16", 1))
    for function in made.functions:
        if function.name.partition("_")[0] in BOTH:
            function.attribute.append("bf16")
    for exact, rounded in zip(expected, run(made, feeds, native=True), strict=True):
        assert rounded.shape == exact.shape
        scale = float(np.abs(exact).max())
        np.testing.assert_allclose(rounded, exact, rtol=0, atol=scale * 2.0**-5)
