"""Specs of rules/norm.py and rules/batch_norm.py."""

import numpy as np
import pytest
from gradcheck import Spec, check_spec, ids

LAYER = "LayerNormalization"
GROUP = "GroupNormalization"

SPECS = [
    Spec(LAYER, [(3, 4), (4,), (4,)]),
    Spec(LAYER, [(2, 3, 4), (4,)], id="no-bias"),
    Spec(LAYER, [(2, 3, 4), (3, 4), (3, 4)], {"axis": 1, "epsilon": 0.1}, id="two-axes"),
    Spec(LAYER, [(2, 3, 4), (2, 3, 4)], {"axis": 0}, id="all-axes"),
    Spec(LAYER, [(2, 3, 4), (3, 4), (3, 4)], {"axis": -2}, outputs=3, id="three-outputs"),
    Spec(LAYER, [(2, 3, 4), (4,), (4,)], outputs=3, of=1, wrt=[0], id="mean",
         second_opinion=False),
    Spec(LAYER, [(2, 3, 4), (4,), (4,)], outputs=3, of=2, wrt=[0], id="inv-std",
         second_opinion=False),
    Spec(LAYER, [(2, 3, 4), (4,), (4,)], outputs=2, of=1, wrt=[0], id="mean-of-two-outputs",
         second_opinion=False),
    Spec(LAYER, [(2, 3, 4), (1, 4), (4,)], {"axis": 1}, id="scale-broadcast"),
    Spec(LAYER, [(2, 3, 4), (2, 1, 4), (2, 1, 4)], id="scale-by-sample"),
    Spec("RMSNormalization", [(3, 4), (4,)], opset=23),
    Spec("RMSNormalization", [(2, 3, 4), (3, 4)], {"axis": 1, "epsilon": 0.1}, opset=23,
         id="two-axes"),
    Spec("RMSNormalization", [(2, 3, 4), (1,)], opset=23, id="scale-broadcast"),
    Spec(GROUP, [(2, 4, 3, 2), (2,), (2,)], {"num_groups": 2}, id="scale-by-group"),
    Spec(GROUP, [(2, 4, 3, 2), (4,), (4,)], {"num_groups": 2, "epsilon": 0.1}, opset=21),
    Spec(GROUP, [(2, 6, 3), (6,), (6,)], {"num_groups": 3}, opset=21, id="1d"),
    Spec(GROUP, [(2, 6), (6,), (6,)], {"num_groups": 1}, opset=21, id="2d-one-group"),
    Spec("InstanceNormalization", [(2, 3, 4, 2), (3,), (3,)]),
    Spec("InstanceNormalization", [(2, 3, 5), (3,), (3,)], {"epsilon": 0.1}, id="1d", opset=22),
    Spec("InstanceNormalization", [(2, 3, 2, 2, 2), (3,), (3,)], id="3d"),
    Spec("MeanVarianceNormalization", [(2, 3, 4, 2)]),
    Spec("MeanVarianceNormalization", [(4, 3)], {"axes": [0]}, id="axes"),
    Spec("MeanVarianceNormalization", [(2, 3, 4)], {"axes": [-1, 1]}, id="negative-axes"),
    Spec("LpNormalization", [(3, 4)]),
    Spec("LpNormalization", [(2, 3, 4)], {"axis": 1, "p": 1}, id="p1", away_from=(0,)),
    Spec("LRN", [(2, 5, 3, 2)], {"size": 3, "alpha": 0.5}),
    Spec("LRN", [(2, 5, 4)], {"size": 4, "alpha": 0.5, "beta": 0.5, "bias": 2.0}, id="even"),
    Spec("LRN", [(2, 3, 2, 2)], {"size": 7, "alpha": 0.5}, id="wider-than-channels"),
]


@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_gradient(spec: Spec) -> None:
    check_spec(spec)


@pytest.mark.parametrize("spec", [s for s in SPECS if s.symbolic], ids=ids)
def test_gradient_with_symbolic_dimensions(spec: Spec) -> None:
    check_spec(spec, symbolic=True)
