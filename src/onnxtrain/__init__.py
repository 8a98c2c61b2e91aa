"""On-device training for ONNX models, on the stock onnxruntime.

The names a user starts with. Each is imported when it is first used: what needs `onnx` is the
workstation half, so that `import onnxtrain` on a device needs numpy and onnxruntime alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from onnxtrain.errors import OnnxTrainError

if TYPE_CHECKING:
    from onnxtrain.device.loop import EarlyStopping, evaluate, fit
    from onnxtrain.device.loop.history import History
    from onnxtrain.device.random_state import set_seed
    from onnxtrain.device.session import TrainingSession
    from onnxtrain.offline.gradient import gradient
    from onnxtrain.offline.inspect import inspect

__version__ = "0.1.0"
__all__ = [
    "EarlyStopping",
    "History",
    "OnnxTrainError",
    "TrainingSession",
    "__version__",
    "evaluate",
    "fit",
    "gradient",
    "inspect",
    "set_seed",
]

_DEVICE = {
    "EarlyStopping": "onnxtrain.device.loop",
    "History": "onnxtrain.device.loop.history",
    "TrainingSession": "onnxtrain.device.session",
    "evaluate": "onnxtrain.device.loop",
    "fit": "onnxtrain.device.loop",
    "set_seed": "onnxtrain.device.random_state",
}
_WORKSTATION = {"gradient": "onnxtrain.offline.gradient", "inspect": "onnxtrain.offline.inspect"}


def __getattr__(name: str) -> Any:
    """Import a name on first use."""
    module = _DEVICE.get(name) or _WORKSTATION.get(name)
    if module is None:
        raise AttributeError(f"module 'onnxtrain' has no attribute {name!r}")
    try:
        value = getattr(import_module(module), name)
    except ModuleNotFoundError as missing:
        if missing.name not in ("onnx", "onnx_ir") or name in _DEVICE:
            raise
        raise OnnxTrainError(
            f"onnxtrain.{name} prepares models and needs the packages onnx and onnx_ir: "
            "pip install 'onnxtrain[offline]'"
        ) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
