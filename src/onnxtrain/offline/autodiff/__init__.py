"""Differentiation of ONNX models into plain ONNX.

`gradient` is the function for users; `rule`, `zero_gradient` and `Ops` are for those who teach it
an operator of their own.
"""

from onnxtrain.offline.autodiff.registry import refuse, rule, zero_gradient
from onnxtrain.offline.gradient import gradient
from onnxtrain.offline.graph.ops import Ops

__all__ = ["Ops", "gradient", "refuse", "rule", "zero_gradient"]
