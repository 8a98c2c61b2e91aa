"""Specs of rules/norm.py and rules/batch_norm.py, and comparisons with torch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from onnx import helper
from onnx.reference import ReferenceEvaluator

import gradcheck
import onnxtrain
from gradcheck import Spec, check_emitted, check_spec, ids, run, special_values, vjp
from onnxtrain.errors import ShapeInferenceError
from onnxtrain.offline.autodiff.rules.batch_norm import (
    complete_outputs,
    rewrite_training_batch_norm,
)
from onnxtrain.offline.graph.infer import infer_shapes

LAYER = "LayerNormalization"
RMS = "RMSNormalization"
GROUP = "GroupNormalization"
INSTANCE = "InstanceNormalization"
BATCH = "BatchNormalization"
MEAN_VARIANCE = "MeanVarianceNormalization"

MEAN = np.array([0.5, -1.0, 0.25], np.float32)
VAR = np.array([1.5, 0.5, 2.0], np.float32)

SPECS = [
    Spec(LAYER, [(3, 4), (4,), (4,)]),
    Spec(LAYER, [(2, 3, 4), (4,)], id="no-bias"),
    Spec(LAYER, [(2, 3, 4), (3, 4), (3, 4)], {"axis": 1, "epsilon": 0.1}, id="two-axes"),
    Spec(LAYER, [(2, 3, 4), (2, 3, 4)], {"axis": 0}, id="all-axes"),
    Spec(LAYER, [(2, 3, 4), (3, 4), (3, 4)], {"axis": -2}, outputs=3, id="three-outputs"),
    Spec(LAYER, [(2, 3, 4), (1, 4), (4,)], {"axis": 1}, id="scale-broadcast"),
    Spec(LAYER, [(2, 3, 4), (2, 1, 4), (2, 1, 4)], id="scale-by-sample"),
    Spec(LAYER, [(2, 3, 4), (4,), (2, 1, 4)], id="bias-by-sample"),
    # Mean and InvStdDev are float32 even for float64: too coarse for the second opinion.
    Spec(LAYER, [(2, 3, 4), (4,), (4,)], outputs=3, of=1, wrt=[0], id="mean",
         second_opinion=False),
    Spec(LAYER, [(2, 3, 4), (4,), (4,)], outputs=3, of=2, wrt=[0], id="inv-std",
         second_opinion=False),
    Spec(LAYER, [(2, 3, 4), (3, 4)], {"axis": 1}, outputs=2, of=1, wrt=[0], id="mean-of-two",
         second_opinion=False),
    Spec(RMS, [(3, 4), (4,)], opset=23),
    Spec(RMS, [(2, 3, 4), (3, 4)], {"axis": 1, "epsilon": 0.1}, opset=23, id="two-axes"),
    Spec(RMS, [(2, 3, 4), (1,)], opset=23, id="scale-broadcast"),
    # The definition casts to stash_type, so float64 gives a second opinion only with 11.
    Spec(GROUP, [(2, 4, 3, 2), (4,), (4,)], {"num_groups": 2, "stash_type": 11}, opset=21),
    Spec(GROUP, [(2, 4, 3, 2), (4,), (4,)], {"num_groups": 2, "epsilon": 0.1}, opset=21,
         id="epsilon", second_opinion=False),
    Spec(GROUP, [(2, 6, 3), (6,), (6,)], {"num_groups": 3, "stash_type": 11}, opset=21, id="1d"),
    Spec(GROUP, [(2, 6), (6,), (6,)], {"num_groups": 1, "stash_type": 11}, opset=21,
         id="2d-one-group"),
    Spec(INSTANCE, [(2, 3, 4, 2), (3,), (3,)]),
    Spec(INSTANCE, [(2, 3, 5), (3,), (3,)], {"epsilon": 0.1}, id="1d", opset=22),
    Spec(INSTANCE, [(2, 3, 2, 2, 2), (3,), (3,)], id="3d"),
    # The definition of this operator adds a float32 number: it exists in float32 only.
    Spec(MEAN_VARIANCE, [(2, 3, 4, 2)], {"axes": [0, 2, 3]}, second_opinion=False),
    Spec(MEAN_VARIANCE, [(4, 3)], {"axes": [0]}, id="2d", second_opinion=False),
    Spec(MEAN_VARIANCE, [(2, 3, 4)], {"axes": [-1, 1]}, id="negative-axes",
         second_opinion=False),
    Spec("LpNormalization", [(3, 4)]),
    Spec("LpNormalization", [(2, 3, 4)], {"axis": 0}, id="axis"),
    Spec("LpNormalization", [(2, 3, 4)], {"axis": 1, "p": 1}, id="p1-positive", domain=(0.2, 2)),
    # The reference evaluator sums x instead of |x|.
    Spec("LpNormalization", [(2, 3, 4)], {"axis": 1, "p": 1}, id="p1", away_from=(0,),
         second_opinion=False),
    # The reference evaluator normalizes as many channels as there are samples: five of each here.
    Spec("LRN", [(5, 5, 3, 2)], {"size": 3, "alpha": 0.5}),
    Spec("LRN", [(5, 5, 2, 2)], {"size": 5, "alpha": 0.5, "beta": 0.5, "bias": 2.0}, id="bias"),
    Spec("LRN", [(3, 3, 2, 2)], {"size": 7, "alpha": 0.5}, id="wider-than-channels"),
    Spec(BATCH, [(2, 3, 4, 2), (3,), (3,), MEAN, VAR]),
    Spec(BATCH, [(4, 3), (3,), (3,), MEAN, VAR], {"epsilon": 0.1}, id="2d"),
    Spec(BATCH, [(2, 3, 4), (3,), (3,), MEAN, VAR], id="3d"),
    Spec(BATCH, [(2, 3, 2, 2, 2), (3,), (3,), MEAN, VAR], id="5d", constants=(3, 4)),
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_gradient(spec: Spec) -> None:
    check_spec(spec)


@pytest.mark.parametrize("spec", [s for s in SPECS if s.symbolic], ids=ids)
def test_gradient_with_symbolic_dimensions(spec: Spec) -> None:
    check_spec(spec, symbolic=True)


@pytest.mark.parametrize("symbolic", [False, True])
def test_group_norm_with_a_scale_per_group(monkeypatch: pytest.MonkeyPatch, symbolic: bool) -> None:
    """Opset 18 to 20: onnx's checker calls that deprecated, onnxruntime runs it."""
    monkeypatch.setattr(
        "onnxtrain.offline.frontend.canonical_model.check_structure", lambda model: None
    )
    monkeypatch.setattr(gradcheck, "check_emitted", lambda *models: None)
    shapes = [(2, 4, 3, 2), (2,), (2,)]
    check_spec(
        Spec(GROUP, shapes, {"num_groups": 2}, opset=18, second_opinion=False), symbolic=symbolic
    )


