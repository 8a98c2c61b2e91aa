"""Kernels of optimizers against the bodies of their functions, and against torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import helper

from native.harness import assert_near, kinds_of, library, run, run_both
from onnxtrain.device.run.native import Library
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.optimizers import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    ClipGradNorm,
    ClipGradValue,
    Lion,
    Optimizer,
    ParameterGroup,
    RMSprop,
    write_optimizer,
)
from onnxtrain.offline.writer.functions import write_functions

Array = np.ndarray[Any, Any]
SHAPES: tuple[tuple[int, ...], ...] = (
    (3, 5), (), (1,), (0, 4), (4097,), (64, 3, 1, 1), (128, 129), (7,), (16384 * 2 + 3,),
)  # fmt: skip
NORM, VALUE = ClipGradNorm(0.5), ClipGradValue(0.3)
OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": AdamW(),
    "adamw, decay": AdamW(weight_decay=0.1),
    "adamw, no bias correction": AdamW(bias_correction=False, weight_decay=0.1),
    "adamw of torch": AdamW.torch(),
    "adamw of torch, clipped by norm": AdamW.torch(clip_grad=NORM),
    "adamw, clipped by value": AdamW(clip_grad=VALUE),
    "adam": Adam(),
    "adam, decay": Adam(weight_decay=0.1),
    "adam, decay, clipped by norm": Adam(weight_decay=0.1, clip_grad=NORM),
    "sgd": SGD(),
    "sgd, decay, clipped by norm": SGD(NORM, weight_decay=0.1),
    "sgd, momentum": SGD(momentum=0.9),
    "sgd, everything": SGD(NORM, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "sgd, nesterov": SGD(momentum=0.9, nesterov=True, weight_decay=0.1, clip_grad=VALUE),
    "rmsprop": RMSprop(),
    "rmsprop, momentum": RMSprop(momentum=0.9, clip_grad=NORM),
    "rmsprop, centered": RMSprop(centered=True, weight_decay=0.1),
    "rmsprop, everything": RMSprop(0.9, 1e-7, 0.1, 0.8, True, NORM),
    "adagrad": Adagrad(),
    "adagrad, everything": Adagrad(0.1, 0.1, 0.2, 1e-7, NORM),
    "lion": Lion(),
    "lion, decay, clipped by norm": Lion(weight_decay=0.1, clip_grad=NORM),
}


def model_of(
    optimizer: Optimizer, shapes: Sequence[Sequence[int]], *, chunked: bool = False
) -> onnx.ModelProto:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 18}, name="graph")
    parameters = [(f"p{i}", ir.DataType.FLOAT, shape) for i, shape in enumerate(shapes)]
    write_optimizer(Ops(graph, 18), optimizer, parameters, "flag", chunked=chunked)
    model = ir.Model(graph, ir_version=10)
    functions = write_functions(model)
    proto = ir.to_proto(model)
    proto.functions.extend(functions)
    return proto


def feeds_of(model: onnx.ModelProto, step: int = 3) -> dict[str, Array]:
    rng = np.random.default_rng(5)
    feeds: dict[str, Array] = {}
    for value in model.graph.input:
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        made = np.asarray(rng.standard_normal(shape), np.float32)
        # Squares are not negative; the mean of a centered RMSprop is the smaller one.
        feeds[value.name] = np.asarray(np.abs(made)) if ".momentum" in value.name else made
        if value.name.endswith(("momentum1", "momentum2")):
            feeds[value.name] = np.asarray(np.abs(made) * np.float32(0.5))
    feeds["learning_rate"] = np.array([0.01], np.float32)
    feeds["step"] = np.array([step], np.int64)
    return feeds


@pytest.mark.parametrize("step", [1, 3, 100_000])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_kernel_and_body(name: str, step: int) -> None:
    optimizer = OPTIMIZERS[name]
    model = model_of(optimizer, SHAPES)
    assert type(optimizer).__name__ in kinds_of(model)
    plain, native = run_both(model, feeds_of(model, step))
    assert_near(plain, native)


def test_one_tensor() -> None:
    model = model_of(AdamW(clip_grad=NORM), [(5,)])
    assert_near(*run_both(model, feeds_of(model)))


def test_denormal_means_become_zero_in_kernels_alone() -> None:
    model = model_of(AdamW.torch(), [(40_000,)])
    feeds = feeds_of(model)
    feeds["p0_grad"][:] = 0
    feeds["p0.momentum0"][:] = tiny = np.float32(1e-41)
    place = [value.name for value in model.graph.output].index("p0.momentum0.updated")
    plain, native = run_both(model, feeds)
    assert (plain[place] > 0).all() and not native[place].any()
    assert_near(plain, native)
    assert (np.full(64, tiny) * np.float32(0.9) > 0).all()  # on the thread that ran the kernel


def test_groups_are_calls_of_their_own() -> None:
    groups = [ParameterGroup("p[13]", weight_decay=0.0), ParameterGroup("p2", lr_scale=0.1)]
    optimizer = AdamW.torch(groups=groups, clip_grad=NORM)
    model = model_of(optimizer, SHAPES)
    calls = [f.name for f in model.functions if f.name.startswith("AdamW")]
    assert len(calls) == 3
    assert_near(*run_both(model, feeds_of(model)))


@pytest.mark.parametrize("optimizer", [AdamW(), SGD(momentum=0.9)])
def test_large_tensors_keep_the_shape_of_chunks(optimizer: Optimizer) -> None:
    model = model_of(optimizer, [(1024, 600), (9,)], chunked=True)
    plain, native = run_both(model, feeds_of(model))
    assert plain[1].shape != (1024, 600)
    assert_near(plain, native)


class Halved(SGD):
    """A formula of its own, for which there is no kernel."""

    def formula(self, ctx: Any) -> Any:
        update = super().formula(ctx)
        return lambda p, g: update(p, ctx.scale(g, 0.5))


def test_a_subclass_stays_plain() -> None:
    assert "SGD" not in kinds_of(model_of(Halved(), [(3,)]))
    assert "Halved" not in kinds_of(model_of(Halved(), [(3,)]))


@pytest.mark.parametrize("name", ["adamw", "sgd, nesterov", "rmsprop, everything", "lion"])
def test_in_place(name: str) -> None:
    """Outputs are bound to the memory of the inputs that they replace."""
    model = model_of(OPTIMIZERS[name], [(1000, 33), (17,), (300, 2048)], chunked=True)
    feeds = feeds_of(model)
    names = [value.name for value in model.graph.output]
    expected = dict(zip(names, run(model, feeds, native=True), strict=True))
    updated = bound_run(model, feeds)
    for output, array in expected.items():
        if output != "flag":
            own = updated[output.removesuffix(".updated")]
            np.testing.assert_array_equal(own.reshape(array.shape), array)


def test_what_is_not_finite_changes_nothing() -> None:
    model = model_of(AdamW(), [(1000, 33), (17,)])
    feeds = feeds_of(model)
    feeds["p1_grad"][3] = np.nan
    for name, array in bound_run(model, feeds).items():
        np.testing.assert_array_equal(array, feeds[name])


def bound_run(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Run with outputs in the memory of inputs; return the inputs as they are then."""
    options = ort.SessionOptions()
    functions = [function.name for function in model.functions]
    with Library(str(library())).registered(options, functions, is_shared=False):
        session = ort.InferenceSession(model.SerializeToString(), options)
    memory = {name: array.copy() for name, array in feeds.items()}
    binding = session.io_binding()
    for name, array in memory.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
    for value in model.graph.output:
        own = memory.get(value.name.removesuffix(".updated"))
        if own is None:
            binding.bind_output(value.name)
            continue
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        bound = ort.OrtValue.ortvalue_from_numpy(own.reshape(shape))
        binding.bind_ortvalue_output(value.name, bound)
    session.run_with_iobinding(binding)
    return memory


