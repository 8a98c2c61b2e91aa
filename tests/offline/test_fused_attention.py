"""Attention of onnxruntime: the plain nodes compute what the fused kernel does."""

import numpy as np
import pytest

from fusing import (
    Case,
    check,
    expanded,
    f,
    feeds_of,
    h,
    ints,
    one_node,
    result,
    run,
    zeros_and_ones,
)

X, W, B = f(2, 3, 8), f(8, 24), f(24)
TWO = {"num_heads": 2}
QKV = [f(2, 3, 8), f(2, 5, 8), f(2, 5, 8)]
SELF = [f(2, 3, 8)] * 3
PAST = [f(2, 2, 4, 4), f(2, 2, 4, 4)]
ROTARY = [ints([[0, 1, 2], [3, 4, 5]], np.int64), f(10, 4), f(10, 4)]
PARTIAL = {"num_heads": 2, "rotary_embedding_dim": 4}
FEW = [ROTARY[0], f(10, 2), f(10, 2)]
GQA = {"num_heads": 4, "kv_num_heads": 2}
GROUPS = [f(2, 4, 64), f(2, 4, 32), f(2, 4, 32), None, None, ints([3, 3]), ints(4)]
TURN = [f(16, 8), f(16, 8)]
STEP = [f(2, 1, 64), f(2, 1, 32), f(2, 1, 32), f(2, 2, 5, 16), f(2, 2, 5, 16)]
NEXT = [f(1, 3, 64), f(1, 3, 32), f(1, 3, 32), f(1, 2, 5, 16), f(1, 2, 5, 16)]
CASES = [
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
]  # fmt: skip


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_expansion_computes_what_the_kernel_does(case: Case, symbolic: bool) -> None:
    check(case, symbolic)


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
