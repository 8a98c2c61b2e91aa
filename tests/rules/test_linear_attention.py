"""Specs of rules/linear_attention.py."""

import onnx
import pytest

import gradcheck
from gradcheck import Spec, check_spec, ids

STATE, BY_KEY, BY_HEAD = (2, 2, 3, 2), (2, 3, 6), (2, 3, 2)
SPECS = [
    # second opinion: not defined for float64. On onnxruntime: see below.
    Spec(
        "LinearAttention", [(2, 3, 12), (2, 3, 6), (2, 3, 4), *more],
        {"q_num_heads": 4, "kv_num_heads": 2, "update_rule": kind, **attrs}, id=id, outputs=2,
        of=of, wrt=wrt, opset=27, on_ort=False, second_opinion=False, domain=(-1.0, 1.0),
    )
    for id, kind, more, attrs, of, wrt in [
        ("linear", "linear", [], {}, 0, None),
        ("linear-past", "linear", [STATE], {"scale": 0.3}, 0, None),
        ("gated", "gated", [None, BY_KEY], {}, 0, None),
        ("gated-heads", "gated", [STATE, BY_HEAD], {}, 0, None),
        ("delta", "delta", [None, None, BY_HEAD], {}, 0, None),
        ("delta-of-one", "delta", [STATE, None, (2, 3, 1)], {}, 0, None),
        ("gated-delta", "gated_delta", [STATE, BY_KEY, BY_HEAD], {}, 0, None),
        ("gated-delta-heads", "gated_delta", [None, BY_HEAD, BY_HEAD], {}, 0, None),
        ("state", "gated_delta", [STATE, BY_KEY, BY_HEAD], {}, 1, [1, 2, 3, 4, 5]),
    ]
]  # fmt: skip


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_gradient(spec: Spec, symbolic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # The reference evaluator has no Scan against the sequence; onnxruntime has the operator in its
    # own domain only.
    monkeypatch.setattr(gradcheck, "_run_reference", run_in_own_domain)
    check_spec(spec, symbolic)


def run_in_own_domain(model: onnx.ModelProto, feeds):
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for node in copy.graph.node:
        if node.op_type == "LinearAttention":
            node.domain = "com.microsoft"
    copy.opset_import[0].version = gradcheck.NEWEST_RUNNABLE_OPSET
    copy.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    copy.ir_version = 10
    return gradcheck.run(copy, feeds)
