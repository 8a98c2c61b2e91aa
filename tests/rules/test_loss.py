"""Specs of rules/loss.py."""

import numpy as np
import pytest
from gradcheck import Spec, check_spec, ids

LABELS = np.array([2, 0, 3, 2], np.int64)
IMAGE = np.arange(12).reshape(2, 2, 3) * 7 % 5  # labels of 5 classes
VOLUME = np.arange(16).reshape(2, 2, 2, 2) * 5 % 3
WEIGHTS = np.array([0.5, 2.0, 1.0, 0.25, 1.5], np.float32)


def some_ignored(labels: np.ndarray, index: int = -100) -> np.ndarray:
    return np.where(np.arange(labels.size).reshape(labels.shape) % 3 == 1, index, labels)


def losses(op: str) -> list[Spec]:
    return [
        Spec(op, [(4, 5), LABELS]),
        Spec(op, [(4, 5), LABELS.astype(np.int32)], id="int32"),
        Spec(op, [(4, 5), LABELS], {"reduction": "sum"}, id="sum"),
        Spec(op, [(4, 5), LABELS], {"reduction": "none"}, id="none"),
        Spec(op, [(4, 5), LABELS, WEIGHTS], id="weights", wrt=[0]),
        Spec(op, [(4, 5), LABELS, WEIGHTS], {"reduction": "sum"}, id="weights-sum", wrt=[0]),
        Spec(op, [(4, 5), LABELS, WEIGHTS], {"reduction": "none"}, id="weights-none", wrt=[0]),
        Spec(op, [(4, 5), some_ignored(LABELS)], {"ignore_index": -100}, id="ignore"),
        Spec(op, [(4, 5), some_ignored(LABELS).astype(np.int32)], {"ignore_index": -100},
             id="ignore-int32"),
        Spec(op, [(4, 5), LABELS], {"ignore_index": 2}, id="ignore-a-class"),
        Spec(op, [(4, 5), some_ignored(LABELS, 255), WEIGHTS], {"ignore_index": 255},
             id="ignore-weights", wrt=[0]),
        Spec(op, [(4, 5), some_ignored(LABELS), WEIGHTS],
             {"ignore_index": -100, "reduction": "none"}, id="ignore-weights-none", wrt=[0]),
        Spec(op, [(2, 5, 2, 3), IMAGE], id="4d"),
        Spec(op, [(2, 5, 2, 3), some_ignored(IMAGE), WEIGHTS], {"ignore_index": -100},
             id="4d-ignore-weights", wrt=[0]),
        Spec(op, [(2, 3, 2, 2, 2), VOLUME], {"reduction": "none"}, id="5d-none"),
    ]  # fmt: skip


SPECS = [
    Spec("Softmax", [(3, 4)]),
    Spec("Softmax", [(2, 3, 4)], {"axis": 1}, id="axis"),
    Spec("Softmax", [(2, 3)], {"axis": -2}, id="negative-axis"),
    Spec("LogSoftmax", [(3, 4)]),
    Spec("LogSoftmax", [(2, 3, 4)], {"axis": 1}, id="axis"),
    *losses("SoftmaxCrossEntropyLoss"),
    Spec("SoftmaxCrossEntropyLoss", [(4, 5), LABELS], outputs=2, id="two-outputs"),
    Spec("SoftmaxCrossEntropyLoss", [(4, 5), LABELS], outputs=2, of=1, id="log-prob"),
    Spec("SoftmaxCrossEntropyLoss", [(2, 5, 2, 3), IMAGE], outputs=2, of=1, id="log-prob-4d"),
    *losses("NegativeLogLikelihoodLoss"),
]


@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_gradient(spec: Spec) -> None:
    check_spec(spec)


@pytest.mark.parametrize("spec", [s for s in SPECS if s.symbolic], ids=ids)
def test_gradient_with_symbolic_dimensions(spec: Spec) -> None:
    check_spec(spec, symbolic=True)
