"""Fused operators of onnxruntime: the plain nodes compute what the fused kernel does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from onnxtrain.autodiff.fused import expand_fused
from onnxtrain.autodiff.registry import refusal

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)


def f(*shape: int) -> Array:
    return np.asarray(RNG.standard_normal(shape), np.float32)


def h(*shape: int) -> Array:
    return f(*shape).astype(np.float16)


def ints(values: Any, dtype: Any = np.int32) -> Array:
    return np.array(values, dtype)


def bits(*shape: int) -> Array:
    return RNG.integers(0, 256, shape).astype(np.uint8)


def zeros_and_ones(*shape: int) -> Array:
    return RNG.integers(0, 2, shape).astype(np.int32)


@dataclass(frozen=True)
class Case:
    """One fused node. `outputs` names those that are asked for; "" is one that is left out."""

    op: str
    inputs: Sequence[Array | None]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    outputs: Sequence[str] = ("y",)
    constants: Sequence[int] = ()  # inputs that are initializers
    domain: str = "com.microsoft"
    opset: int = 18
    tol: float = 1e-5

    def __str__(self) -> str:
        return f"{self.op}-{self.id}" if self.id else self.op


def activations(op: str, inputs: Sequence[Array], given: Mapping[str, Mapping[str, Any]]) -> list:
    return [Case(op, inputs, {"activation": a, **p}, id=a) for a, p in given.items()]


IMAGE, KERNEL = f(2, 3, 5, 5), f(4, 3, 3, 3)
X, W, B = f(2, 3, 8), f(8, 24), f(24)
TWO = {"num_heads": 2}
QKV = [f(2, 3, 8), f(2, 5, 8), f(2, 5, 8)]
SELF = [f(2, 3, 8)] * 3
PAST = [f(2, 2, 4, 4), f(2, 2, 4, 4)]
IDS = ints([[1, 2, 0], [0, 0, 1]])
EMBED = [f(4, 5), f(3, 5), f(3, 5), f(5), f(5)]  # words, positions, segments, gamma, beta
ROTARY = [ints([[0, 1, 2], [3, 4, 5]], np.int64), f(10, 4), f(10, 4)]
PARTIAL = {"num_heads": 2, "rotary_embedding_dim": 4}
FEW = [ROTARY[0], f(10, 2), f(10, 2)]
GQA = {"num_heads": 4, "kv_num_heads": 2}
GROUPS = [f(2, 4, 64), f(2, 4, 32), f(2, 4, 32), None, None, ints([3, 3]), ints(4)]
TURN = [f(16, 8), f(16, 8)]
STEP = [f(2, 1, 64), f(2, 1, 32), f(2, 1, 32), f(2, 2, 5, 16), f(2, 2, 5, 16)]
NEXT = [f(1, 3, 64), f(1, 3, 32), f(1, 3, 32), f(1, 2, 5, 16), f(1, 2, 5, 16)]


def n_bits(bits_: int, columns: int, *more: Array | None, id: str) -> Case:
    blocks = -(-columns // 16)
    inputs = [f(2, 3, columns), bits(6, blocks, 2 * bits_), f(6, blocks), *more]
    attrs = {"bits": bits_, "block_size": 16, "K": columns, "N": 6}
    constants = [i for i in range(1, len(inputs)) if inputs[i] is not None]
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
    Case("Attention", [X, W, B], TWO),
    Case("Attention", [X, W, B], {**TWO, "scale": 0.3}, outputs=["y", "present"], id="scale"),
    Case("Attention", [X, W, B], {**TWO, "unidirectional": 1}, id="causal"),
    Case("Attention", [X, f(8, 20), f(20)], {**TWO, "qkv_hidden_sizes": [8, 8, 4]}, id="narrow-v"),
    Case("Attention", [X, W, B, ints([[1, 0, 1], [0, 0, 0]])], TWO, id="mask"),
    Case("Attention", [X, W, B, zeros_and_ones(2, 3, 3)], TWO, id="mask-3d"),
    Case("Attention", [X, W, B, ints([2, 0])], {**TWO, "unidirectional": 1}, id="lengths"),
    Case("Attention", [X, W, B, ints([2, 3, 1, 0])], TWO, id="bounds"),
    Case("Attention", [X, W, B, None, None, f(1, 2, 3, 3)], TWO, id="bias"),
    Case("Attention", [X, W, B, np.ones((2, 8), np.int32), f(2, 2, 2, 5, 4)],
         {**TWO, "unidirectional": 1, "mask_filter_value": -3.0}, outputs=["y", "present"],
         id="past"),
    Case("MultiHeadAttention", QKV, TWO),
    Case("MultiHeadAttention", [*QKV, f(24)], TWO, id="bias"),
    Case("MultiHeadAttention", [*QKV[:2], f(2, 5, 4), f(20)], TWO, id="narrow-v"),
    Case("MultiHeadAttention", [*QKV, None, ints([[1, 0, 1, 1, 0], [0] * 5])], TWO, id="padding"),
    Case("MultiHeadAttention", [*QKV, None, ints([2, 4])], TWO, id="lengths"),
    Case("MultiHeadAttention", [*QKV, None, zeros_and_ones(2, 3, 5)], TWO, id="mask-3d"),
    Case("MultiHeadAttention", [*QKV, None, None, f(1, 2, 3, 5)], {**TWO, "scale": 0.2}, id="add"),
    Case("MultiHeadAttention", [*SELF, f(24), None, None, *PAST], {**TWO, "unidirectional": 1},
         outputs=["y", "k", "v"], id="past"),
    Case("MultiHeadAttention", [QKV[0], f(2, 2, 5, 4), f(2, 2, 5, 4)], TWO, id="split-kv"),
    *(
        Case("RotaryEmbedding", inputs, {**attrs, "interleaved": i}, id=f"{id}-{i}")
        for i in (0, 1)
        for id, inputs, attrs in [
            ("3d", [f(2, 3, 16), *ROTARY], {}),
            ("4d", [f(2, 2, 3, 8), *ROTARY], {}),
            ("3d-offset", [f(2, 3, 16), ints([2], np.int64), *ROTARY[1:]], {}),
            ("4d-offset", [f(2, 2, 3, 8), ints([2], np.int64), *ROTARY[1:]], {"scale": 2.0}),
            ("3d-partial", [f(2, 3, 16), *FEW], PARTIAL),
            ("4d-partial", [f(2, 2, 3, 8), *FEW], PARTIAL),
        ]
    ),
    *(
        Case("GroupQueryAttention", inputs, {**GQA, **attrs}, outputs=["y", "k", "v"], id=id)
        for id, inputs, attrs in [
            ("prompt", GROUPS, {}),
            ("packed", [f(2, 4, 128), None, None, *GROUPS[3:]], {}),
            ("rotary", [*GROUPS, *TURN], {"do_rotary": 1}),
            ("rotary-interleaved", [*GROUPS, *TURN], {"do_rotary": 1, "rotary_interleaved": 1}),
            ("positions", [*GROUPS, *TURN, ints([[2, 3, 4, 5], [0, 1, 2, 3]], np.int64)],
             {"do_rotary": 1}),
            ("softcap", GROUPS, {"softcap": 1.0, "scale": 0.2}),
            ("window", GROUPS, {"local_window_size": 2}),
            ("smooth", GROUPS, {"smooth_softmax": 1}),
            ("sink", [*GROUPS, None, None, None, None, f(4)], {}),
            ("bias", [*GROUPS, None, None, None, f(2, 4, 4, 4)], {"softcap": 0.5}),
            ("both-ways", GROUPS, {"causal": 0}),
            ("step", [*STEP, ints([5, 5]), ints(6)], {}),
            ("step-window", [*STEP, ints([5, 5]), ints(6)], {"local_window_size": 3}),
            ("step-positions", [*STEP, ints([5, 5]), ints(6), *TURN, ints([[9], [7]], np.int64)],
             {"do_rotary": 1}),
            ("steps", [*NEXT, ints([7]), ints(8), *TURN], {"do_rotary": 1}),
            ("empty-past", [*NEXT[:3], f(1, 2, 0, 16), f(1, 2, 0, 16), ints([2]), ints(3), *TURN],
             {"do_rotary": 1}),
        ]
    ),
    Case("GroupQueryAttention", [h(2, 4, 64), h(2, 4, 32), h(2, 4, 32), *GROUPS[3:]], GQA,
         outputs=["y", "k", "v"], id="half", tol=1e-2),
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
    fused = one_node(case, symbolic)
    plain = expanded(fused)
    assert all(node.domain == "" for node in plain.graph.node)
    assert [o.name for o in plain.graph.output] == [o.name for o in fused.graph.output]
    feeds = feeds_of(case)
    for actual, wanted in zip(run(plain, feeds), run(fused, feeds), strict=True):
        assert actual.dtype == wanted.dtype
        np.testing.assert_allclose(actual, wanted, rtol=case.tol, atol=case.tol)


def one_node(case: Case, symbolic: bool = False, typed: bool = False) -> onnx.ModelProto:
    names = ["" if a is None else f"x{i}" for i, a in enumerate(case.inputs)]
    node = helper.make_node(
        case.op, names, case.outputs, name="node", domain=case.domain, **case.attrs
    )
    inputs = [
        helper.make_tensor_value_info(
            f"x{i}",
            helper.np_dtype_to_tensor_dtype(a.dtype),
            [f"d{i}_{j}" for j in range(a.ndim)] if symbolic else a.shape,
        )
        for i, a in enumerate(case.inputs)
        if a is not None and i not in case.constants
    ]
    return helper.make_model(
        helper.make_graph(
            [node], "graph", inputs,
            [helper.make_tensor_value_info(o, TensorProto.FLOAT, None) for o in case.outputs if o]
            if typed
            else [helper.make_empty_tensor_value_info(o) for o in case.outputs if o],
            [numpy_helper.from_array(case.inputs[i], f"x{i}") for i in case.constants],
        ),
        opset_imports=[
            helper.make_opsetid("", case.opset), helper.make_opsetid("com.microsoft", 1)
        ],
        ir_version=10,
    )  # fmt: skip


def feeds_of(case: Case) -> dict[str, Array]:
    return {
        f"x{i}": a
        for i, a in enumerate(case.inputs)
        if a is not None and i not in case.constants
    }


def expanded(model: onnx.ModelProto) -> onnx.ModelProto:
    loaded = ir.from_proto(model)
    expand_fused(loaded)
    proto = ir.to_proto(loaded)
    assert {o.domain for o in proto.opset_import} == {
        "", *(n.domain for n in proto.graph.node)
    }  # fmt: skip
    return proto


def run(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    """Run without optimization: onnxruntime would fuse again what was just expanded."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    wanted = {i.name for i in session.get_inputs()}
    return session.run(None, {k: v for k, v in feeds.items() if k in wanted})


