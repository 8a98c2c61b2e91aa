"""Differentiation of ONNX models into plain ONNX.

`rule`, `zero_gradient` and `Ops` are for those who teach it an operator of their own; users call
`onnxtrain.gradient`.
"""

from onnxtrain.offline.autodiff.registry import refuse, rule, zero_gradient
from onnxtrain.offline.graph.ops import Ops

__all__ = ["Ops", "refuse", "rule", "zero_gradient"]
