"""Fused operators of onnxruntime: the plain nodes compute what the fused kernel does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest

import onnxtrain
from fusing import Array, Case, bits, check, expanded, f, feeds_of, h, ints, one_node, result, run
from onnxtrain.offline.autodiff.registry import refusal


def activations(op: str, inputs: Sequence[Array], given: Mapping[str, Mapping[str, Any]]) -> list:
    return [Case(op, inputs, {"activation": a, **p}, id=a) for a, p in given.items()]


IMAGE, KERNEL = f(2, 3, 5, 5), f(4, 3, 3, 3)
X, W, B = f(2, 3, 8), f(8, 24), f(24)
TWO = {"num_heads": 2}
SELF = [f(2, 3, 8)] * 3
PAST = [f(2, 2, 4, 4), f(2, 2, 4, 4)]
IDS = ints([[1, 2, 0], [0, 0, 1]])
EMBED = [f(4, 5), f(3, 5), f(3, 5), f(5), f(5)]  # words, positions, segments, gamma, beta


def n_bits(bits_: int, columns: int, *more: Array | None, id: str) -> Case:
    blocks = -(-columns // 16)
    inputs = [f(2, 3, columns), bits(6, blocks, 2 * bits_), f(6, blocks), *more]
    attrs = {"bits": bits_, "block_size": 16, "K": columns, "N": 6}
    # Scales are fed: a node with constant ones stays (tests/rules/test_quantized_weights.py).
    constants = [i for i in (1, *range(3, len(inputs))) if inputs[i] is not None]
    return Case("MatMulNBits", inputs, attrs, id=id, constants=constants, tol=1e-4)


CASES = [
    Case("Gelu", [f(2, 3, 4)]),
    Case("BiasGelu", [f(2, 3, 4), f(4)]),
    Case("FastGelu", [f(2, 3, 4)]),
    Case("FastGelu", [f(2, 3, 4), f(4)], id="bias"),
    Case("QuickGelu", [f(2, 3, 4)]),
    Case("QuickGelu", [f(2, 3, 4)], {"alpha": 1.0}, id="silu"),
    Case("ScaledSiLU", [f(2, 3)], {"alpha": 0.7}),
    Case("ScaledSiLU", [f(2, 3), f()], id="scale"),
    Case("GatedAdd", [f(2, 3), f(2, 3), f(2, 1)]),
    Case("FusedMatMul", [f(2, 3, 4), f(2, 4, 5)], {"alpha": 0.5}),
    Case("FusedMatMul", [f(2, 4, 3), f(2, 5, 4)], {"transA": 1, "transB": 1}, id="both"),
    Case("FusedMatMul", [f(3, 2, 5), f(2, 5, 4)], {"transBatchA": 1}, id="batch-a"),
    Case("FusedMatMul", [f(5, 2, 3), f(2, 5, 4)], {"transBatchA": 1, "transA": 1}, id="both-a"),
    Case("FusedMatMul", [f(2, 3, 5), f(5, 2, 4)], {"transBatchB": 1}, id="batch-b"),
    Case("FusedMatMul", [f(2, 3, 5), f(4, 2, 5)], {"transBatchB": 1, "transB": 1}, id="both-b"),
    Case("FusedMatMul", [f(5), f(5, 4)], {"transA": 1}, id="vector"),
    Case("TransposeMatMul", [f(4, 3), f(4, 5)], {"transA": 1}),
    *activations("FusedConv", [IMAGE, KERNEL, f(4)], {
        "Relu": {}, "Tanh": {}, "Sigmoid": {}, "HardSwish": {},
        "LeakyRelu": {"activation_params": [0.1]},
        "Clip": {"activation_params": [-0.5, 0.5]},
        "HardSigmoid": {"activation_params": [0.3, 0.4]},
    }),
    Case("FusedConv", [IMAGE, KERNEL, f(4), f(2, 4, 3, 3)], {"activation": "Relu"}, id="sum"),
    Case("FusedConv", [f(2, 4, 5, 5), f(4, 2, 3, 3), None, f(2, 4, 2, 2)],
         {"activation": "Relu", "group": 2, "strides": [2, 2]}, id="sum-without-bias"),
    Case("FusedConv", [IMAGE, KERNEL], {"auto_pad": "SAME_UPPER", "activation": "Relu"},
         id="auto-pad"),
    *activations("FusedGemm", [f(3, 2), f(2, 4), f(4)], {
        "Relu": {}, "Tanh": {}, "Sigmoid": {}, "Softplus": {}, "Softsign": {},
        "LeakyRelu": {"activation_alpha": 0.3},
        "Elu": {"activation_alpha": 2.0},
        "Celu": {"activation_alpha": 0.3},
        "Selu": {"activation_alpha": 1.5, "activation_gamma": 1.1},
        "ThresholdedRelu": {"activation_alpha": 0.3},
        "HardSigmoid": {"activation_alpha": 0.3, "activation_beta": 0.4},
    }),
    Case("FusedGemm", [f(2, 3), f(4, 2), f(4)],
         {"activation": "Relu", "transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0}, id="scaled"),
    Case("FusedGemm", [f(3, 2), f(2, 4)], {"activation": "Relu"}, id="no-bias"),
    *(n_bits(b, k, id=f"{b}-{k}") for b in (2, 4, 8) for k in (32, 40)),
    n_bits(4, 40, bits(6, 2), None, f(6), id="zero-points-and-bias"),
    n_bits(2, 40, bits(6, 1), id="zero-points-of-2-bits"),
    n_bits(4, 32, f(6, 2), id="float-zero-points"),
    Case("SkipLayerNormalization", [f(2, 3, 4), f(2, 3, 4), f(4), f(4), f(4)],
         outputs=["y", "mean", "inv", "sum"]),
    Case("SkipLayerNormalization", [f(2, 3, 4), f(3, 4), f(4)], id="broadcast"),
    Case("SkipLayerNormalization", [f(2, 3, 4), f(1, 3, 4), f(4), None, f(4)],
         {"epsilon": 0.1}, outputs=["y", "", "", "sum"], id="bias-without-beta"),
    Case("SkipLayerNormalization", [h(2, 3, 4), h(2, 3, 4), h(4), h(4)], id="half", tol=1e-2),
    Case("SkipSimplifiedLayerNormalization", [f(2, 3, 4), f(2, 3, 4), f(4), f(4)],
         outputs=["y", "mean", "inv", "sum"]),
    Case("SkipSimplifiedLayerNormalization", [f(3, 4), f(3, 4), f(4)], {"epsilon": 0.1}, id="2d"),
    Case("SkipSimplifiedLayerNormalization", [h(3, 4), h(3, 4), h(4)], id="half", tol=1e-2),
    Case("SimplifiedLayerNormalization", [f(2, 3, 4), f(4)], domain=""),
    Case("SimplifiedLayerNormalization", [f(2, 3, 4), f(3, 4)], {"axis": 1, "epsilon": 0.1},
         domain="", outputs=["y", "inv"], id="axis"),
    Case("SimplifiedLayerNormalization", [h(2, 3, 4), h(4)], domain="", id="half", tol=1e-2),
    Case("GatedRMSNorm", [f(2, 3, 8), f(4), f(2, 3, 8)]),
    Case("GatedRMSNorm", [f(2, 3, 8), f(8), f(2, 3, 8)], {"activation": "sigmoid"}, id="sigmoid"),
    Case("EmbedLayerNormalization", [IDS, IDS, *EMBED, ints([[1, 0, 1], [1, 1, 0]])],
         outputs=["y", "mask_index", "sum"], constants=[2, 3, 4, 5, 6]),
    Case("EmbedLayerNormalization",
         [IDS, None, *EMBED[:2], None, *EMBED[3:], None, ints([[2, 1, 0]])], {"epsilon": 0.1},
         outputs=["y", "mask_index", "sum"], constants=[2, 3, 5, 6], id="positions"),
    Case("EmbedLayerNormalization", [IDS, None, *EMBED[:2], None, *EMBED[3:]],
         {"mask_index_type": 0}, constants=[2, 3, 5, 6], id="words-only"),
    Case("Trilu", [f(3, 4)]),
    Case("Trilu", [f(3, 4), ints(1, np.int64)], {"upper": 0}, id="lower"),
    Case("GatherND", [f(3, 4), ints([[0, 1], [2, 3]])]),
    Case("Range", [ints([2]), ints(7)]),
    Case("Range", [np.array(v, np.float32) for v in (0.3, 4.0, 0.5)], id="float"),
    Case("ExpandDims", [f(2, 3), ints(1)], constants=[1]),
    Case("Pad", [f(2, 3), ints([[1, 0, 0, 2]], np.int64), f(1)]),
    Case("Pad", [f(2, 3), ints([1, 0, 0, 2], np.int64)], {"mode": "reflect"}, id="reflect"),
    *(
        Case("GridSample", [f(1, 2, 4, 4), f(1, 3, 3, 2) / 2], {"mode": mode}, id=mode)
        for mode in ("bilinear", "nearest", "bicubic")
    ),
    Case("GridSample", [f(1, 2, 4, 4), f(1, 3, 3, 2) / 2],
         {"mode": "bicubic", "align_corners": 1, "padding_mode": "border"}, opset=20, id="opset20"),
]  # fmt: skip


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_expansion_computes_what_the_kernel_does(case: Case, symbolic: bool) -> None:
    check(case, symbolic)


# ---- what the CPU has no kernel for: against numpy, or another form of the same ------------------


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def fast_gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu(x: Array) -> Array:
    return run(one_node(Case("Gelu", [x])), {"x0": x})[0]


def group_norm(x: Array, groups: int) -> Array:
    rows = x.reshape(len(x), groups, -1)
    rows = (rows - rows.mean(-1, keepdims=True)) / np.sqrt(rows.var(-1, keepdims=True) + 1e-5)
    return rows.reshape(x.shape)


def conv(*inputs: Array, **attrs: Any) -> Array:
    return run(one_node(Case("Conv", inputs, attrs, domain="")), feeds_of(Case("", inputs)))[0]


A, C = f(2, 3, 8), f(8)
LAST = IMAGE.transpose(0, 2, 3, 1)
S4, SKIP = f(2, 6, 4, 4), f(2, 6)
KERNELLESS = {
    "BiasAdd": (Case("BiasAdd", [A, C, A]), A + C + A),
    "BiasSplitGelu": (Case("BiasSplitGelu", [A, C]), (A + C)[..., :4] * gelu((A + C)[..., 4:])),
    "GemmFastGelu": (Case("GemmFastGelu", [A, W, B]), fast_gelu(A @ W + B)),
    "FusedMatMulActivation": (
        Case("FusedMatMulActivation", [A, W], {"activation": "Relu", "alpha": 0.5}),
        np.maximum(A @ W * 0.5, 0),
    ),
    "BiasSoftmax": (
        Case("BiasSoftmax", [f(2, 3, 4), np.ones((1, 3, 4), np.float32)],
             {"axis": 2, "is_inner_broadcast": 0}),
        None,
    ),
    "BiasDropout": (Case("BiasDropout", [A, C, A]), A + C + A),
    "TorchEmbedding": (Case("TorchEmbedding", [C.reshape(4, 2), ints([3, 0], np.int64)]),
                       C.reshape(4, 2)[[3, 0]]),
    "GroupNorm": (
        Case("GroupNorm", [S4.transpose(0, 2, 3, 1), f(6) * 0 + 2, f(6) * 0 + 1],
             {"groups": 3, "activation": 0}),
        (group_norm(S4, 3) * 2 + 1).transpose(0, 2, 3, 1),
    ),
    "SkipGroupNorm": (
        Case("SkipGroupNorm", [S4, f(6) * 0 + 1, f(6) * 0, SKIP],
             {"groups": 3, "activation": 1, "channels_last": 0}),
        (g := group_norm(S4 + SKIP[:, :, None, None], 3)) / (1 + np.exp(-g)),
    ),
    "NhwcFusedConv": (
        Case("NhwcFusedConv", [LAST, KERNEL, f(4)], {"activation": "Relu"}),
        None,
    ),
    "NhwcConv": (
        Case("NhwcConv", [LAST, KERNEL.transpose(0, 2, 3, 1)[:, :2, :2]]),
        conv(IMAGE, KERNEL[:, :, :2, :2]).transpose(0, 2, 3, 1),
    ),
}  # fmt: skip
_nhwc, _softmax = KERNELLESS["NhwcFusedConv"][0], KERNELLESS["BiasSoftmax"][0]
KERNELLESS["NhwcFusedConv"] = (
    _nhwc, np.maximum(conv(IMAGE, KERNEL, _nhwc.inputs[2]).transpose(0, 2, 3, 1), 0),
)  # fmt: skip
KERNELLESS["BiasSoftmax"] = (_softmax, softmax(_softmax.inputs[0] + 1))


@pytest.mark.parametrize("name", KERNELLESS)
def test_operators_without_a_kernel_on_the_cpu(name: str) -> None:
    case, wanted = KERNELLESS[name]
    np.testing.assert_allclose(result(case), wanted, rtol=1e-4, atol=1e-5)


# ---- the pass -----------------------------------------------------------------------------------


def parsed(text: str) -> onnx.ModelProto:
    header = '<ir_version: 10, opset_import: ["": 18, "com.microsoft": 1, "ai.onnx.ml": 3]>'
    return onnx.parser.parse_model(header + text)


CHAIN = parsed(
    """
    g (float[N, 4] x, float[4, 4] w) => (float[N, N] y, float[N, 4] hidden, float[N, N] z) {
        hidden = com.microsoft.Gelu (x)
        a = MatMul (hidden, w)
        y = com.microsoft.FusedMatMul <transB = 1> (a, hidden)
        z = Relu (y)
    }
    """
)
BRANCHES = parsed(
    """
    g (bool c, float[N, 4] x) => (float[N, 4] y) {
        s = com.microsoft.QuickGelu (x)
        y = If (c) <
            then_branch = t () => (a) { a = com.microsoft.Gelu (s) },
            else_branch = e () => (b) {
                inner = com.microsoft.FusedMatMul <transB = 1> (s, x)
                b = com.microsoft.FusedMatMul (inner, x)
            }
        >
    }
    """
)


def test_names_and_outputs_survive_in_the_middle_of_a_graph() -> None:
    plain = expanded(CHAIN)
    assert [o.name for o in plain.graph.output] == ["y", "hidden", "z"]
    assert {"hidden", "a", "y", "z"} <= {v for n in plain.graph.node for v in n.output}
    feeds = {"x": f(3, 4), "w": f(4, 4)}
    for actual, wanted in zip(run(plain, feeds), run(CHAIN, feeds), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("taken", [True, False])
def test_branches_are_expanded(taken: bool) -> None:
    plain = expanded(BRANCHES)
    assert "com.microsoft" not in {o.domain for o in plain.opset_import}
    feeds = {"c": np.array(taken), "x": f(3, 4)}
    np.testing.assert_allclose(run(plain, feeds)[0], run(BRANCHES, feeds)[0], rtol=1e-5, atol=1e-5)


def test_gradient_passes_fused_operators() -> None:
    feeds = {"x": f(3, 4), "w": f(4, 4)}
    model = onnxtrain.gradient(CHAIN, ["x", "w"], of="z")
    assert all(n.domain == "" for n in model.graph.node)
    ct = np.ones((3, 3), np.float32)
    dx, dw = run(model, {**feeds, "z_grad": ct})[-2:]
    for name, gradient in (("x", dx), ("w", dw)):
        t, step = f(*feeds[name].shape), 1e-2
        ahead, behind = (
            run(CHAIN, {**feeds, name: feeds[name] + sign * step * t})[2].sum() for sign in (1, -1)
        )
        assert (gradient * t).sum() == pytest.approx((ahead - behind) / (2 * step), rel=1e-2)


KEPT = {
    "cache in one buffer": Case("MultiHeadAttention", [*SELF, None, None, None, *PAST, ints([4])],
                                TWO),
    "unknown activation": Case("FusedConv", [IMAGE, KERNEL], {"activation": "Swoosh"}),
    "ambiguous layout": Case("NhwcConv", [f(1, 5, 5, 3), f(3, 3, 3, 3)]),
    "several axes": Case("BiasSoftmax", [f(2, 3, 4), f(2, 3, 4)],
                         {"axis": 1, "is_inner_broadcast": 0}),
    "group indices": Case("MatMulNBits", [f(2, 32), bits(6, 2, 8), f(6, 2), None, ints([0] * 32)],
                          {"bits": 4, "block_size": 16, "K": 32, "N": 6}),
}  # fmt: skip


@pytest.mark.parametrize("case", KEPT.values(), ids=KEPT)
def test_forms_that_are_not_covered_stay_and_say_why(case: Case) -> None:
    model = one_node(case, typed=True)
    assert [n.op_type for n in expanded(model).graph.node] == [case.op]
    with pytest.raises(onnxtrain.errors.MissingGradientError, match="it is not expanded with"):
        onnxtrain.gradient(model, "x0", of="y")


def test_layouts_of_one_processor_are_refused_with_the_way_out() -> None:
    reason = refusal("ReorderInput", "com.microsoft.nchwc")
    assert reason is not None
    assert "ORT_ENABLE_EXTENDED" in reason
