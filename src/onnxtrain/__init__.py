"""On-device training for ONNX models, on the stock onnxruntime.

The names a user starts with. What needs `onnx` (the workstation half) is imported when it is
first used, so that `import onnxtrain` on a device needs numpy and onnxruntime alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from onnxtrain.errors import OnnxTrainError

if TYPE_CHECKING:
    from onnxtrain.autodiff.gradient import gradient
    from onnxtrain.inspection import inspect

__version__ = "0.1.0"
__all__ = ["OnnxTrainError", "__version__", "gradient", "inspect"]

_LAZY = {"gradient": "onnxtrain.autodiff.gradient", "inspect": "onnxtrain.inspection"}


def __getattr__(name: str) -> Any:
    """Import a name of the workstation half on first use."""
    if name not in _LAZY:
        raise AttributeError(f"module 'onnxtrain' has no attribute {name!r}")
    try:
        value = getattr(import_module(_LAZY[name]), name)
    except ModuleNotFoundError as missing:
        if missing.name not in ("onnx", "onnx_ir"):
            raise
        raise OnnxTrainError(
            f"onnxtrain.{name} prepares models and needs the packages onnx and onnx_ir: "
            "pip install 'onnxtrain[offline]'"
        ) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