# ---- against torch -----------------------------------------------------------------------------


def sampled(*shapes: tuple[int, ...], seed: int = 0, shift: float = 0.0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal(s) + shift).astype(np.float32) for s in shapes]


def one_node(
    op: str, arrays: Sequence[np.ndarray], attrs: Mapping[str, Any], opset: int = 18,
    outputs: int = 1, symbolic: bool = False,
) -> onnx.ModelProto:  # fmt: skip
    inputs = [
        helper.make_tensor_value_info(
            f"x{i}",
            helper.np_dtype_to_tensor_dtype(a.dtype),
            [f"d{i}_{j}" for j in range(a.ndim)] if symbolic else a.shape,
        )
        for i, a in enumerate(arrays)
    ]
    names = [f"y{i}" for i in range(outputs)]
    kind = helper.np_dtype_to_tensor_dtype(arrays[0].dtype)
    node = helper.make_node(op, [i.name for i in inputs], names, **attrs)
    made = [helper.make_tensor_value_info(n, kind, None) for n in names]
    graph = helper.make_graph([node], "g", inputs, made)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def torch_vjp(
    function: Callable[..., torch.Tensor], arrays: Sequence[np.ndarray], cotangent: np.ndarray
) -> list[np.ndarray]:
    """The gradients by torch, in float64."""
    tensors = [torch.tensor(a.astype(np.float64), requires_grad=True) for a in arrays]
    y = function(*tensors)
    found = torch.autograd.grad(y, tensors, torch.tensor(cotangent.astype(np.float64)))
    return [g.numpy() for g in found]


