"""Differentiation of ONNX models into plain ONNX.

`gradient` is the function for users; `rule`, `zero_gradient` and `Ops` are for those who teach it
an operator of their own.
"""

from onnxtrain.autodiff.gradient import gradient
from onnxtrain.autodiff.ops import Ops
from onnxtrain.autodiff.registry import refuse, rule, zero_gradient

__all__ = ["Ops", "gradient", "refuse", "rule", "zero_gradient"]