@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_numbers_from_run_to_run(threads: int) -> None:
    model = model_of(AdamW(clip_grad=NORM), [(200, 1001), (17,)])
    feeds = feeds_of(model)
    first = run(model, feeds, native=True, threads=1)
    for _ in range(3):
        for expected, found in zip(
            first, run(model, feeds, native=True, threads=threads), strict=True
        ):
            np.testing.assert_array_equal(expected, found)


TORCH = {
    "AdamW": (AdamW.torch(), {}),
    "Adam": (Adam(weight_decay=0.1), {"weight_decay": 0.1}),
    "SGD": (
        SGD(momentum=0.9, nesterov=True, weight_decay=0.1),
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "RMSprop": (
        RMSprop(centered=True, momentum=0.5),
        {"centered": True, "momentum": 0.5},
    ),
    "Adagrad": (Adagrad(lr_decay=0.1), {"lr_decay": 0.1}),
}


@pytest.mark.parametrize("name", TORCH)
def test_five_steps_of_torch(name: str) -> None:
    torch = pytest.importorskip("torch")
    optimizer, options = TORCH[name]
    model = model_of(optimizer, [(33, 7)])
    feeds = feeds_of(model)
    for key in feeds:
        if ".momentum" in key:
            feeds[key] = np.zeros_like(feeds[key])
    weight = torch.nn.Parameter(torch.tensor(feeds["p0"]))
    peer = getattr(torch.optim, name)([weight], lr=0.01, **options)
    names = [value.name for value in model.graph.output]
    for step in range(1, 6):
        feeds["step"][0] = step
        made = dict(zip(names, run(model, feeds, native=True), strict=True))
        weight.grad = torch.tensor(feeds["p0_grad"])
        peer.step()
        for key in names[1:]:
            feeds[key.removesuffix(".updated")] = made[key]
        feeds["p0_grad"] = np.cos(feeds["p0_grad"] * 3)
    np.testing.assert_allclose(feeds["p0"], weight.detach().numpy(), rtol=0, atol=3e-6)


# ---- inputs that do not fit ----------------------------------------------------------------------

GOOD: dict[str, Array] = {
    "rate": np.array([0.1], np.float32),
    "step": np.array([1], np.int64),
    "p": np.ones((2, 3), np.float32),
    "g": np.ones((2, 3), np.float32),
    "m": np.ones((2, 3), np.float32),
    "v": np.ones((2, 3), np.float32),
}


def call(kind: str, feeds: Mapping[str, Array], outputs: int, **attributes: Any) -> list[Any]:
    """Run the kernel of a kind on any inputs."""
    names = list(feeds)
    made = [f"o{i}" for i in range(outputs)]
    body = [helper.make_node("Identity", [names[0]], [name]) for name in made]
    function = helper.make_function(
        "ai.onnxtrain", f"{kind}_0", names, made, body, [helper.make_opsetid("", 18)], attributes
    )
    node = helper.make_node(f"{kind}_0", names, made, domain="ai.onnxtrain", **attributes)
    kinds = {n: helper.np_dtype_to_tensor_dtype(a.dtype) for n, a in feeds.items()}
    ranks = {n: [None] * a.ndim for n, a in feeds.items()}
    inputs = [helper.make_tensor_value_info(n, kinds[n], ranks[n]) for n in names]
    results = [helper.make_empty_tensor_value_info(name) for name in made]
    graph = helper.make_graph([node], "g", inputs, results)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnxtrain", 1)]
    model = helper.make_model(graph, opset_imports=opsets, functions=[function], ir_version=8)
    return run(model, feeds, native=True)


def test_the_kernel_alone() -> None:
    changed, mean, square = call("AdamW", GOOD, 3, chunks=[0], epsilon=0.0)
    np.testing.assert_allclose(mean, 1.0)
    np.testing.assert_allclose(square, 1.0)
    assert changed.shape == (2, 3)


@pytest.mark.parametrize(
    ("changes", "chunks", "message"),
    [
        ({"g": np.ones(7, np.float32)}, [0], "gradient has another size"),
        ({"m": np.ones(5, np.float32)}, [0], "state has another size"),
        ({"v": np.ones((2, 3), np.float64)}, [0], "not of type float"),
        ({"p": np.ones((2, 3), np.int64)}, [0], "not of type float"),
        ({"rate": np.ones(2, np.float32)}, [0], "one element"),
        ({"rate": np.ones(1, np.float64)}, [0], "not of type float"),
        ({"step": np.ones(1, np.float32)}, [0], "not of type int64"),
        ({}, [0, 0], "fewer inputs"),
        ({}, [4], "cannot be cut"),
        ({}, [-1], "cannot be cut"),
    ],
)
def test_inputs_that_do_not_fit(
    changes: Mapping[str, Array], chunks: list[int], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        call("AdamW", {**GOOD, **changes}, 3, chunks=chunks)


def test_fewer_outputs_than_tensors() -> None:
    with pytest.raises(Exception, match="fewer outputs"):
        call("AdamW", GOOD, 2, chunks=[0])


def test_the_norm_needs_sums() -> None:
    with pytest.raises(Exception, match=r"not of type float|fewer inputs"):
        call("AdamW", GOOD, 3, chunks=[0], max_norm=1.0)


# ---- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 15, 64, 100, 16384, 3_000_001])
@pytest.mark.parametrize("squares", [0, 1])
def test_sums_are_accurate(size: int, squares: int) -> None:
    x = np.random.default_rng(2).standard_normal(size).astype(np.float32) + np.float32(0.1)
    (made,) = call("GradientSum", {"x": x}, 1, squares=squares)
    wide = x.astype(np.float64)
    expected = np.sum(wide * wide if squares else wide)
    scale = np.sum(wide * wide if squares else np.abs(wide))
    assert made.shape == (1,)
    assert abs(made[0] - expected) <= 2e-7 * scale


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, 3e38])
@pytest.mark.parametrize("place", [0, 77, 40_000])
def test_sums_tell_what_is_not_finite(bad: float, place: int) -> None:
    x = np.ones(40_001, np.float32)
    x[place] = bad
    (made,) = call("GradientSum", {"x": x}, 1, squares=1)
    assert not np.isfinite(made[0])