AGAINST_TORCH = {
    "layer": (LAYER, [(6, 5, 16), (16,), (16,)], {}, 18,
              lambda x, s, b: F.layer_norm(x, (16,), s, b)),
    "layer-two-axes": (LAYER, [(6, 5, 8), (5, 8), (5, 8)], {"axis": 1}, 18,
                       lambda x, s, b: F.layer_norm(x, (5, 8), s, b)),
    "rms": (RMS, [(6, 5, 16), (16,)], {}, 23, lambda x, s: F.rms_norm(x, (16,), s, 1e-5)),
    "group": (GROUP, [(3, 6, 5, 4), (6,), (6,)], {"num_groups": 3}, 21,
              lambda x, s, b: F.group_norm(x, 3, s, b)),
    "instance": (INSTANCE, [(3, 4, 5, 4), (4,), (4,)], {}, 18,
                 lambda x, s, b: F.instance_norm(x, weight=s, bias=b)),
    "lrn": ("LRN", [(2, 7, 3, 3)], {"size": 5, "alpha": 0.7, "beta": 0.8, "bias": 1.5}, 18,
            lambda x: F.local_response_norm(x, 5, 0.7, 0.8, 1.5)),
    "l2": ("LpNormalization", [(3, 4, 5)], {"axis": 1}, 18, lambda x: F.normalize(x, dim=1)),
    "l1": ("LpNormalization", [(3, 4, 5)], {"axis": 2, "p": 1}, 18,
           lambda x: F.normalize(x, p=1, dim=2)),
    "batch": (BATCH, [(3, 4, 5, 2), (4,), (4,), (4,), (4,)], {}, 18,
              lambda x, s, b, m, v: F.batch_norm(x, m.detach(), v.detach(), s, b)),
}  # fmt: skip


@pytest.mark.parametrize("case", AGAINST_TORCH)
def test_gradient_is_that_of_torch(case: str) -> None:
    op, shapes, attrs, opset, function = AGAINST_TORCH[case]
    arrays = sampled(*shapes, shift=3.0)
    (cotangent,) = sampled(shapes[0], seed=1)
    if op == BATCH:
        arrays[4] = np.abs(arrays[4])
    count = min(len(arrays), 3)
    wrt = [f"x{i}" for i in range(count)]
    feeds = {f"x{i}": a for i, a in enumerate(arrays)}
    found = vjp(one_node(op, arrays, attrs, opset), feeds, wrt, cotangent)
    head, tail = arrays[:count], [torch.tensor(a.astype(np.float64)) for a in arrays[count:]]
    wanted = torch_vjp(lambda *head: function(*head, *tail), head, cotangent)
    for name, actual, expected in zip(wrt, found, wanted, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-5, err_msg=name)


def test_lrn_with_an_even_window() -> None:
    """onnxruntime refuses even windows: the reference evaluator runs this one (5 of 5 samples)."""
    arrays = sampled((5, 5, 2, 3))
    (cotangent,) = sampled((5, 5, 2, 3), seed=1)
    model = one_node("LRN", arrays, {"size": 4, "alpha": 0.7})
    extended = onnxtrain.gradient(model, "x0")
    check_emitted(extended)
    _, found = ReferenceEvaluator(extended).run(None, {"x0": arrays[0], "y0_grad": cotangent})
    doubles = one_node("LRN", [arrays[0].astype(np.float64)], {"size": 4, "alpha": 0.7})
    step = 1e-6 * cotangent.astype(np.float64)  # any direction will do
    ahead, behind = (
        ReferenceEvaluator(doubles).run(None, {"x0": arrays[0] + sign * step})[0]
        for sign in (1, -1)
    )
    expected = np.sum(cotangent * (ahead - behind) / 2e-6)
    np.testing.assert_allclose(np.sum(found * cotangent), expected, rtol=1e-5)


def test_a_large_mean_leaves_the_gradient_exact() -> None:
    x, scale, bias = sampled((4, 256), (256,), (256,))
    (cotangent,) = sampled((4, 256), seed=1)
    arrays = [x + 1000, scale, bias]
    feeds = {f"x{i}": a for i, a in enumerate(arrays)}
    found = vjp(one_node(LAYER, arrays, {}), feeds, ["x0", "x1"], cotangent)
    wanted = torch_vjp(lambda x, s, b: F.layer_norm(x, (256,), s, b), arrays, cotangent)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-3, atol=2e-4)
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("p", [1, 2])
def test_lp_norm_of_zero(p: int) -> None:
    special_values("LpNormalization", [[[0.0, 0.0], [0.0, 2.0]]], [[[0, 0], [0.5, 0]]], p=p)


