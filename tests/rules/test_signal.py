"""Specs of rules/signal.py."""

import numpy as np
import pytest

from gradcheck import Spec, check_spec, ids

AXIS1, LENGTH8, LENGTH4 = (np.array(n) for n in (1, 8, 4))
SPECS = [
    Spec("DFT", [(2, 6, 1)], {"axis": 1}, id="real-17", eps=1.0, opset=18),
    Spec("DFT", [(2, 6, 2), None, AXIS1], id="complex", eps=1.0, opset=20, constants=(2,)),
    Spec("DFT", [(2, 3, 6, 2)], id="default-axis", eps=1.0, opset=20),
    Spec("DFT", [(2, 6, 1), None, AXIS1], {"onesided": 1}, id="onesided", eps=1.0, opset=20,
         constants=(2,)),
    Spec("DFT", [(2, 5, 1), None, AXIS1], {"onesided": 1}, id="onesided-odd", eps=1.0, opset=20,
         constants=(2,)),
    Spec("DFT", [(2, 6, 2), None, AXIS1], {"inverse": 1}, id="inverse", eps=1.0, opset=20,
         constants=(2,)),
    Spec("DFT", [(2, 6, 1), LENGTH8, AXIS1], id="padded", eps=1.0, opset=20, constants=(1, 2)),
    Spec("DFT", [(2, 6, 1), LENGTH4, AXIS1], id="cut", eps=1.0, opset=20, constants=(1, 2)),
    Spec("DFT", [(2, 6, 1), LENGTH4, AXIS1], {"onesided": 1}, id="cut-onesided", eps=1.0, opset=20,
         constants=(1, 2)),
    Spec("DFT", [(2, 4, 2), None, AXIS1], {"inverse": 1, "onesided": 1}, id="real-inverse", eps=1.0,
         opset=20, constants=(2,)),
    Spec("DFT", [(2, 4, 2), np.array(7), AXIS1], {"inverse": 1, "onesided": 1}, eps=1.0, opset=20,
         id="real-inverse-odd", constants=(1, 2)),
    Spec("DFT", [(2, 6, 3, 2), None, AXIS1], id="axis-at-run-time", eps=1.0, opset=20),
    Spec("DFT", [(2, 6, 1), LENGTH4, np.array(-2)], {"onesided": 1}, id="last-axis-at-run-time",
         eps=1.0, opset=20),
    Spec("DFT", [(4, 3, 2), np.array(7), np.array(0)], {"inverse": 1, "onesided": 1}, eps=1.0,
         opset=20, id="first-axis-at-run-time"),
    Spec("STFT", [(2, 20, 1), np.array(3), (8,)], id="window", eps=1.0, constants=(1,)),
    Spec("STFT", [(2, 20, 1), np.array(3), None, np.array(8)], id="frame-length", eps=1.0,
         constants=(1, 3)),
    Spec("STFT", [(2, 20, 1), np.array(4), (8,), np.array(8)], {"onesided": 0}, id="twosided",
         eps=1.0, constants=(1, 3)),
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_gradient(spec: Spec) -> None:
    check_spec(spec)


@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_gradient_with_symbolic_dimensions(spec: Spec) -> None:
    check_spec(spec, symbolic=True)
