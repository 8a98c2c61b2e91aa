"""Specs of rules/attention.py, and of operators of its kind that have a function body."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

import onnxtrain
from gradcheck import Spec, check_spec, ids

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
    # second opinion: the softmax is computed in float32
    attention("softmax-precision", SAME, attrs={"softmax_precision": 1}, second_opinion=False),
    attention("nonpad", [*SAME, None, None, None, np.array([3, 5])], opset=24),
    attention("nonpad-causal", [*SAME, None, None, None, np.array([2, 5])], opset=24,
              attrs={"is_causal": 1}),
    *(
        # second opinion: the evaluator caps the scores of mode 0 too
        attention(f"scores-{mode}", SAME, outputs=4, of=3, wrt=[0, 1], second_opinion=mode > 0,
                  attrs={"softcap": 0.5, "qk_matmul_output_mode": mode})
        for mode in range(4)
    ),
    attention("probabilities-hidden", [*SAME, MASK], outputs=4, of=3, wrt=[0, 1],
              attrs={"qk_matmul_output_mode": 3}),
    attention("short-mask", [*SAME, MASK[:, :3], None, None, np.array([2, 3])], opset=24,
              on_ort=False),
    attention("window", SAME, opset=25, on_ort=False,
              attrs={"left_window_size": 1, "right_window_size": 1}),
    attention("window-past", [Q, KV, KV, None, (2, 2, 4, 6), (2, 2, 4, 6)], outputs=3, opset=25,
              on_ort=False, attrs={"left_window_size": 2, "is_causal": 1}),
    Spec("SwiGLU", [(2, 3, 4), (2, 3, 4)], {"alpha": 0.7}, opset=28, on_ort=False, expanded=True),
    *(
        # second opinion: not defined for float64; symbolic: the body needs the number of channels
        Spec("CausalConvWithState", inputs, attrs, id=id, outputs=2, opset=27, on_ort=False,
             expanded=True, second_opinion=False, symbolic=False, of=of, wrt=wrt)
        for id, inputs, attrs, of, wrt in [
            ("plain", [(2, 4, 5), (4, 1, 3)], {}, 0, None),
            ("silu", [(2, 4, 5), (4, 1, 3), (4,), (2, 4, 2)], {"activation": "silu"}, 0, None),
            ("state", [(2, 4, 5), (4, 1, 3), None, (2, 4, 2)], {}, 1, [0]),
        ]
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


@pytest.mark.slow
@pytest.mark.parametrize("spec", [s for s in SPECS if s.symbolic], ids=ids)
def test_gradient_with_symbolic_dimensions(spec: Spec) -> None:
    check_spec(spec, symbolic=True)


# ---- against torch ------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_equals_torch(causal: bool, masked: bool) -> None:
    rng = np.random.default_rng(0)
    shapes = {"q": (2, 4, 5, 8), "k": (2, 2, 5, 8), "v": (2, 2, 5, 8)}
    feeds = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    mask = rng.integers(0, 2, (5, 5)).astype(bool) | np.eye(5, dtype=bool)
    visible = (mask if masked else True) & (np.tril(np.ones((5, 5), bool)) if causal else True)
    text = ", ".join(f"float[B, {h}, S, 8] {n}" for n, (_, h, _, _) in shapes.items())
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 23]>
        g ({text}, bool[S, S] mask) => (float[B, 4, S, 8] y) {{
            y = Attention <is_causal = {int(causal)}> (q, k, v{", mask" if masked else ""})
        }}"""
    )
    ct = rng.standard_normal((2, 4, 5, 8)).astype(np.float32)
    gradient = onnxtrain.gradient(model, ["q", "k", "v"])
    session = ort.InferenceSession(gradient.SerializeToString())
    wanted = {i.name for i in session.get_inputs()}
    given = {**feeds, "mask": mask, "y_grad": ct}
    results = session.run(None, {k: v for k, v in given.items() if k in wanted})
    tensors = {
        n: torch.tensor(x, dtype=torch.float64, requires_grad=True) for n, x in feeds.items()
    }
    y = torch.nn.functional.scaled_dot_product_attention(
        *tensors.values(), attn_mask=torch.tensor(np.broadcast_to(visible, (5, 5))),
        enable_gqa=True,
    )  # fmt: skip
    y.backward(torch.tensor(ct, dtype=torch.float64))
    expected = [y.detach(), *(t.grad for t in tensors.values())]
    for actual, tensor in zip(results, expected, strict=True):
        np.testing.assert_allclose(actual, tensor.numpy(), rtol=1e-4, atol=1e-5)