HALF = {
    "layer": (LAYER, [(3, 8), (8,), (8,)], {}, 18),
    "rms": (RMS, [(3, 8), (8,)], {}, 23),
    "group": (GROUP, [(2, 4, 3), (4,), (4,)], {"num_groups": 2}, 21),
    "instance": (INSTANCE, [(2, 4, 3), (4,), (4,)], {}, 22),
    "batch": (BATCH, [(2, 4, 3), (4,), (4,), (4,), (4,)], {}, 18),
    "lp": ("LpNormalization", [(3, 8)], {}, 22),
    "lrn": ("LRN", [(2, 4, 3, 1)], {"size": 3}, 18),
}


@pytest.mark.parametrize("case", HALF)
def test_gradient_in_float16(case: str) -> None:
    op, shapes, attrs, opset = HALF[case]
    arrays = [np.abs(a) for a in sampled(*shapes)]
    (cotangent,) = sampled(shapes[0], seed=1)
    wrt = [f"x{i}" for i in range(len(arrays))]
    halves, wanted = (
        vjp(
            one_node(op, [a.astype(kind) for a in arrays], attrs, opset),
            {f"x{i}": a.astype(kind) for i, a in enumerate(arrays)},
            wrt,
            cotangent.astype(kind),
        )
        for kind in (np.float16, np.float32)
    )
    for half, single in zip(halves, wanted, strict=True):
        assert half.dtype == np.float16
        np.testing.assert_allclose(half.astype(np.float32), single, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("case", HALF)
def test_gradient_in_bfloat16(case: str) -> None:
    """onnxruntime's CPU does not run it; the types must be right all the same."""
    op, shapes, attrs, opset = HALF[case]
    arrays = [a.astype(ml_dtypes.bfloat16) for a in sampled(*shapes)]
    wrt = [f"x{i}" for i in range(len(arrays))]
    check_emitted(onnxtrain.gradient(one_node(op, arrays, attrs, opset), wrt))


def test_batch_norm_of_mixed_types() -> None:
    """Since opset 15 scale and statistics may be float32 beside a float16 input."""
    arrays = [np.abs(a) for a in sampled((2, 4, 3), (4,), (4,), (4,), (4,))]
    (cotangent,) = sampled((2, 4, 3), seed=1)
    wrt = [f"x{i}" for i in range(5)]
    feeds = dict(zip(wrt, arrays, strict=True))
    wanted = vjp(one_node(BATCH, arrays, {}), feeds, wrt, cotangent)
    mixed = [arrays[0].astype(np.float16), *arrays[1:]]
    extended = onnxtrain.gradient(one_node(BATCH, mixed, {}), wrt)
    check_emitted(extended)
    seeds = {"y0_grad": cotangent.astype(np.float16)}
    # onnxruntime has no such kernel: the reference evaluator has.
    found = ReferenceEvaluator(extended).run(None, {**dict(zip(wrt, mixed, strict=True)), **seeds})[
        1:
    ]
    assert [g.dtype for g in found] == [np.float16] + [np.float32] * 4
    for half, single in zip(found, wanted, strict=True):
        np.testing.assert_allclose(half.astype(np.float32), single, rtol=0.02, atol=0.02)


# ---- BatchNormalization in training mode -------------------------------------------------------


def rewritten(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without training mode, stored and loaded in between."""
    loaded = ir.from_proto(model)
    complete_outputs(loaded)
    infer_shapes(loaded)
    rewrite_training_batch_norm(loaded)
    result = ir.to_proto(loaded)
    check_emitted(result)
    assert not any(a.name == "training_mode" for n in result.graph.node for a in n.attribute)
    return result


def training_node(
    arrays: Sequence[np.ndarray], symbolic: bool = False, outputs: int = 3, **attrs: Any
) -> onnx.ModelProto:
    return one_node(
        BATCH, arrays, {"training_mode": 1, **attrs}, outputs=outputs, symbolic=symbolic
    )


TRAINING_SHAPES = [(6, 3), (4, 3, 5), (4, 3, 5, 2), (2, 3, 2, 3, 2)]


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("shape", TRAINING_SHAPES, ids=str)
def test_training_batch_norm(shape: tuple[int, ...], outputs: int, symbolic: bool) -> None:
    arrays = sampled(shape, (3,), (3,), (3,), (3,), shift=2.0)
    (cotangent,) = sampled(shape, seed=1)
    model = rewritten(training_node(arrays, symbolic, outputs, momentum=0.8, epsilon=0.01))
    feeds = {f"x{i}": a for i, a in enumerate(arrays)}
    y, *running = run(model, feeds)
    doubles = [torch.tensor(a.astype(np.float64)) for a in arrays]
    x, scale, bias, mean, var = doubles
    expected = F.batch_norm(x, None, None, scale, bias, training=True, eps=0.01)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    axes = [i for i in range(len(shape)) if i != 1]
    if running:
        now = [x.mean(axes), x.var(axes, correction=0)]
        for actual, old, new in zip(running, (mean, var), now, strict=True):
            np.testing.assert_allclose(actual, 0.8 * old + 0.2 * new, rtol=1e-5)
    found = vjp(model, feeds, ["x0", "x1", "x2"], cotangent, of="y0")
    wanted = torch_vjp(
        lambda x, s, b: F.batch_norm(x, None, None, s, b, training=True, eps=0.01),
        arrays[:3], cotangent,
    )  # fmt: skip
    for name, actual, target in zip("xsb", found, wanted, strict=True):
        np.testing.assert_allclose(actual, target, rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("of", ["y1", "y2"])
def test_running_statistics_have_a_gradient(of: str) -> None:
    arrays = sampled((4, 3, 5), (3,), (3,), (3,), (3,))
    (cotangent,) = sampled((3,), seed=1)
    feeds = {f"x{i}": a for i, a in enumerate(arrays)}
    model = rewritten(training_node(arrays, momentum=0.8))
    (found,) = vjp(model, feeds, ["x0"], cotangent, of=of)

    def statistic(x: torch.Tensor) -> torch.Tensor:
        return 0.2 * (x.mean((0, 2)) if of == "y1" else x.var((0, 2), correction=0))

    np.testing.assert_allclose(
        found, torch_vjp(statistic, arrays[:1], cotangent)[0], rtol=1e-3, atol=1e-6
    )


def test_training_batch_norm_of_unknown_rank() -> None:
    model = training_node([np.zeros((6, 3), np.float32), MEAN, MEAN, MEAN, VAR])
    model.graph.input[0].type.tensor_type.ClearField("shape")
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    with pytest.raises(ShapeInferenceError, match=r"rank of 'x0' is not known.*value_info"):
        onnxtrain.gradient(model, ["x0"], of="y0")


def test_training_batch_norm_is_differentiated_at_once() -> None:
    """The gradient does not go through the operators that compute the statistics."""
    arrays = sampled((4, 3, 5), (3,), (3,), (3,), (3,))
    model = rewritten(training_node(arrays, outputs=1))
    extended = onnxtrain.gradient(model, ["x0", "x1", "x2"])
    new = extended.graph.node[len(model.graph.node) :]
    assert [n.op_type for n in new].count("ReduceSum") == 2
    assert not any(n.op_type in ("Expand", "ReduceMean", "Sum") for n in new)


def test_training_batch_norm_keeps_the_order_of_the_graph() -> None:
    """Names, order and the nodes around it survive, in a subgraph as well."""
    branch = """
        agraph (float[4, 3] x, float[3] s, bool which) => (float[4, 3] y, float[3] m) {
            a = Relu(x)
            y, m = If(which) <
                then_branch = then () => (float[4, 3] b, float[3] bm) {
                    b, bm, unused = BatchNormalization<training_mode=1>(a, s, s, s, s)
                },
                else_branch = otherwise () => (float[4, 3] c, float[3] cm) {
                    c = Neg(a)
                    cm = Identity(s)
                }
            >
        }
    """
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]> {branch}')
    new = rewritten(model)
    x, s = sampled((4, 3), (3,))
    y, m = run(new, {"x": x, "s": s, "which": np.array(True)})
    a = torch.relu(torch.tensor(x))
    expected = F.batch_norm(a, None, None, torch.tensor(s), torch.tensor(s), training=True)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(m, 0.9 * s + 0.1 * a.numpy().mean(0), rtol=1e-5)


def test_training_batch_norm_in_float16() -> None:
    arrays = sampled((4, 3, 5), (3,), (3,), (3,), (3,))
    (cotangent,) = sampled((4, 3, 5), seed=1)
    halves = [a.astype(np.float16) for a in arrays]
    model = rewritten(training_node(halves, outputs=3))
    feeds = {f"x{i}": a for i, a in enumerate(halves)}
    found = vjp(model, feeds, ["x0", "x1"], cotangent.astype(np.float16), of="y0")
    wanted = torch_vjp(
        lambda x, s, b: F.batch_norm(x, None, None, s, b, training=True), arrays[:3], cotangent
    )
    for half, single in zip(found, wanted, strict=False):
        assert half.dtype == np.float16
        np.testing.assert_allclose(half.astype(np.float32), single, rtol=0.02, atol=0.02)