@pytest.mark.parametrize("squares", [0, 1])
@pytest.mark.parametrize("sizes", [(0, 3), (1, 1), (15, 40_001), (3, 7)], ids=str)
def test_bounds_of_products(sizes: tuple[int, int], squares: int) -> None:
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal(size).astype(np.float32) for size in sizes)
    (made,) = call("ProductBound", {"a": a, "b": b}, 1, squares=squares)
    norms = np.prod([np.linalg.norm(x.astype(np.float64)) for x in (a, b)])
    np.testing.assert_allclose(made, [norms**2 if squares else 64 * norms], rtol=1e-6)


@pytest.mark.parametrize("squares", [0, 1])
@pytest.mark.parametrize(
    ("x", "y"), [(np.nan, 1.0), (1.0, np.inf), (0.0, np.nan), (1e19, 1e19), (1e20, 1e-20)]
)
def test_bounds_tell_what_is_not_finite(x: float, y: float, squares: int) -> None:
    a, b = (np.array([0.5, number, 0.5], np.float32) for number in (x, y))
    (made,) = call("ProductBound", {"a": a, "b": b}, 1, squares=squares)
    assert not np.isfinite(made[0])
    with pytest.raises(Exception, match=r"ProductBound: .*fewer than two factors"):
        call("ProductBound", {"a": a}, 1)


