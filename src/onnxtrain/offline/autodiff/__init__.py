"""Differentiation of ONNX models into plain ONNX.

`rule`, `zero_gradient` and `Ops` are for those who teach it an operator of their own; users call
`onnxtrain.gradient`.
"""

from importlib import import_module
from typing import Any

from onnxtrain.offline.autodiff.registry import refuse, rule, zero_gradient
from onnxtrain.offline.graph.ops import Ops

__all__ = ["Ops", "refuse", "rule", "zero_gradient"]


def __getattr__(name: str) -> Any:
    """Return `onnxtrain.gradient`, which was once part of this module."""
    if name != "gradient":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("onnxtrain.offline.gradient").gradient