# ---- what the CPU has no kernel for: against numpy, or another form of the same ------------------


def result(case: Case) -> Array:
    return run(expanded(one_node(case)), feeds_of(case))[0]


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def fast_gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu(x: Array) -> Array:
    return run(one_node(Case("Gelu", [x])), {"x0": x})[0]


def group_norm(x: Array, groups: int) -> Array:
    n, c = x.shape[:2]
    rows = x.reshape(n, groups, -1)
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


def test_packed_attention_equals_unpacked() -> None:
    q, k, v = (f(2, 3, 2, 1, 4) for _ in range(3))
    flat = [x.reshape(2, 3, 8) for x in (q, k, v)]
    wanted = run(one_node(Case("MultiHeadAttention", flat, TWO)), dict(zip(
        ("x0", "x1", "x2"), flat, strict=True)))[0]  # fmt: skip
    whole = Case("MultiHeadAttention", [np.concatenate([q, k, v], 3)], TWO)
    half = Case("MultiHeadAttention", [flat[0], np.concatenate([k, v], 3)], TWO)
    np.testing.assert_allclose(result(whole), wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(result(half), wanted, rtol=1e-5, atol=1e-5)


def test_attention_without_a_bias_and_with_a_mask_for_longer_sequences() -> None:
    # onnxruntime's CPU kernel crashes without a bias, and has no mask of four axes
    mask = np.tril(np.ones((2, 1, 6, 6), np.int32))
    actual = result(Case("Attention", [X, W, None, mask], TWO))
    zero = np.zeros(24, np.float32)
    causal = Case("Attention", [X, W, zero], {**TWO, "unidirectional": 1})
    wanted = run(one_node(causal), feeds_of(causal))[0]
    np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)