def test_the_check_has_all_sums() -> None:
    feeds = {
        "a": np.array([1.5], np.float32),
        "b": np.array([2.0], np.float32),
        "loss": np.array(7.0, np.float32),
        "mean": np.ones(5, np.float32),
        "variance": np.full((2, 2), 2.0, np.float32),
    }
    attributes = {"sums": 2, "has_loss": 1, "statistics": 2}
    sums, passed, alone = call("FiniteCheck", feeds, 3, **attributes)
    np.testing.assert_array_equal(sums, [1.5, 2.0, 7.0, 13.0])
    np.testing.assert_array_equal(alone, [1.5, 2.0])
    assert passed.tolist() == [True]
    for name in feeds:
        bad = {**feeds, name: np.full_like(feeds[name], np.nan)}
        assert call("FiniteCheck", bad, 2, **attributes)[1].tolist() == [False]


def test_sums_of_several() -> None:
    rng = np.random.default_rng(5)
    shapes = ((3, 5), (), (0,), (50_000,), (128, 129))
    feeds = {f"g{i}": np.asarray(rng.normal(size=s), np.float32) for i, s in enumerate(shapes)}
    for squares in (0, 1):
        (made,) = call("SumsOfGradients", feeds, 1, gradients=len(shapes), squares=squares)
        wide = [g.astype(np.float64) for g in feeds.values()]
        expected = [np.sum(g * g if squares else g) for g in wide]
        np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-4)
    with pytest.raises(Exception, match="fewer inputs"):
        call("SumsOfGradients", feeds, 1, gradients=6)


