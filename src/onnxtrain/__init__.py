"""On-device training for ONNX models, on the stock onnxruntime.

The names a user starts with. Each is imported when it is first used: a device needs numpy and
onnxruntime alone; `onnx` is needed by the names that prepare models, on a workstation.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from onnxtrain.errors import OnnxTrainError
from onnxtrain.moved import install

if TYPE_CHECKING:
    from onnxtrain import artifacts, federated, onnxblock
    from onnxtrain.device import schedules
    from onnxtrain.device.loop import (
        CheckFinite,
        EarlyStopping,
        History,
        SaveCheckpoint,
        TensorBoard,
        evaluate,
        fit,
        metrics,
    )
    from onnxtrain.device.predict import predict
    from onnxtrain.device.random_state import set_seed
    from onnxtrain.device.session import TrainingSession
    from onnxtrain.offline import losses
    from onnxtrain.offline import optimizers as optim
    from onnxtrain.offline.gradient import gradient
    from onnxtrain.offline.graph.limits import Limits
    from onnxtrain.offline.inspect import inspect
    from onnxtrain.offline.lora import Lora
    from onnxtrain.offline.passes.replace_classifier import replace_classifier
    from onnxtrain.offline.prepare import prepare

__version__ = "0.1.0"

__all__ = [
    "CheckFinite",
    "EarlyStopping",
    "History",
    "Limits",
    "Lora",
    "OnnxTrainError",
    "SaveCheckpoint",
    "TensorBoard",
    "TrainingSession",
    "__version__",
    "artifacts",
    "evaluate",
    "federated",
    "fit",
    "gradient",
    "inspect",
    "losses",
    "metrics",
    "onnxblock",
    "optim",
    "predict",
    "prepare",
    "replace_classifier",
    "schedules",
    "set_seed",
]

# The names that are not modules of this package, by where they are defined.
_LOOP = "CheckFinite EarlyStopping History SaveCheckpoint TensorBoard evaluate fit".split()
_HOMES = dict.fromkeys(_LOOP, "onnxtrain.device.loop") | {
    "Limits": "onnxtrain.offline.graph.limits",
    "Lora": "onnxtrain.offline.lora",
    "TrainingSession": "onnxtrain.device.session",
    "gradient": "onnxtrain.offline.gradient",
    "inspect": "onnxtrain.offline.inspect",
    "predict": "onnxtrain.device.predict",
    "prepare": "onnxtrain.offline.prepare",
    "replace_classifier": "onnxtrain.offline.passes.replace_classifier",
    "set_seed": "onnxtrain.device.random_state",
}
install()


def __getattr__(name: str) -> Any:
    """Import a name on first use."""
    if name not in __all__:
        raise AttributeError(f"module 'onnxtrain' has no attribute {name!r}")
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        value = import_module(f"onnxtrain.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