def test_sequences_of_different_length_in_a_cache() -> None:
    # what lies behind the end of a sequence is not specified
    prompt = Case("GroupQueryAttention", [*GROUPS[:5], ints([2, 3]), ints(4)], GQA)
    step = Case("GroupQueryAttention", [*STEP, ints([3, 5]), ints(6), *TURN],
                {**GQA, "do_rotary": 1}, outputs=["y", "k", "v"])  # fmt: skip
    actual, wanted = result(prompt), run(one_node(prompt), feeds_of(prompt))[0]
    np.testing.assert_allclose(actual[0, :3], wanted[0, :3], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(actual[1], wanted[1], rtol=1e-5, atol=1e-5)
    actual = run(expanded(one_node(step)), feeds_of(step))
    wanted = run(one_node(step), feeds_of(step))
    np.testing.assert_allclose(actual[0], wanted[0], rtol=1e-5, atol=1e-5)
    for a, w in zip(actual[1:], wanted[1:], strict=True):
        np.testing.assert_allclose(a[0, :, :4], w[0, :, :4], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(a[1], w[1], rtol=1e-5, atol=1e-5)


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
    np.testing.assert_allclose(
        run(plain, feeds)[0], run(BRANCHES, feeds)[0], rtol=1e-5, atol=1e-5
    )


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