def test_the_check_puts_sums_in_order() -> None:
    feeds = {
        "a": np.array([1.0, 2.0, 3.0], np.float32),
        "b": np.array([4.0], np.float32),
        "loss": np.array(7.0, np.float32),
    }
    attributes = {"vectors": 2, "has_loss": 1, "order": [3, 0, 2, 1]}
    sums, passed, alone = call("FiniteSums", feeds, 3, **attributes)
    np.testing.assert_array_equal(sums, [4.0, 1.0, 3.0, 2.0, 7.0])
    np.testing.assert_array_equal(alone, [4.0, 1.0, 3.0, 2.0])
    assert passed.tolist() == [True]
    for name in feeds:
        bad = {**feeds, name: np.full_like(feeds[name], np.inf)}
        assert call("FiniteSums", bad, 2, **attributes)[1].tolist() == [False]
    for order in ([0, 1], [0, 1, 2, 4], [0, 1, 2, -1]):
        with pytest.raises(Exception, match="the order"):
            call("FiniteSums", feeds, 2, **{**attributes, "order": order})


@pytest.mark.parametrize("counts", [(9, 0), (0, 9), (-1, 0), (2**62, 2**62)])
def test_a_check_with_wrong_numbers(counts: tuple[int, int]) -> None:
    with pytest.raises(Exception, match=r"fewer inputs|negative"):
        call("FiniteCheck", {"a": np.ones(1, np.float32)}, 2, sums=counts[0], statistics=counts[1])


@pytest.mark.parametrize("reset", [False, True])
def test_accumulation(reset: bool) -> None:
    rng = np.random.default_rng(3)
    feeds: dict[str, Array] = {"reset": np.array([reset])}
    shapes: tuple[tuple[int, ...], ...] = ((3, 5), (), (0,), (50_000,))
    for i, shape in enumerate(shapes):
        feeds[f"b{i}"] = np.asarray(rng.standard_normal(shape), np.float32)
        feeds[f"g{i}"] = np.asarray(rng.standard_normal(shape), np.float32)
    made = call("AccumulateGradients", feeds, len(shapes), gradients=len(shapes))
    for i, found in enumerate(made):
        own = feeds[f"g{i}"]
        np.testing.assert_array_equal(found, own if reset else feeds[f"b{i}"] + own)


@pytest.mark.parametrize(
    ("changes", "count", "message"),
    [
        ({"g": np.ones(4, np.float32)}, 1, "another size"),
        ({"reset": np.array([1.0], np.float32)}, 1, "single flag"),
        ({"reset": np.array([True, False])}, 1, "single flag"),
        ({}, 2, "fewer inputs"),
        ({}, -1, "fewer inputs"),
        ({}, 2**62, "fewer inputs"),
    ],
)
def test_accumulation_that_does_not_fit(
    changes: Mapping[str, Array], count: int, message: str
) -> None:
    good = {"reset": np.array([True]), "b": np.ones(3, np.float32), "g": np.ones(3, np.float32)}
    with pytest.raises(Exception, match=message):
        call("AccumulateGradients", {**good, **changes}, 1, gradients=count)
