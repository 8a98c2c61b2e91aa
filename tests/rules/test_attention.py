"""Specs of rules/attention.py, and of operators next to it that their definitions differentiate."""

import numpy as np
import pytest
from gradcheck import Spec, check_spec, ids, run

Q, KV = (2, 4, 3, 6), (2, 2, 5, 6)  # batch, heads, length, size
FLAT = [(2, 3, 24), (2, 5, 12), (2, 5, 12)]
HEADS = {"q_num_heads": 4, "kv_num_heads": 2}
SAME = [(2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 3)]
MASK = np.array([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], bool)
COS, SIN = (2, 3, 4), (2, 3, 4)
TABLE = [(10, 4), (10, 4), np.array([[0, 1, 2], [7, 1, 1]])]


def attention(id: str, inputs, opset: int = 23, **fields) -> Spec:
    # domain: probabilities far from 0 and 1, so that finite differences in float32 are good
    return Spec(
        "Attention", inputs, id=id, opset=opset, expanded=True, domain=(-1.0, 1.0), **fields
    )


def rotary(id: str, inputs, **attrs) -> Spec:
    # second opinion: the operator is not defined for float64
    return Spec(
        "RotaryEmbedding", inputs, attrs, id=id, opset=23, expanded=True, eps=1.0,
        second_opinion=False,
    )  # fmt: skip


SPECS = [
    attention("plain", SAME),
    attention("groups", [Q, KV, KV]),
    attention("flat", FLAT, attrs=HEADS),
    attention("flat-groups-of-one", [(2, 3, 8), (2, 5, 8), (2, 5, 4)],
              attrs={"q_num_heads": 2, "kv_num_heads": 2}),
    attention("scale-softcap", SAME, attrs={"scale": 0.7, "softcap": 0.5}),
    attention("causal", [(1, 2, 4, 3), (1, 2, 4, 3), (1, 2, 4, 3)], attrs={"is_causal": 1}),
    attention("bool-mask", [*SAME, MASK]),
    attention("float-mask", [*SAME, (2, 1, 3, 5)]),
    attention("float-mask-that-hides", [
        *SAME, np.where(MASK, 0, -np.inf).astype(np.float32)], wrt=[0, 1, 2]),
    attention("mask-and-causal", [*SAME, MASK], attrs={"is_causal": 1}),
    attention("past", [Q, KV, KV, None, (2, 2, 4, 6), (2, 2, 4, 6)], outputs=3,
              attrs={"is_causal": 1}),
    attention("present-key", [*SAME, None, (2, 2, 4, 4), (2, 2, 4, 3)], outputs=3, of=1,
              wrt=[1, 4]),
    attention("softmax-precision", SAME, attrs={"softmax_precision": 1}, second_opinion=False),
    attention("nonpad", [*SAME, None, None, None, np.array([3, 5])], opset=24),
    attention("nonpad-causal", [*SAME, None, None, None, np.array([2, 5])], opset=24,
              attrs={"is_causal": 1}),
    *(
        attention(f"scores-{mode}", SAME, outputs=4, of=3, wrt=[0, 1],
                  attrs={"softcap": 0.5, "qk_matmul_output_mode": mode})
        for mode in (1, 2, 3)
    ),
    rotary("4d", [(2, 2, 3, 8), COS, SIN]),
    rotary("4d-interleaved", [(2, 2, 3, 8), COS, SIN], interleaved=1),
    rotary("positions", [(2, 2, 3, 8), *TABLE]),
    rotary("flat", [(2, 3, 16), *TABLE], num_heads=2),
    rotary("flat-interleaved", [(2, 3, 16), *TABLE], num_heads=2, interleaved=1),
    rotary("partial", [(2, 2, 3, 12), *TABLE], rotary_embedding_dim=8),
    rotary("partial-flat", [(2, 3, 24), *TABLE], rotary_embedding_dim=8, num_heads=2),
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_gradient(spec: Spec) -> None:
    check_spec(spec)


@pytest.mark.parametrize("spec", [s for s in SPECS if s.symbolic], ids=ids)
def test_gradient_with_symbolic_dimensions(spec: Spec) -> None:
    check_spec(spec, symbolic=True)
